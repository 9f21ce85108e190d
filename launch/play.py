"""Watch one episode in the terminal: `python -m launch.play --workdir=D --split=validation --index=3 [--greedy]`.

With `--policy=gold` a scripted policy plays; with `--policy=me` you do, typing each action.
"""

from pathlib import Path

from absl import flags

from launch import cli
from launch.plan import make_plan, on_one_device


def show(task, turns, facts) -> None:
    """The episode as it was, then what the world reports."""
    print(f"[task {task.task_id}, {task.family}] {task.prompt[-1].content}")
    for action, observation in turns:
        print(f"\033[1m{action}\033[0m")
        if observation:
            print(observation)
    print("  ".join(f"{name}={value}" for name, value in facts.items()), f" answers={task.data['answers']}")


def of_run(workdir: Path, split: str, index: int, greedy: bool, seed: int) -> None:
    from envs import task_at
    from launch import build, runs
    from models.sampling import Sampling

    with cli.validating():
        plan = on_one_device(make_plan(cli.resolve(None, str(workdir))))
        world = build.build_world(plan)
        codec = build.load_codec(workdir)
        model = build.build_model(plan, codec.vocab_size)
        task = task_at(world, split, index)
    with cli.validating():  # what a checkpoint holds, and that it is whole
        params = runs.load_params(workdir / "ckpt", build.build_rl_learner(plan, model), best=True)
    with build.serving(plan, model, params, 0, world, codec) as (_, pool):
        sampling = Sampling(temperature=plan.rl.temperature, greedy=greedy)
        (group,) = pool.run_many([task], sampling=sampling, seed=seed)
    (trajectory,) = group.trajectories
    print(f"[task {task.task_id}, {task.family}]")
    for row in trajectory.rows:
        print(codec.view(row.tokens.tolist()))
    print(
        f"{trajectory.status.name}  " + "  ".join(f"{name}={value}" for name, value in trajectory.facts.items()),
        f" answers={task.data['answers']}",
    )


def of_policy(world_name: str, policy: str, split: str, index: int) -> None:
    from envs import make_world, task_at
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
    return input("> ")


def main(_) -> None:
    with cli.validating():
        if bool(flags.FLAGS.policy) == bool(flags.FLAGS.workdir):
            raise cli.ConfigError("want one of --workdir=D (a run) and --policy=NAME (a scripted policy, or me)")
    if flags.FLAGS.policy:
        of_policy(flags.FLAGS.world, flags.FLAGS.policy, flags.FLAGS.split, flags.FLAGS.index)
    else:
        of_run(Path(flags.FLAGS.workdir), flags.FLAGS.split, flags.FLAGS.index, flags.FLAGS.greedy, flags.FLAGS.seed)


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_workdir()
    flags.DEFINE_string("policy", None, "Scripted policy (gold, noop, wrong, cheat:NAME), or me")
    flags.DEFINE_string("world", "search", "World of a scripted policy")
    flags.DEFINE_enum("split", "validation", ["train", "validation", "test"], "Split of the task")
    flags.DEFINE_integer("index", 0, "Which task of the split", lower_bound=0)
    flags.DEFINE_bool("greedy", False, "Take the likeliest token instead of sampling")
    flags.DEFINE_integer("seed", 0, "Of sampling")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
