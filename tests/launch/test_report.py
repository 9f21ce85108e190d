"""The README's tables are what results/ says, and the arithmetic of the tables is right."""

import json

import pytest

from launch import quickstart, report


def line(seed, before, after):
    def stage(success):
        family = {"success": success, "searches": 1.0, "n": 5}
        return {"sampled": success, "greedy": success, "searches": 1.0, "families": {"hop1": family}}

    own = {"seed": seed, "commit": "abc", "n_tasks": 5, "demo_success": 0.3, "minutes": {"total": 6.0}}
    return own | {"before": stage(before), "after": stage(after)}


def test_readme_tables_are_generated_from_results():
    readme = (report.ROOT / "README.md").read_text()
    assert report.with_tables(readme, report.all_tables(report.RESULTS)) == readme, "run: python -m launch.report"


def test_tables_give_mean_and_sample_deviation():
    text = report.tables([line(0, 0.1, 0.5), line(1, 0.2, 0.7)])
    assert "| warm start | 0.100 (0.100), 0.200 (0.200) | 0.150 ± 0.071 | 1.000 ± 0.000 |" in text
    assert "| + GRPO | 0.500 (0.500), 0.700 (0.700) | 0.600 ± 0.141 | 1.000 ± 0.000 |" in text
    assert "| hop1 | 0.150 ± 0.071 | 0.600 ± 0.141 | 1.00 → 1.00 |" in text
    assert "sft_only" not in text


def test_a_world_without_searches_has_tables_too():
    """Those of the terminal, after a quickstart, and those of the README."""
    lines = [line(seed, 0.1, 0.5) for seed in (0, 1)]
    for own in [one[when] for one in lines for when in ("before", "after")]:
        own["searches"] = own["families"]["hop1"]["searches"] = own["recovered"] = own["empty_results"] = None
    text = report.tables(lines)
    assert "| warm start | 0.100 (0.100), 0.100 (0.100) | 0.100 ± 0.000 |  |" in text
    assert "| hop1 | 0.100 ± 0.000 | 0.500 ± 0.000 |  |" in text
    details = {}
    for when in ("before", "after"):
        summary = {"success": lines[0][when]["sampled"], **lines[0][when]}
        details[when] = {"sampled": summary, "greedy": summary}
    said = quickstart.table(lines[0] | {"details": details})
    assert "  hop1: sampled 0.100 -> 0.500, searches - -> - (n=5)" in said


def test_collect_replaces_the_line_of_a_seed(tmp_path):
    families = {"hop1": {"success": 0.5, "searches": 1.0, "n": 4, "turns": 2.0}}
    own = {"success": 0.5, "searches": 1.0, "families": families, "facts": {"recovered": 0.0}}
    details = {when: {"sampled": own, "greedy": own} for when in ("before", "after")}
    result = {
        "seed": 3,
        "commit": "x",
        "n_tasks": 4,
        "demo_success": 0.3,
        "minutes": {"total": 1.0},
        "details": details,
    }
    for commit in ("x", "y"):
        (tmp_path / "result.json").write_text(json.dumps(result | {"commit": commit}))
        report.collect([tmp_path], tmp_path / "r.jsonl")
    (only,) = report.read(tmp_path / "r.jsonl")
    assert only["commit"] == "y" and only["after"]["families"]["hop1"]["success"] == 0.5
    with pytest.raises(report.cli.ConfigError, match=r"no .*result\.json"):
        report.collect([tmp_path / "none"], tmp_path / "r.jsonl")
    (tmp_path / "result.json").write_text(json.dumps(result | {"details": {"before": {}}}))
    with pytest.raises(report.cli.ConfigError, match="is not finished"):
        report.collect([tmp_path], tmp_path / "r.jsonl")
    assert len(report.read(tmp_path / "r.jsonl")) == 1
