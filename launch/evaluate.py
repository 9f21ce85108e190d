"""Measure a run or a scripted policy on a split: one JSON object, printed and (with --out) written.

    python -m launch.evaluate --workdir=D --split=test --n=256 [--greedy] [--samples=4] [--newest]
    python -m launch.evaluate --config=configs/search_smollm2.py --split=test --n=128    (model.path as it is)
    python -m launch.evaluate --policy=gold --world=search --split=test --n=256

With `--constrain_tools` (of a world with tools) every turn is one call that parses, whatever the policy.
Keys: n success success_ci pass_at_k turns tokens status exploited (rl/metrics/success.py says what each means).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from envs import choose_tasks, make_world
from envs.base import Env, Observation, Step, Task, World
from launch import cli
from launch.plan import Plan, make_plan, on_one_device


def of_run(
    plan: Plan,
    workdir: Path,
    *,
    split: str,
    n: int,
    samplings: Mapping[str, Any],
    samples: int = 1,
    seed: int = 0,
    best: bool = True,
) -> dict[str, dict]:
    """Summaries by name of `samplings`, of one checkpoint of the run in `workdir`, on the same tasks.

    The episodes are kept in `workdir`/episodes_{split}, one file for each of `samplings`, in place of those of the call
    before.
    """
    from launch import build, runs
    from rl.episodes import EpisodeLog
    from rl.types import Trajectory

    plan = on_one_device(plan)
    with cli.validating():
        world = build.build_world(plan)
        codec, model, params = runs.open_policy(plan, workdir, best=best)
        tasks = choose_tasks(world, split, n, seed)
    build.use_compilation_cache()
    with (
        build.serving(plan, model, params, 0, world, codec) as (engine, training),
        build.evaluating(plan, engine, training, world, codec) as pool,
        EpisodeLog(workdir, folder=f"episodes_{split}", first_step=len(samplings)) as log,
    ):
        summaries = {}
        for i, (name, sampling) in enumerate(samplings.items()):
            played: list[Trajectory] = []
            how = {"samples": samples, "sampling": sampling, "seed": seed, "keep": played}
            summaries[name] = build.play_all(pool, tasks, **how)
            for trajectory in played:
                log.append(trajectory)
            log.end_step(i)
    return summaries


def held_out(plan: Plan, workdir: Path, seed: int) -> dict[str, dict]:
    """Summaries, "greedy" and "sampled", on the test split, as eval.final_n and eval.final_samples say: greedy
    ones too, for a world may answer otherwise the next time."""
    from models.sampling import Sampling

    how = {"temperature": plan.rl.temperature}
    samplings = {"greedy": Sampling(greedy=True, **how), "sampled": Sampling(**how)}
    final = {"n": plan.eval.final_n, "samples": plan.eval.final_samples}
    return of_run(plan, workdir, split="test", samplings=samplings, seed=seed, **final)


def of_model(plan: Plan, *, split: str, n: int, sampling: Any, samples: int = 1, seed: int = 0) -> dict[str, Any]:
    """The summary of model.path as it is, before any training; its episodes are not kept."""
    from launch import build, runs

    plan = on_one_device(plan)
    with cli.validating():
        world = build.build_world(plan)
        tasks = choose_tasks(world, split, n, seed)
        codec, model, params = runs.open_policy(plan, None)
    build.use_compilation_cache()
    with (
        build.serving(plan, model, params, 0, world, codec) as (engine, training),
        build.evaluating(plan, engine, training, world, codec) as pool,
    ):
        return build.play_all(pool, tasks, samples=samples, sampling=sampling, seed=seed)


class _Watched:
    """An env that remembers whether the world itself ended the episode."""

    def __init__(self, env: Env):
        self.spec, self.ended, self._env = env.spec, False, env

    def reset(self, task: Task) -> Observation:
        self.ended = False
        return self._env.reset(task)

    def step(self, action: str) -> Step:
        step = self._env.step(action)
        self.ended = step.done
        return step

    def close(self) -> None:
        self._env.close()


def of_policy(world: World, policy: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """The same summary of a scripted policy; it plays text, so tokens is None."""
    from envs.play import play
    from rl.metrics.success import summarise
    from rl.types import Status, Trajectory

    env, played = _Watched(world.make_env()), []
    try:
        for task in tasks:
            turns, facts = play(env, task, world.policies[policy](task))
            ended = Status.TURN_LIMIT
            if env.ended:
                ended = Status.GAVE_UP if facts.get("gave_up") else Status.DONE
            played.append((task, [Trajectory(task.task_id, 0, 0, ended, (), {**facts, "turns": len(turns)}, {})]))
    finally:
        env.close()
    summary = summarise(played)
    return summary | {"turns": sum(t.facts["turns"] for _, (t,) in played) / len(played), "tokens": None}


def main(_) -> None:
    with cli.validating():
        if flags.FLAGS.policy and flags.FLAGS.workdir:
            raise cli.ConfigError("got --policy and --workdir, want one: a scripted policy, or a run")
        if not (flags.FLAGS.policy or flags.FLAGS.workdir or flags.FLAGS.config is not None):
            raise cli.ConfigError(
                "want one of --workdir=D (a run), --config=F.py (its model.path) and --policy=NAME (a scripted policy)"
            )
        if flags.FLAGS.config is not None and flags.FLAGS.workdir:
            raise cli.ConfigError("--config: a run in --workdir has its own config; leave --config out")
        out = Path(flags.FLAGS.out).absolute() if flags.FLAGS.out else None
        if out and (out.is_dir() or not out.parent.is_dir()):
            raise cli.ConfigError(f"--out: got {out}, want a file in a folder that exists")
        given = [name for name in ("samples", "greedy", "newest", "constrain_tools") if flags.FLAGS[name].present]
        if flags.FLAGS.policy and given:
            raise cli.ConfigError(f"--{given[0]}: a scripted policy samples nothing; leave it out")
    result = _scripted() if flags.FLAGS.policy else _sampled()
    text = json.dumps(result)
    print(text)
    if out:
        out.write_text(text + "\n")


def _scripted() -> dict[str, Any]:
    with cli.validating():
        plan = make_plan(flags.FLAGS.config) if flags.FLAGS.config is not None else None
        world = make_world(plan.world, **plan.world_options) if plan else make_world(flags.FLAGS.world)
        if flags.FLAGS.policy not in world.policies:
            raise cli.ConfigError(
                f"--policy: got {flags.FLAGS.policy!r}, want one of {', '.join(sorted(world.policies))}"
            )
        tasks = choose_tasks(world, flags.FLAGS.split, flags.FLAGS.n, flags.FLAGS.seed)
    return of_policy(world, flags.FLAGS.policy, tasks)


def _sampled() -> dict[str, Any]:
    workdir = flags.FLAGS.workdir
    with cli.validating():
        plan = make_plan(cli.resolve(flags.FLAGS.config, workdir))
        if flags.FLAGS["constrain_tools"].present:
            how = dataclasses.replace(plan.eval, constrain_tools=flags.FLAGS.constrain_tools)
            plan = dataclasses.replace(plan, eval=how)
        if not workdir:
            want_model(plan, [name for name in ("newest",) if flags.FLAGS[name].present])

    from models.sampling import Sampling

    sampling = Sampling(temperature=plan.rl.temperature, greedy=flags.FLAGS.greedy)
    how = {
        "split": flags.FLAGS.split,
        "n": flags.FLAGS.n,
        "samples": flags.FLAGS.samples,
        "seed": flags.FLAGS.seed,
    }
    if not workdir:
        return of_model(plan, sampling=sampling, **how)
    return of_run(plan, Path(workdir), samplings={"policy": sampling}, best=not flags.FLAGS.newest, **how)["policy"]


def want_model(plan: Plan, of_a_run: Sequence[str] = ()) -> None:
    """That a plan without a run names a model, and that no flag speaks of a run. Errors: ConfigError."""
    if not plan.model_path:
        raise cli.ConfigError(
            "--config without --workdir: its model.path is empty; want one that names a model, or a run"
        )
    if of_a_run:
        raise cli.ConfigError(f"--{of_a_run[0]}: is of a run in --workdir; leave it out")


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    flags.DEFINE_string("policy", None, "Scripted policy: gold, noop, wrong, cheat:NAME")
    flags.DEFINE_string(
        "world", "search", "World of the scripted policy, with default options; --config=F.py gives it others"
    )
    flags.DEFINE_enum("split", "validation", ["train", "validation", "test"], "Split of the tasks")
    flags.DEFINE_integer("n", 256, "Tasks", lower_bound=1)
    flags.DEFINE_integer("samples", 1, "Episodes of each task", lower_bound=1)
    flags.DEFINE_bool("greedy", False, "Take the likeliest token instead of sampling at rl.temperature")
    flags.DEFINE_bool(
        "constrain_tools", False, "Each turn is one call of the world's tools (else eval.constrain_tools)"
    )
    flags.DEFINE_bool("newest", False, "The newest checkpoint instead of the best")
    flags.DEFINE_string("out", None, "File to write the JSON to")
    flags.DEFINE_integer("seed", 0, "Of sampling and of the choice of tasks", 0, cli.MOST_SEED)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
