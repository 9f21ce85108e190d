"""Watch one episode in the terminal: `python -m launch.play --workdir=D --split=validation --index=3 [--greedy]`.

With `--config=F.py` the model of its model.path plays as it is, untrained. With `--policy=gold` a scripted policy does;
with `--policy=me` you do, typing each action. `--ask="..."` puts a question of yours to the run or the model instead:

    python -m launch.play --config=configs/search_smollm2.py --ask="What is the capital of France?" --greedy
"""

import dataclasses
import sys
import time
from pathlib import Path

from absl import flags

from envs import task_at
from envs.base import Message
from launch import cli
from launch.evaluate import want_model
from launch.plan import Plan, make_plan, on_one_device


def show(task, turns, facts) -> None:
    """The episode as it was, then what the world reports."""
    print(f"[task {task.task_id}, {task.family}] {task.prompt[-1].content}")
    for action, observation in turns:
        print(f"\033[1m{action}\033[0m")
        if observation:
            print(observation)
    print("  ".join(f"{name}={value}" for name, value in facts.items()), f" answers={task.data.get('answers')}")


def ask(plan: Plan, workdir: Path | None, question: str, max_tokens: int, greedy: bool, seed: int) -> None:
    """The answer on stdout; what it cost on stderr."""
    from launch import build, runs
    from models.sampling import Sampling
    from rl.rollout.keys import request_key

    began = time.monotonic()
    with cli.validating():
        codec, model, params = runs.open_policy(plan, workdir)
    loaded = time.monotonic()
    build.use_compilation_cache()
    ids = codec.start([Message("user", question)])
    with cli.validating():
        if len(ids) + max_tokens > plan.engine.capacity:
            raise cli.ConfigError(
                f"--ask: {len(ids)} + {max_tokens} tokens do not fit {plan.engine.capacity=}; raise it"
            )
    plan = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, lanes=1, residents=1, prefill_rows=1))
    engine = build.build_engine(plan, model, params, 0, codec)
    try:
        compiled_s = engine.warm_up(truncated=False)
        asked = time.monotonic()
        session = engine.open(request_key(seed, 0, 0), Sampling(temperature=plan.rl.temperature, greedy=greedy))
        turn = session.generate(ids, max_tokens=max_tokens)
        took_s = time.monotonic() - asked
    finally:
        engine.close()
    print(codec.turn_text(turn.ids))
    print(
        f"loaded in {loaded - began:.1f} s, compiled in {compiled_s:.1f} s; {len(ids)} tokens read and {len(turn.ids)} "
        f"written in {took_s:.2f} s ({len(turn.ids) / took_s:.1f} tokens/s), ended by {turn.reason}",
        file=sys.stderr,
    )


def of_model(plan: Plan, workdir: Path | None, split: str, index: int, greedy: bool, seed: int) -> None:
    """One episode of a run, or, without a run, of the plan's model.path."""
    from launch import build, runs
    from models.sampling import Sampling

    with cli.validating():
        world = build.build_world(plan)
        task = task_at(world, split, index)
        codec, model, params = runs.open_policy(plan, workdir)
    build.use_compilation_cache()
    with (
        build.serving(plan, model, params, 0, world, codec) as (engine, training),
        build.evaluating(plan, engine, training, world, codec) as pool,
    ):
        sampling = Sampling(temperature=plan.rl.temperature, greedy=greedy)
        (group,) = pool.run_many([task], sampling=sampling, seed=seed)
    (trajectory,) = group.trajectories
    print(f"[task {task.task_id}, {task.family}]")
    for row in trajectory.rows:
        print(codec.view(row.tokens.tolist()))
    print(
        f"{trajectory.status.name}  " + "  ".join(f"{name}={value}" for name, value in trajectory.facts.items()),
        f" answers={task.data.get('answers')}",
    )


def of_policy(world_name: str, policy: str, split: str, index: int) -> None:
    from envs import make_world
    from envs.play import play

    with cli.validating():
        world = make_world(world_name)
        task = task_at(world, split, index)
        if policy != "me" and policy not in world.policies:
            raise cli.ConfigError(f"--policy: got {policy!r}, want me, or one of {', '.join(sorted(world.policies))}")
    if policy == "me":
        print(task.prompt[-1].content)
    scripted = _ask if policy == "me" else world.policies[policy](task)
    env = world.make_env()
    try:
        turns, facts = play(env, task, scripted)
    finally:
        env.close()
    show(task, turns, facts)


def _ask(observations) -> str:
    if observations:
        print(observations[-1])
    try:
        return input("> ")
    except EOFError:
        raise cli.ConfigError("--policy=me: the input ended before the episode did") from None


def main(_) -> None:
    given = flags.FLAGS
    with cli.validating():
        named = [name for name in ("workdir", "config", "policy") if given[name].value is not None]
        if len(named) != 1:
            raise cli.ConfigError(
                "want one of --workdir=D (a run), --config=F.py (its model.path) and --policy=NAME (a scripted policy, "
                f"or me); got {named}"
            )
        if given.ask and given.policy:
            raise cli.ConfigError("--ask: a scripted policy answers no questions; leave out --ask or --policy")
    if given.policy:
        of_policy(given.world, given.policy, given.split, given.index)
        return
    with cli.validating():
        plan = on_one_device(make_plan(cli.resolve(given.config, given.workdir)))
        if not given.workdir:
            want_model(plan)
    workdir = Path(given.workdir) if given.workdir else None
    if given.ask:
        ask(plan, workdir, given.ask, given.tokens, given.greedy, given.seed)
    else:
        of_model(plan, workdir, given.split, given.index, given.greedy, given.seed)


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    flags.DEFINE_string("ask", None, "A question of your own, in place of an episode")
    flags.DEFINE_integer("tokens", 64, "Of the answer to --ask, at most", lower_bound=1)
    flags.DEFINE_string("policy", None, "Scripted policy (gold, noop, wrong, cheat:NAME), or me")
    flags.DEFINE_string("world", "search", "World of a scripted policy")
    flags.DEFINE_enum("split", "validation", ["train", "validation", "test"], "Split of the task")
    flags.DEFINE_integer("index", 0, "Which task of the split", lower_bound=0)
    flags.DEFINE_bool("greedy", False, "Take the likeliest token instead of sampling")
    flags.DEFINE_integer("seed", 0, "Of sampling", 0, cli.MOST_SEED)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
