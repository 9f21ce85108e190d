"""The main job: warm start → GRPO → evaluation on held-out entities, one seed. `make train` runs it.

    python -m launch.quickstart --config=configs/quickstart.py --workdir=runs/quickstart/seed0 [--seed=0] [--control]

Leaves D/sft and D/rl (runs of their own) and D/result.json. The held-out split is read before and after RL, and at no
other time. `--control` adds what `make evidence` compares with: D/sft_only, the same demonstrations for the same
minutes, without RL, and with the checkpoint that is best on validation, as RL has. A second launch goes on where the
first ended.
"""

import hashlib
import json
import time
from functools import partial
from pathlib import Path

from absl import flags

from launch import cli, sft
from launch.plan import Plan, make_plan


def run(config, plan: Plan, workdir: Path, *, control: bool) -> dict:
    """Every phase that D/result.json does not record yet, in order; returns what is in the file at the end."""
    from launch import build, evaluate, train
    from launch.workdir import git_commit, write_json

    path = workdir / "result.json"
    result = _begun(path, config)

    def demonstrations() -> None:
        demos = build.build_demonstrations(plan, build.build_world(plan))
        result["demo_success"] = sum(demo.success for demo in demos) / len(demos)

    def warm_start() -> None:
        with cli.open_workdir(workdir / "sft", config) as stage:
            sft.run(plan, stage)

    def reinforce() -> None:
        with cli.open_workdir(workdir / "rl", config) as stage:
            train.run(plan, stage, workdir / "sft")

    def warm_start_alone() -> None:
        # As many steps as fit into the minutes that the warm start and RL took together, by the warm start's own pace.
        minutes = result["minutes"]["sft"] + result["minutes"]["rl"]
        longer = config.copy_and_resolve_references()
        with longer.unlocked():
            longer.sft.steps = round(60 * minutes / seconds_per_step(workdir / "sft" / "metrics.jsonl"))
            longer.sft.eval_every = max(1, longer.sft.steps // 6)
        with cli.open_workdir(workdir / "sft_only", longer) as stage:
            sft.run(make_plan(longer), stage)

    def measure(when: str, stage: str) -> None:
        own = evaluate.held_out(plan, workdir / stage, plan.seed)
        key = "sft_only" if when == "sft_only" else f"success_{when}"
        result[key] = {name: summary["success"] for name, summary in own.items()}
        result["details"][when] = own

    phases = {
        "demonstrations": demonstrations,
        "sft": warm_start,
        "eval_before": partial(measure, "before", "sft"),
        "rl": reinforce,
        "eval_after": partial(measure, "after", "rl"),
    }
    if control:
        phases |= {"sft_only": warm_start_alone, "eval_sft_only": partial(measure, "sft_only", "sft_only")}
    spent = result.setdefault("spent", {})  # minutes by phase, those of interrupted launches included
    for name, phase in phases.items():
        if name in result["minutes"]:
            continue
        print(f"== {name}", flush=True)
        began = time.monotonic()
        try:
            phase()
            result["minutes"][name] = spent.get(name, 0.0) + (time.monotonic() - began) / 60
        finally:
            spent[name] = spent.get(name, 0.0) + (time.monotonic() - began) / 60
            own = [m for name, m in result["minutes"].items() if name not in ("total", "sft_only", "eval_sft_only")]
            result["minutes"]["total"] = sum(own)
            commits = [c for c in result.get("commit", "").split(" ") if c]  # more than one: phases of other code
            result["commit"] = " ".join(dict.fromkeys([*commits, git_commit()]))
            result["n_tasks"] = plan.eval.final_n
            write_json(path, result)
    return result


def seconds_per_step(metrics: Path) -> float:
    """Of a finished warm start, the first steps (which compile) left out."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    first, last = records[len(records) // 4], records[-1]
    return (last["time/trained_s"] - first["time/trained_s"]) / (last["step"] - first["step"])


def _begun(path: Path, config) -> dict:
    """What D/result.json holds already. Errors (ConfigError): it is unreadable, or of another config."""
    of = hashlib.sha256(config.to_json(sort_keys=True).encode()).hexdigest()[:16]
    if not path.exists():
        return {"seed": config.seed, "config": of, "minutes": {}, "details": {}}
    with cli.validating():
        result = json.loads(path.read_text())
    if result.get("config", of) != of or result["seed"] != config.seed:
        raise cli.ConfigError(f"{path}: holds results of another config or seed; give another --workdir")
    return result


def table(result: dict) -> str:
    """The result for the terminal."""
    details = {when: result["details"][when] for when in ("before", "after", "sft_only") if when in result["details"]}
    lines = [
        f"seed {result['seed']}, commit {result['commit']}, {result['n_tasks']} held-out tasks, "
        f"demonstrations succeed {result['demo_success']:.2f}",
        f"{'':10}{'sampled':>10}{'greedy':>10}{'searches':>10}",
    ]
    for when, own in details.items():
        sampled, greedy = own["sampled"], own["greedy"]
        lines.append(f"{when:10}{sampled['success']:10.3f}{greedy['success']:10.3f}{_searches(sampled):>10}")
    for family in details["after"]["sampled"]["families"]:
        before, after = (details[when]["sampled"]["families"][family] for when in ("before", "after"))
        lines.append(
            f"  {family}: sampled {before['success']:.3f} -> {after['success']:.3f}, "
            f"searches {_searches(before)} -> {_searches(after)} (n={after['n']})"
        )
    lines.append("minutes: " + "  ".join(f"{name} {m:.1f}" for name, m in result["minutes"].items()))
    return "\n".join(lines)


def _searches(summary: dict) -> str:
    return "-" if summary["searches"] is None else f"{summary['searches']:.2f}"  # a world without any


def main(_) -> None:
    with cli.validating():
        config = cli.resolve(flags.FLAGS.config, None)
        if flags.FLAGS.seed is not None:
            with config.unlocked():
                config.seed = flags.FLAGS.seed
        plan = make_plan(config)
        workdir = Path(cli.want_workdir(flags.FLAGS.workdir))
        for stage in ("sft", "rl"):
            cli.check_workdir(workdir / stage, config)
        from launch import build, runs  # jax starts here, still before the workdir is made

        last_start = "sft_only" if flags.FLAGS.control else "sft"  # whatever else begins, begins from that of sft
        build.check_data(plan, demonstrations=True, held_out=True, kept=workdir / last_start / "tokenizer")
        workdir.mkdir(parents=True, exist_ok=True)
    with runs.exits_when_stopped("; the same command goes on from here"):
        print(table(run(config, plan, workdir, control=flags.FLAGS.control)))


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config("configs/quickstart.py")
    cli.define_workdir("runs/quickstart/seed0")
    flags.DEFINE_integer(
        "seed", None, "Of everything: demonstrations, weights, sampling (default: the config's)", 0, cli.MOST_SEED
    )
    flags.DEFINE_bool("control", False, "Also train and measure sft_only")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
