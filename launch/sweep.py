"""Arms of one comparison, several seeds: each arm trained from one shared warm start and measured on the same tasks.

    python -m launch.sweep --sweep=configs/sweeps/recipes.py --workdir=runs/recipes [--seeds=0,1,2] [--arms=grpo,ppo]

A sweep file has `get_sweep()`: a dict of

    warm     the config whose warm start all arms begin from, one for each seed, kept in --warm under a digest of it
    arms     name -> {"config": F.py, "a.b": value, ...}: a config file and what is set in it. "stage" says what is
             done: "train", RL, by default; "rft", successes are imitated; "ttrl", test tasks are adapted to; "teach",
             supervised, all from what was before; "sft", supervised from nothing. "first" lists steps like this one
             that come before it, each from the one before, the first from the warm start
    shared   what is set in every step of every arm; optional
    rm       the config of a reward model, kept like the warm start, which is judged: by as many of its own episodes on
             training tasks as JUDGED says. Arms whose reward has options for its kind (orm, prm) get its path
    texts    configs: one tokenizer of all their worlds' texts, digits apart, is everybody's
    measure  name -> F.py: whose world's held-out tasks the arms are measured on (default: that of `warm`)
    seeds    default of --seeds

Seeds are the outer loop, so that whatever is finished when it is stopped is a comparison. An arm whose result is there
is not run again, nor one that is the same, key for key, as an arm of another sweep with this --warm; one that broke off
is resumed (its minutes are those of the launch that ended it); one whose config has changed since is refused. Every
finished arm is a line of results/sweep_NAME.jsonl, of which `launch.report` makes the README's tables. Of "ttrl" the
line has that run's own before and after: on the tasks adapted to, and on others.
"""

import hashlib
import json
import re
import runpy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_collections
from absl import flags

from launch import cli, report, sft
from launch.plan import Plan, make_plan
from launch.workdir import FREE, write_json

STAGES = ("train", "sft", "teach", "rft", "ttrl")
KEYS = ("warm", "arms", "shared", "measure", "seeds", "rm", "texts")
NOTHING: Mapping[str, Any] = MappingProxyType({})
JUDGED = {"n": 320, "samples": 4}  # tasks, and episodes of each, that a reward model learns from


def load_sweep(path: str | Path) -> dict[str, Any]:
    """The dict of a sweep file, whole. Errors (ConfigError): unreadable, no get_sweep, unknown keys, no arms."""
    with cli.validating():
        found = runpy.run_path(str(path))
    if "get_sweep" not in found:
        raise cli.ConfigError(f"{path}: got no get_sweep, want a function of that name (launch/sweep.py)")
    sweep = found["get_sweep"]()
    if stray := sorted(sweep.keys() - set(KEYS)):
        raise cli.ConfigError(f"{path}: got {stray}, want of {', '.join(KEYS)}")
    if not sweep.get("arms") or "warm" not in sweep:
        raise cli.ConfigError(f"{path}: want 'warm' and at least one of 'arms'")
    for arm, steps in ((arm, steps_of(own)) for arm, own in sweep["arms"].items()):
        for step in steps:
            if step.get("stage", "train") not in STAGES:
                raise cli.ConfigError(f"{path}: arm {arm!r}: got stage {step['stage']!r}, want of {', '.join(STAGES)}")
        if any(step.get("stage") == "ttrl" for step in steps[:-1]):
            raise cli.ConfigError(
                f"{path}: arm {arm!r}: got ttrl before another step, want it last: it measures itself"
            )
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


def steps_of(arm: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an arm does, in order; the last is the arm's own."""
    return [*arm.get("first", ()), {key: value for key, value in arm.items() if key != "first"}]


def step_config(
    sweep: Mapping[str, Any], step: Mapping[str, Any], seed: int, given: Mapping[str, Any] = NOTHING
) -> ml_collections.ConfigDict:
    """The config of one step; `given` as `prepared` says."""
    own = {key: value for key, value in step.items() if key != "stage"}
    config = load_config(own.pop("config"), {**sweep["shared"], **own, **given.get("set", {})}, seed)
    with config.unlocked():
        for kind, path in given.get("models", {}).items():
            if kind in config.reward.options:
                config.reward.options[kind].path = path
    return config


def arm_config(sweep: Mapping[str, Any], arm: str, seed: int) -> ml_collections.ConfigDict:
    """That of an arm's own step, without what is prepared for a seed."""
    return step_config(sweep, steps_of(sweep["arms"][arm])[-1], seed)


def warm_start(sweep: Mapping[str, Any], seed: int, root: Path, given: Mapping[str, Any] = NOTHING) -> Path:
    """The folder of the finished warm start of one seed."""
    config = load_config(sweep["warm"], given.get("set", {}), seed)
    workdir = root / f"{config.name}-{_digest(config)}"
    plan = make_plan(config)
    with cli.open_workdir(workdir, config) as stage:
        sft.run(plan, stage)
    return workdir


def shared_tokenizer(sweep: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """What every step sets so that all read and write by one tokenizer, trained once; {} where none is wanted."""
    from launch import build
    from models.tokenizer import train_tokenizer

    if "texts" not in sweep:
        return {}
    plans = [make_plan(load_config(path, {}, 0)) for path in sweep["texts"]]
    size = max(plan.vocab_size for plan in plans)
    folder = root / f"tokenizer-{_digest([size, [[p.world, dict(p.world_options)] for p in plans]])}"
    if not folder.exists():
        texts = chain.from_iterable(build.build_world(plan).texts() for plan in plans)
        temporary = folder.with_name(f"{folder.name}.tmp")
        train_tokenizer((re.sub(r"\d", r" \g<0> ", text) for text in texts), size, temporary)
        temporary.rename(folder)
    return {"tokenizer.path": str(folder)}


def reward_model(sweep: Mapping[str, Any], seed: int, root: Path, warm: Path, given: Mapping[str, Any]) -> Path:
    """The folder of the finished reward model of one seed: the warm start's, of its own episodes on training tasks."""
    from launch import evaluate, reward_models, train_rm
    from models.sampling import Sampling

    config = load_config(sweep["rm"], given["set"], seed)
    workdir = root / f"{config.name}-rm-{_digest([config.to_dict(), warm.name, JUDGED])}"
    plan = make_plan(config)
    if (workdir / reward_models.RESULT).exists():
        return workdir
    with cli.open_workdir(workdir, config) as stage:
        if not train_rm.is_labelled(workdir):
            how = {"samplings": {"sampled": Sampling(temperature=plan.rl.temperature)}, "seed": seed, **JUDGED}
            evaluate.of_run(plan, warm, split="train", **how)
        train_rm.run(plan, stage, warm, [warm / "episodes_train"])
    return workdir


def prepared(sweep: Mapping[str, Any], seed: int, root: Path) -> tuple[Path, dict[str, Any]]:
    """The warm start of a seed, and what its steps are given: {"set": {key: value}, "models": {kind: path}}."""
    given = {"set": shared_tokenizer(sweep, root), "models": {}}
    warm = warm_start(sweep, seed, root, given)
    if "rm" in sweep:
        kind = make_plan(load_config(sweep["rm"], {}, seed)).rm.kind
        given["models"][kind] = str(reward_model(sweep, seed, root, warm, given))
    return warm, given


def measured(sweep: Mapping[str, Any], workdir: Path, seed: int) -> dict[str, Any]:
    """Held-out success of a run's best checkpoint by the sweep's measures, sampled and greedy."""
    from launch import evaluate

    found = {}
    for name, path in sweep["measure"].items():
        plan = make_plan(load_config(path, {}, seed))
        own = evaluate.held_out(plan, workdir, seed)
        found[name] = {
            "n_tasks": plan.eval.final_n,
            "greedy": own["greedy"]["success"],
            "sampled": own["sampled"]["success"],
            "searches": own["sampled"]["searches"],
            "facts": own["sampled"]["facts"],
        }
    return found


def spent(workdirs: Sequence[Path]) -> dict[str, int]:
    """Episodes and turns that runs have played to learn from, refused ones included."""
    from rl.episodes import read_episodes

    played = [workdir for workdir in workdirs if (workdir / "episodes").exists()]  # who is taught plays none
    turns = [trajectory.n_turns for workdir in played for trajectory in read_episodes(workdir)]
    return {"episodes": len(turns), "turns": sum(turns)}


def run_step(stage: str, config: ml_collections.ConfigDict, workdir: Path, before: Path) -> None:
    """One step, whole, in `workdir`; from the run in `before` unless it begins from nothing."""
    from launch import rft, train, ttrl

    stages = {
        "train": partial(train.run, init=before),
        "sft": sft.run,
        "teach": partial(sft.run, init=before),
        "rft": partial(rft.run, init=before),
        "ttrl": partial(ttrl.run, init=before),
    }
    plan: Plan = make_plan(config)
    with cli.open_workdir(workdir, config) as opened:
        stages[stage](plan, opened)


def run_arm(
    sweep: Mapping[str, Any], arm: str, seed: int, workdir: Path, warm: Path, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Trains and measures one arm; its line, which is in workdir/result.json from then on."""
    from launch.workdir import git_commit

    steps = steps_of(sweep["arms"][arm])
    stages = [step.get("stage", "train") for step in steps]
    # a run of launch.ttrl has a result.json of its own
    alone = len(steps) == 1 and stages != ["ttrl"]
    folders = [workdir if alone else workdir / f"{i}_{stage}" for i, stage in enumerate(stages)]
    began = time.monotonic()
    for step, stage, folder, before in zip(steps, stages, folders, [warm, *folders], strict=False):
        run_step(stage, step_config(sweep, step, seed, given), folder, before)
    minutes = (time.monotonic() - began) / 60
    line = {"arm": arm, "seed": seed, "config": arm_digest(sweep, arm, seed, given), "commit": git_commit()}
    line |= {"minutes": minutes, **spent(folders)}
    if stages[-1] == "ttrl":
        return line | adapted(json.loads((folders[-1] / "result.json").read_text()))
    return line | {"after": measured(sweep, folders[-1], seed)}


def adapted(result: Mapping[str, Any]) -> dict[str, Any]:
    """`before` and `after` of a line, of the result.json of launch.ttrl. The fact "majority" is maj@k of all samples:
    what the policy would have said by voting.
    """

    def one(own: Mapping[str, Any], n: int) -> dict[str, Any]:
        facts = {"majority": own["maj_at_k"].get(str(result["samples"])), **own["majority"]}
        return {"n_tasks": n, "greedy": own["greedy"], "sampled": own["avg_at_k"], "searches": None, "facts": facts}

    sizes = {"adapted": result["n"], "held_out": result["held_out"]["n"]}
    return {
        when: {name.replace("_", " "): one(result[when][name], n) for name, n in sizes.items()}
        for when in ("before", "after")
    }


def arm_digest(sweep: Mapping[str, Any], arm: str, seed: int, given: Mapping[str, Any]) -> str:
    """Of all that an arm does."""
    configs = [step_config(sweep, step, seed, given) for step in steps_of(sweep["arms"][arm])]
    return _digest(configs[0] if len(configs) == 1 else [config.to_dict() for config in configs])


def run(sweep: Mapping[str, Any], name: str, workdir: Path, warm_root: Path, seeds: Sequence[int]) -> None:
    """Every arm of every seed that has no result yet; the lines are in results/ when each is done."""
    for seed in seeds:
        warm, given = prepared(sweep, seed, warm_root)
        measure = {name: load_config(path, {}, seed).to_dict() for name, path in sweep["measure"].items()}
        for arm in sweep["arms"]:
            print(f"== seed {seed}: {arm}", flush=True)
            folder = workdir / arm / f"seed{seed}"
            config = arm_digest(sweep, arm, seed, given)
            stages = [step.get("stage", "train") for step in steps_of(sweep["arms"][arm])]
            same = warm / f"arm_{_digest([config, stages, measure])}.json"  # in whatever sweep it was run
            if same.exists() and not (folder / "result.json").exists():
                print(f"the same as an arm of another sweep, which is taken: {same}", flush=True)
            run_once = partial(_kept, same, partial(run_arm, sweep, arm, seed, folder, warm, given))
            line = _kept(folder / "result.json", run_once) | {"arm": arm}
            if line["config"] != config:
                raise cli.ConfigError(f"{folder}: holds the result of another config; give another --workdir")
            if "before" not in line:
                file = warm / f"measured_{_digest(measure)}.json"
                line |= {"before": _kept(file, partial(measured, sweep, warm, seed))}
            add_line(report.RESULTS / f"{report.SWEEP}{name}.jsonl", line)


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
    file.parent.mkdir(parents=True, exist_ok=True)
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
        reward_model = [sweep["rm"]] if "rm" in sweep else []
        for path in (sweep["warm"], *sweep["measure"].values(), *sweep.get("texts", ()), *reward_model):
            make_plan(load_config(path, {}, 0))
        steps = [step for arm in sweep["arms"].values() for step in steps_of(arm)]
        plans = [(step.get("stage"), make_plan(step_config(sweep, step, 0))) for step in steps]
        from launch import build, runs, ttrl  # jax starts here, still before the workdir is made

        build.check_data(make_plan(load_config(sweep["warm"], {}, 0)), demonstrations=True, held_out=True)
        for stage, plan in plans:
            if stage == "ttrl":
                ttrl.check_label_free(plan, build.build_terms(plan))
            taught = stage in ("sft", "teach")
            split = plan.ttrl.split if stage == "ttrl" else "train"
            build.check_data(plan, demonstrations=taught, trained=split)
    with runs.exits_when_stopped("; the same command goes on from here"):
        run(sweep, Path(flags.FLAGS.sweep).stem, workdir, Path(flags.FLAGS.warm), seeds)


if __name__ == "__main__":
    flags.DEFINE_string("sweep", "", "Sweep file, e.g. configs/sweeps/recipes.py")
    flags.DEFINE_list("seeds", [], "Seeds (default: the sweep's)")
    flags.DEFINE_list("arms", [], "Arms to run, by name (default: all)")
    flags.DEFINE_string("warm", "runs/warm", "Folder of warm starts, shared by sweeps")
    cli.define_workdir()
    cli.run(main)
