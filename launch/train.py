"""Reinforcement learning: `python -m launch.train --config=configs/quickstart.py --workdir=D --init=SFT_WORKDIR`.

`--workdir=D` alone resumes. `--init` names another run's folder: training starts from its best checkpoint and its
tokenizer.
"""

from pathlib import Path

from absl import flags

from launch import cli
from launch.plan import Plan, make_plan


def run(
    plan: Plan,
    workdir: cli.Workdir,
    init: Path | None,
    *,
    stop_at_step: int = 0,
    profile: tuple[int, int] | None = None,
) -> None:
    """The whole stage in this process; everything it leaves is in `workdir`."""
    import jax

    from envs import choose_tasks
    from launch import build, runs
    from rl import checkpoint, loop
    from rl.curriculum import TaskStream
    from rl.types import Trajectory

    with cli.validating():
        world = build.build_world(plan)
        if init is not None:
            runs.copy_tokenizer(init, workdir)
        codec = build.build_codec(plan, world, workdir / "tokenizer")
        model = build.build_model(plan, codec.vocab_size)
        stream = TaskStream(world.tasks("train"), plan.seed)
        validation = choose_tasks(world, plan.eval.split, plan.eval.n, plan.seed)
    build.use_compilation_cache()
    learner = build.build_rl_learner(plan, model)
    with cli.validating():  # what a checkpoint holds, and that it is whole
        start = runs.starting_params(workdir, init, learner, jax.random.fold_in(jax.random.key(plan.seed), 0))
        state, progress = runs.start_or_resume(
            workdir, learner, start, on_host=lambda host: stream.load_state_dict(host["tasks"])
        )
    ref = start if plan.rl.kl_coef else None
    stop = runs.stop_signal()

    with (
        build.serving(plan, model, state.params, progress.version, world, codec) as (engine, pool),
        runs.recording(workdir, progress.step) as (monitor, episodes),
        checkpoint.Checkpoints(workdir / "ckpt") as checkpoints,
        runs.profiling(workdir / "profile", profile) as mark_step,
    ):

        def keep_episodes(step: int, finished: list[Trajectory]) -> None:
            for trajectory in finished:
                episodes.append(trajectory)
            episodes.end_step(step)

        def log(step: int, record) -> None:
            monitor.write(step, record)
            mark_step(step)

        loop.train(
            learner,
            state,
            ref,
            pool,
            progress,
            draw=stream.draw,
            terms=build.build_terms(plan),
            pack=build.build_packer(plan, plan.batch.rows, codec.pad_id),
            publish=engine.publish,
            keep_episodes=keep_episodes,
            log=log,
            evaluate=lambda _: build.greedy_and_sampled(plan, pool, validation),
            save=runs.saver(checkpoints, lambda p: {"tasks": stream.state_dict(p.ticket)}),
            steps=plan.rl.steps,
            groups_per_batch=plan.rl.groups_per_batch,
            group_size=plan.rl.group_size,
            scale=plan.rl.scale,
            drop_equal_groups=plan.rl.drop_equal_groups,
            eval_every=plan.eval.every,
            save_every=plan.rl.save_every,
            stop=lambda: stop() or bool(stop_at_step and progress.step >= stop_at_step),
        )


def parse_range(text: str) -> tuple[int, int] | None:
    """ "a:b" as two steps, a <= b; None for ""."""
    if not text:
        return None
    a, _, b = text.partition(":")
    if not (a.isdecimal() and b.isdecimal() and int(a) <= int(b)):
        raise cli.ConfigError(f"--profile_steps: got {text!r}, want a:b with steps a <= b, e.g. 10:12")
    return int(a), int(b)


def main(_) -> None:
    with cli.validating():
        workdir = cli.want_workdir(flags.FLAGS.workdir)
        if flags.FLAGS.config is not None and flags.FLAGS.reward:
            cli.override(flags.FLAGS.config, "world.options.reward", flags.FLAGS.reward)
        config = cli.resolve(flags.FLAGS.config, workdir)
        plan = make_plan(config)
        profile = parse_range(flags.FLAGS.profile_steps)
        init = Path(flags.FLAGS.init) if flags.FLAGS.init else None
        cli.check_init(init)
    with cli.open_workdir(workdir, config) as folder:
        run(plan, folder, init, stop_at_step=flags.FLAGS.stop_at_step, profile=profile)


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    flags.DEFINE_string(
        "init", None, "Folder of the run (launch.sft or launch.train) whose weights and tokenizer to start from"
    )
    flags.DEFINE_string("reward", None, "module:function that judges answers, where the world has the option reward")
    flags.DEFINE_string("profile_steps", "", "a:b, optimizer steps to record with jax.profiler into D/profile")
    flags.DEFINE_integer(
        "stop_at_step", 0, "End after this optimizer step with a checkpoint, as a signal would (0: at rl.steps)"
    )


if __name__ == "__main__":
    define_flags()
    cli.run(main)
