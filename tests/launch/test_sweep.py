"""A sweep: every arm of every seed once, from the seed's one warm start; what is finished is not run again."""

import json

import pytest

from launch import report, sweep
from launch.cli import ConfigError

TWO = """
def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            "small": {"config": "configs/search_grpo.py", "rl.group_size": 4},
            "paid": {"config": "configs/quickstart.py", "reward.terms.search_bonus": 0.1},
        },
        "shared": {"rl.steps": 3},
    }
"""


@pytest.fixture
def two(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    return sweep.load_sweep(tmp_path / "two.py")


def test_an_arm_is_its_config_with_what_the_sweep_sets(two):
    small, paid = (sweep.arm_config(two, arm, 7) for arm in ("small", "paid"))
    assert (small.rl.group_size, small.rl.kl_coef, small.rl.steps, small.seed) == (4, 0.04, 3, 7)
    assert dict(paid.reward.terms) == {"success": 1.0, "search_bonus": 0.1} and paid.rl.steps == 3
    assert two["arms"]["small"] == {"config": "configs/search_grpo.py", "rl.group_size": 4}, "the sweep is as it was"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_sweep(): return {'warm': 'w', 'arm': {}}", "got \\['arm'\\], want of warm, arms"),
        ("def get_sweep(): return {'warm': 'w', 'arms': {}}", "at least one of 'arms'"),
        (
            "def get_sweep(): return {'warm': 'w', 'arms': {'a': {'stage': 'r'}}}",
            "got stage 'r', want of train, sft, rft",
        ),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        sweep.load_sweep(tmp_path / "bad.py")
    with pytest.raises(ConfigError, match="no key 'rl.stepz'"):
        sweep.load_config("configs/quickstart.py", {"rl.stepz": 3}, 0)


def test_each_arm_runs_once_from_the_warm_start_of_its_seed(two, tmp_path, monkeypatch):
    ran = []

    def run_arm(_, arm, seed, workdir, warm):
        ran.append((arm, seed, warm.name))
        digest = sweep._digest(sweep.arm_config(two, arm, seed))
        stage = {"": {"n_tasks": 4, "sampled": 0.5 + seed / 10, "greedy": 0.75, "searches": 1.5, "facts": {}}}
        own = {"arm": arm, "seed": seed, "config": digest, "commit": "abc", "minutes": 1.5}
        workdir.mkdir(parents=True)
        return own | {"episodes": 12, "turns": 20, "after": stage}

    def warm_start(_, seed, root):
        (root / f"w{seed}").mkdir(parents=True, exist_ok=True)
        return root / f"w{seed}"

    monkeypatch.setattr(sweep, "run_arm", run_arm)
    monkeypatch.setattr(sweep, "warm_start", warm_start)
    first = {"": {"n_tasks": 4, "sampled": 0.25, "greedy": 0.5, "searches": None, "facts": {}}}
    monkeypatch.setattr(sweep, "measured", lambda *_: first)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    for _ in range(2):
        sweep.run(two, "two", tmp_path / "runs", tmp_path / "warm", [0, 1])
    assert ran == [("small", 0, "w0"), ("paid", 0, "w0"), ("small", 1, "w1"), ("paid", 1, "w1")]
    lines = report.read(tmp_path / "results" / "sweep_two.jsonl")
    assert [(line["arm"], line["seed"]) for line in lines] == [("small", 0), ("paid", 0), ("small", 1), ("paid", 1)]
    text = report.all_tables(tmp_path / "results")
    assert "### two" in text
    assert "| *warm start* | 0.250 ± 0.000 (0.250, 0.250) | 0.500 ± 0.000 |  |  |  |" in text
    assert "| small | 0.550 ± 0.071 (0.500, 0.600) | 0.750 ± 0.000 | 1.50 | 12 | 1.5 |" in text

    recovers = [  # a column more where every line says how the episodes with a fork ended
        {
            **line,
            **{when: {"": line[when][""] | {"facts": {"success_after_fork": 0.25}}} for when in ("before", "after")},
        }
        for line in lines
    ]
    assert "(each) | after a fork | greedy" in report.sweep_table(recovers)
    assert "| small | 0.550 ± 0.071 (0.500, 0.600) | 0.250 ± 0.000 | 0.750" in report.sweep_table(recovers)
    assert "after a fork" not in report.sweep_table([*recovers[1:], lines[0]])

    kept = tmp_path / "runs" / "paid" / "seed1" / "result.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"config": "other"}))
    with pytest.raises(ConfigError, match="result of another config"):
        sweep.run(two, "two", tmp_path / "runs", tmp_path / "warm", [1])
