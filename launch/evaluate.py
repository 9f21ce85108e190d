"""Measure a run or a scripted policy on a split: one JSON object, printed and (with --out) written.

    python -m launch.evaluate --workdir=D --split=test --n=256 [--greedy] [--samples=4] [--newest]
    python -m launch.evaluate --policy=gold --world=search --split=test --n=256

Keys: n success success_ci pass_at_k turns tokens status exploited (rl/metrics/success.py says what each means).
"""

import json
from pathlib import Path
from typing import Any

from absl import flags

from launch import cli
from launch.plan import Plan, make_plan

WORKDIR = cli.define_workdir()
POLICY = flags.DEFINE_string("policy", None, "Scripted policy: gold, noop, wrong, cheat:NAME")
WORLD = flags.DEFINE_string("world", "search", "World of the scripted policy, with its default options")
SPLIT = flags.DEFINE_enum("split", "validation", ["train", "validation", "test"], "Split of the tasks")
N = flags.DEFINE_integer("n", 256, "Tasks", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 1, "Episodes of each task", lower_bound=1)
GREEDY = flags.DEFINE_bool("greedy", False, "Take the likeliest token instead of sampling at rl.temperature")
NEWEST = flags.DEFINE_bool("newest", False, "The newest checkpoint instead of the best")
OUT = flags.DEFINE_string("out", None, "File to write the JSON to")
SEED = flags.DEFINE_integer("seed", 0, "Of sampling and of the choice of tasks")


def of_run(
    plan: Plan,
    workdir: Path,
    *,
    split: str,
    n: int,
    samplings: dict[str, Any],
    samples: int = 1,
    seed: int = 0,
    best: bool = True,
) -> dict[str, dict]:
    """Summaries by name of `samplings`, of one checkpoint of the run in `workdir`, on the same tasks."""
    from launch import build, runs
    from rl.metrics.success import summarise

    with cli.validating():
        world = build.build_world(plan)
        codec = build.load_codec(plan, workdir)
        model = build.build_model(plan, codec.vocab_size)
        tasks = build.some_tasks(world, split, n, seed)
    build.use_compilation_cache()
    params = runs.load_params(workdir, build.build_rl_learner(plan, model), best=best)
    with build.serving(plan, model, params, 0, world, codec) as (_, pool):
        return {
            name: summarise(build.with_progress(pool, tasks, name, samples=samples, sampling=sampling, seed=seed))
            for name, sampling in samplings.items()
        }


def of_policy(world_name: str, policy: str, *, split: str, n: int, seed: int) -> dict[str, Any]:
    """The same summary of a scripted policy, which plays text and samples no tokens."""
    from envs import make_world
    from launch import build
    from rl.metrics.success import summarise_scripted

    with cli.validating():
        world = make_world(world_name)
        if policy not in world.policies:
            raise cli.ConfigError(f"--policy: got {policy!r}, want one of {', '.join(sorted(world.policies))}")
        tasks = build.some_tasks(world, split, n, seed)
    return summarise_scripted(world, policy, tasks)


def main(_) -> None:
    with cli.validating():
        if bool(POLICY.value) == bool(WORKDIR.value):
            raise cli.ConfigError("want one of --workdir=D (a run) and --policy=NAME (a scripted policy)")
        if OUT.value and not Path(OUT.value).absolute().parent.is_dir():
            raise cli.ConfigError(f"--out: no folder {Path(OUT.value).absolute().parent}; make it first")
        plan = make_plan(cli.resolve(None, WORKDIR.value)) if WORKDIR.value else None
    if plan is None:
        result = of_policy(WORLD.value, POLICY.value, split=SPLIT.value, n=N.value, seed=SEED.value)
    else:
        from models.sampling import Sampling

        sampling = Sampling(temperature=plan.rl.temperature, greedy=GREEDY.value)
        result = of_run(
            plan,
            Path(WORKDIR.value),
            split=SPLIT.value,
            n=N.value,
            samplings={"policy": sampling},
            samples=SAMPLES.value,
            seed=SEED.value,
            best=not NEWEST.value,
        )["policy"]
    text = json.dumps(result)
    if OUT.value:
        Path(OUT.value).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    cli.run(main)
