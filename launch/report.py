"""Results: one JSON line for each finished run in results/, and the README's tables made from them.

python -m launch.report --collect=runs/quickstart/seed0 [--collect=...]    adds or replaces their lines
python -m launch.report                                                     writes the README's tables again
python -m launch.report rescore --workdir=D --rewards=success=1,f1=0.2      another reward for D's episodes (rescore.py)
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from launch import cli
from launch.plan import make_plan
from launch.workdir import config_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
BEGIN, END = "<!-- results: generated from results/*.jsonl by launch.report -->", "<!-- end of results -->"
SWEEP = "sweep_"  # files of launch.sweep
COLUMNS = {  # facts that have one in a sweep's table, where every line has them
    "success_after_fork": "after a fork",  # success of the episodes that met one
    "majority": "majority of all samples",  # launch.ttrl: success of the answer by voting
}
WHENS = {"before": "warm start", "after": "+ GRPO", "sft_only": "warm start alone, same minutes"}


FACTS = {  # told an episode, over all kinds of question
    "empty_results": "empty results",
    "recovered": "searches that found something after one that did not",
}


def line_of(result: dict) -> dict:
    """What results/ keeps of a result.json."""
    kept = ("seed", "commit", "n_tasks", "demo_success", "minutes")
    details = result["details"]
    return {name: result[name] for name in kept} | {
        when: {
            "sampled": details[when]["sampled"]["success"],
            "greedy": details[when]["greedy"]["success"],
            "searches": details[when]["sampled"]["searches"],
            "families": {
                family: {"success": own["success"], "searches": own["searches"], "n": own["n"]}
                for family, own in details[when]["sampled"]["families"].items()
            },
            "recovered": details[when]["sampled"]["facts"].get("recovered"),
            "empty_results": details[when]["sampled"]["facts"].get("empty_results"),
        }
        for when in WHENS
        if when in details
    }


def collect(folders: Sequence[Path], file: Path) -> None:
    """Add the results of `folders` to `file`; a line of the same seed is replaced. Errors: ConfigError."""
    lines = {line["seed"]: line for line in read(file)}
    for folder in folders:
        if not (folder / "result.json").exists():
            raise cli.ConfigError(f"--collect: no {folder / 'result.json'}; want folders of finished runs")
        result = json.loads((folder / "result.json").read_text())
        if "after" not in result.get("details", {}):
            raise cli.ConfigError(f"--collect: {folder} is not finished; the command that began it goes on from there")
        line = line_of(result)
        lines[line["seed"]] = line
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(lines[seed]) + "\n" for seed in sorted(lines)))


def read(file: Path) -> list[dict]:
    """The lines of a results file; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def all_tables(results: Path) -> str:
    """The tables of every experiment in `results`, each under its name."""
    files = sorted(results.glob("*.jsonl"))
    runs = [f"### {file.stem}\n\n{tables(read(file))}" for file in files if not file.stem.startswith(SWEEP)]
    sweeps = [
        f"### {file.stem.removeprefix(SWEEP)}\n\n{sweep_table(read(file))}"
        for file in files
        if file.stem.startswith(SWEEP)
    ]
    return "\n\n".join(runs + sweeps) or tables([])


def tables(lines: Sequence[dict]) -> str:
    """Two tables over the seeds of one experiment: success by stage, and by kind of question."""
    if not lines:
        return "No finished run yet: `make evidence`."
    whens = [when for when in WHENS if all(when in line for line in lines)]
    rows = ["| held-out success | seeds: sampled (greedy) | sampled, mean ± sd | searches |", "|---|---|---|---|"]
    for when in whens:
        own = [line[when] for line in lines]
        each = ", ".join(f"{o['sampled']:.3f} ({o['greedy']:.3f})" for o in own)
        sampled, searches = (_spread([o[name] for o in own]) for name in ("sampled", "searches"))
        rows.append(f"| {WHENS[when]} | {each} | {sampled} | {searches} |")
    rows += [
        "",
        "| by kind of question | " + " | ".join(WHENS[when] for when in whens) + " | searches before → after |",
    ]
    rows.append("|---" * (len(whens) + 2) + "|")
    for family in sorted(lines[0]["after"]["families"]):
        cells = [_spread([line[when]["families"][family]["success"] for line in lines]) for when in whens]
        searches = [
            _mean([line[when]["families"][family]["searches"] for line in lines]) for when in ("before", "after")
        ]
        rows.append(f"| {family} | " + " | ".join(cells) + f" | {' → '.join(filter(None, searches))} |")
    for name, text in FACTS.items():
        if all(line[when].get(name) is not None for line in lines for when in whens):
            own = [statistics.mean(line[when][name] for line in lines) for when in whens]
            rows.append(f"| *{text}* | " + " | ".join(f"{value:.3f}" for value in own) + " | |")
    minutes = ", ".join(f"{line['minutes']['total']:.1f}" for line in lines)
    demos = ", ".join(f"{line['demo_success']:.2f}" for line in lines)
    commits = sorted({_short(commit) for line in lines for commit in line["commit"].split(" ")})
    rows += [
        "",
        f"Seeds {', '.join(str(line['seed']) for line in lines)}; {lines[0]['n_tasks']} held-out tasks each; minutes "
        f"of `launch.quickstart`: {minutes}; demonstrations succeed {demos}; commit {', '.join(commits)}.",
    ]
    return "\n".join(rows)


def sweep_table(lines: Sequence[dict]) -> str:
    """One row an arm of launch.sweep over its seeds, below the warm start that they share, or each below its own."""
    measures = list(lines[0]["after"])
    head = [f"{name}: sampled, mean ± sd (each)" if name else "sampled, mean ± sd (each)" for name in measures]
    stages = [line[when] for line in lines for when in ("before", "after")]
    told = [
        (name, fact)
        for fact in COLUMNS
        for name in measures
        if all(stage[name]["facts"].get(fact) is not None for stage in stages)
    ]
    head += [f"{name}: {COLUMNS[fact]}".removeprefix(": ") for name, fact in told]
    rows = ["| held-out success | " + " | ".join([*head, "greedy", "searches", "episodes", "minutes"]) + " |"]
    rows.append("|---" * (len(head) + 5) + "|")

    def cells(stages: Sequence[dict]) -> list[str]:
        own = [[stage[name]["sampled"] for stage in stages] for name in measures]
        sampled = [f"{_spread(values)} ({', '.join(f'{value:.3f}' for value in values)})" for values in own]
        first = [stage[measures[0]] for stage in stages]
        sampled += [_spread([stage[name]["facts"][fact] for stage in stages]) for name, fact in told]
        return [*sampled, _spread([own["greedy"] for own in first]), _mean([own["searches"] for own in first])]

    starts = {line["seed"]: line["before"] for line in lines}
    shared = all(line["before"] == starts[line["seed"]] for line in lines)
    if shared:
        rows.append(
            "| *warm start* | " + " | ".join([*cells([starts[seed] for seed in sorted(starts)]), "", ""]) + " |"
        )
    for arm in dict.fromkeys(line["arm"] for line in lines):
        own = sorted((line for line in lines if line["arm"] == arm), key=lambda line: line["seed"])
        if not shared:
            rows.append(f"| *before: {arm}* | " + " | ".join([*cells([line["before"] for line in own]), "", ""]) + " |")
        episodes, minutes = (statistics.mean(line[name] for line in own) for name in ("episodes", "minutes"))
        seeds = [line["seed"] for line in own]
        name = arm if seeds == sorted(starts) else f"{arm} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})"
        rows.append(
            f"| {name} | " + " | ".join(cells([line["after"] for line in own])) + f" | {episodes:.0f} | {minutes:.1f} |"
        )
    commits = sorted({_short(line["commit"]) for line in lines})
    tasks = lines[0]["after"][measures[0]]["n_tasks"]
    rows += [
        "",
        f"Seeds {', '.join(map(str, sorted(starts)))}; {tasks} held-out tasks each; commit {', '.join(commits)}.",
    ]
    return "\n".join(rows)


def _short(commit: str) -> str:
    """Twelve digits, and whether the tree was another than the commit's."""
    return commit[:12] + ("+diff" if commit.endswith("+diff") else "")


def _mean(values: Sequence[float | None]) -> str:
    """Empty where there is none: not every world counts it."""
    return "" if None in values else f"{statistics.mean(values):.2f}"


def _spread(values: Sequence[float | None]) -> str:
    """Empty where a world has no such number."""
    if None in values:
        return ""
    sd = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""  # one seed has none
    return f"{statistics.mean(values):.3f}{sd}"


def with_tables(readme: str, text: str) -> str:
    """`readme` with `text` between its two markers."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise cli.ConfigError(f"README.md: want the lines {BEGIN!r} and {END!r} around the tables")
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def rescored() -> None:
    """Prints what another reward would have said, and writes it by episode."""
    from launch import recipe, rescore  # starts jax

    given = flags.FLAGS
    with cli.validating():
        workdir = Path(cli.want_workdir(given.workdir))
        how = {"reach": given.reach, "options": given.option, "leader": given.leader}
        terms = rescore.terms_of(workdir, given.rewards, **how)
        plan = make_plan(config_of(workdir))
        records = rescore.rescore(workdir, terms, scale=plan.rl.scale, excluded=recipe.excluded(plan))
    out = Path(given.out) if given.out else workdir / "rescored.jsonl"
    rescore.write(records, out)
    print(rescore.tell(rescore.summary(records)))
    print(out)


def main(argv: Sequence[str]) -> None:
    if argv[1:] == ["rescore"]:
        rescored()
        return
    if argv[1:]:
        raise cli.ConfigError(f"got {argv[1:]}, want rescore, or flags only")
    by_file: dict[Path, list[Path]] = {}
    with cli.validating():
        for folder in map(Path, flags.FLAGS.collect):
            by_file.setdefault(RESULTS / f"{config_of(folder / 'rl')['name']}.jsonl", []).append(folder)
        for file, folders in by_file.items():
            collect(folders, file)
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(), all_tables(RESULTS)))
    print(all_tables(RESULTS))


if __name__ == "__main__":
    flags.DEFINE_multi_string("collect", [], "Folder of launch.quickstart whose result to add; may be repeated")
    cli.define_workdir()
    flags.DEFINE_string("rewards", "", "rescore: name=weight[,name=weight], terms of rl/rewards/terms.py or facts")
    flags.DEFINE_string("reach", "", "rescore: name=number[,...], the largest value of a fact that is a count")
    flags.DEFINE_multi_string("option", [], "rescore: NAME.KEY=JSON, an option of a term; may be repeated")
    flags.DEFINE_string("leader", "", "rescore: the term that is the outcome (default: the run's)")
    flags.DEFINE_string("out", "", "rescore: file to write (default: D/rescored.jsonl)")
    flags.FLAGS.set_gnu_getopt(True)  # flags may follow the word
    cli.run(main, positional=True)
