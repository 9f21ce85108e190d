"""Arms of one comparison, several seeds: each arm trained from one shared warm start and measured on the same tasks.

    python -m launch.sweep --sweep=configs/sweeps/recipes.py --workdir=runs/recipes [--seeds=0,1,2] [--arms=grpo,ppo]

A sweep file has `get_sweep()`: a dict of

    warm     the config whose warm start all arms begin from, one for each seed, kept in --warm under a digest of it
    arms     name -> {"config": F.py, "a.b": value, ...}: a config file and what is set in it; with "stage": "sft" the
             arm is supervised alone, from nothing, and with "rft" it imitates successes, from the warm start
    shared   what is set in every arm; optional
    measure  name -> F.py: whose world's held-out tasks the arms are measured on (default: that of `warm`)
    seeds    default of --seeds

Seeds are the outer loop, so that whatever is finished when it is stopped is a comparison. An arm whose result is there
is not run again; one that broke off is resumed (its minutes are those of the launch that ended it); one whose config
has changed since is refused. Every finished arm is a line of results/sweep_NAME.jsonl, of which `launch.report` makes
the README's tables.
"""

import hashlib
import json
import runpy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from launch import cli, report, sft
from launch.plan import Plan, make_plan
from launch.workdir import FREE, write_json

STAGES = ("train", "sft", "rft")
KEYS = ("warm", "arms", "shared", "measure", "seeds")


def load_sweep(path: str | Path) -> dict[str, Any]:
    """The dict of a sweep file, whole. Errors (ConfigError): unreadable, unknown keys, no arms."""
    with cli.validating():
        sweep = runpy.run_path(str(path))["get_sweep"]()
    if stray := sorted(sweep.keys() - set(KEYS)):
        raise cli.ConfigError(f"{path}: got {stray}, want of {', '.join(KEYS)}")
    if not sweep.get("arms") or "warm" not in sweep:
        raise cli.ConfigError(f"{path}: want 'warm' and at least one of 'arms'")
    for arm, own in sweep["arms"].items():
        if own.get("stage", "train") not in STAGES:
            raise cli.ConfigError(f"{path}: arm {arm!r}: got stage {own['stage']!r}, want of {', '.join(STAGES)}")
    return {"shared": {}, "measure": {"": sweep["warm"]}, "seeds": (0, 1, 2)} | sweep


def load_config(path: str, changes: Mapping[str, Any], seed: int) -> ml_collections.ConfigDict:
    """The config of F.py[:k=v,k=v] with some leaves set. Errors: ConfigError."""
    file, _, arg = path.partition(":")
    with cli.validating():
        config = runpy.run_path(file)["get_config"](arg)
    for key, value in changes.items():
        parent, _, name = key.rpartition(".")
        if parent in FREE:
            config[parent.split(".")[0]][parent.split(".")[1]][name] = value
        else:
            cli.override(config, key, value)
    config.seed = seed
    return config.lock()


def arm_config(sweep: Mapping[str, Any], arm: str, seed: int) -> ml_collections.ConfigDict:
    own = {key: value for key, value in sweep["arms"][arm].items() if key != "stage"}
    return load_config(own.pop("config"), sweep["shared"] | own, seed)


def warm_start(sweep: Mapping[str, Any], seed: int, root: Path) -> Path:
    """The folder of the finished warm start of one seed."""
    config = load_config(sweep["warm"], {}, seed)
    workdir = root / f"{config.name}-{_digest(config)}"
    plan = make_plan(config)
    with cli.open_workdir(workdir, config) as stage:
        sft.run(plan, stage)
    return workdir


def measured(sweep: Mapping[str, Any], workdir: Path, seed: int) -> dict[str, Any]:
    """Held-out success of a run's best checkpoint by the sweep's measures, sampled and greedy."""
    from launch import evaluate
    from models.sampling import Sampling

    found = {}
    for name, path in sweep["measure"].items():
        plan = make_plan(load_config(path, {}, seed))
        how = {"temperature": plan.rl.temperature}
        own = evaluate.of_run(
            plan,
            workdir,
            split="test",
            n=plan.eval.final_n,
            samplings={"greedy": Sampling(greedy=True, **how), "sampled": Sampling(**how)},
            seed=seed,
        )
        found[name] = {
            "n_tasks": own["sampled"]["n"],
            "greedy": own["greedy"]["success"],
            "sampled": own["sampled"]["success"],
            "searches": own["sampled"]["searches"],
            "facts": own["sampled"]["facts"],
        }
    return found


def spent(workdir: Path) -> dict[str, int]:
    """Episodes and turns that a run has played to learn from, refused ones included."""
    from rl.episodes import read_episodes

    turns = [trajectory.n_turns for trajectory in read_episodes(workdir)]
    return {"episodes": len(turns), "turns": sum(turns)}


def run_arm(sweep: Mapping[str, Any], arm: str, seed: int, workdir: Path, warm: Path) -> dict[str, Any]:
    """Trains and measures one arm; its line, which is in workdir/result.json from then on."""
    from launch import rft, train
    from launch.workdir import git_commit

    config = arm_config(sweep, arm, seed)
    plan: Plan = make_plan(config)
    stages = {
        "train": partial(train.run, init=warm),
        "sft": sft.run,
        "rft": partial(rft.run, init=warm),
    }
    began = time.monotonic()
    with cli.open_workdir(workdir, config) as stage:
        stages[sweep["arms"][arm].get("stage", "train")](plan, stage)
    minutes = (time.monotonic() - began) / 60
    line = {"arm": arm, "seed": seed, "config": _digest(config), "commit": git_commit()}
    return line | {"minutes": minutes, **spent(workdir), "after": measured(sweep, workdir, seed)}


def run(sweep: Mapping[str, Any], name: str, workdir: Path, warm_root: Path, seeds: Sequence[int]) -> None:
    """Every arm of every seed that has no result yet; the lines are in results/ when each is done."""
    for seed in seeds:
        warm = warm_start(sweep, seed, warm_root)
        before = _kept(warm / f"measured_{_digest(sweep['measure'])}.json", partial(measured, sweep, warm, seed))
        for arm in sweep["arms"]:
            print(f"== seed {seed}: {arm}", flush=True)
            folder = workdir / arm / f"seed{seed}"
            line = _kept(folder / "result.json", partial(run_arm, sweep, arm, seed, folder, warm))
            want = _digest(arm_config(sweep, arm, seed))
            if line["config"] != want:
                raise cli.ConfigError(f"{folder}: holds the result of another config; give another --workdir")
            add_line(report.RESULTS / f"{report.SWEEP}{name}.jsonl", line | {"before": before})


def add_line(file: Path, line: Mapping[str, Any]) -> None:
    """Adds `line`, or replaces that of its arm and seed."""
    lines = {(own["arm"], own["seed"]): own for own in report.read(file)}
    lines[line["arm"], line["seed"]] = dict(line)
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(own) + "\n" for own in lines.values()))


def _kept(file: Path, make: Callable[[], Any]) -> Any:
    """What `file` holds, or what `make` gives, which it holds from then on."""
    if file.exists():
        with cli.validating():
            return json.loads(file.read_text())
    made = make()
    write_json(file, made)
    return made


def _digest(config: Any) -> str:
    tree = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]


def main(_) -> None:
    with cli.validating():
        workdir = Path(cli.want_workdir(flags.FLAGS.workdir))
        if not flags.FLAGS.sweep:
            raise cli.ConfigError("want --sweep=configs/sweeps/NAME.py")
        sweep = load_sweep(flags.FLAGS.sweep)
        seeds = [int(seed) for seed in flags.FLAGS.seeds] or list(sweep["seeds"])
        if unknown := sorted(set(flags.FLAGS.arms) - sweep["arms"].keys()):
            raise cli.ConfigError(f"--arms: got {unknown}, want of {', '.join(sweep['arms'])}")
        if flags.FLAGS.arms:
            sweep["arms"] = {name: sweep["arms"][name] for name in flags.FLAGS.arms}
        for path in (sweep["warm"], *sweep["measure"].values()):
            make_plan(load_config(path, {}, 0))
        plans = [make_plan(arm_config(sweep, arm, 0)) for arm in sweep["arms"]]
        from launch import build, runs  # jax starts here, still before the workdir is made

        build.check_data(make_plan(load_config(sweep["warm"], {}, 0)), demonstrations=True, held_out=True)
        for plan in plans:
            build.check_data(plan, demonstrations=False)
    with runs.exits_when_stopped("; the same command goes on from here"):
        run(sweep, Path(flags.FLAGS.sweep).stem, workdir, Path(flags.FLAGS.warm), seeds)


if __name__ == "__main__":
    flags.DEFINE_string("sweep", "", "Sweep file, e.g. configs/sweeps/recipes.py")
    flags.DEFINE_list("seeds", [], "Seeds (default: the sweep's)")
    flags.DEFINE_list("arms", [], "Arms to run, by name (default: all)")
    flags.DEFINE_string("warm", "runs/warm", "Folder of warm starts, shared by sweeps")
    cli.define_workdir()
    cli.run(main)
