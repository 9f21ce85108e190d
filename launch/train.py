"""Reinforcement learning: `python -m launch.train --config=configs/quickstart.py --workdir=D --init=SFT_WORKDIR`.

`--workdir=D` alone resumes. `--init` names another run's folder: training starts from its best checkpoint and its
tokenizer. With `--coordinator`, `--num_processes` and `--process_id` several processes are one run; it resumes with
another number of them too. `--replay` trains on what other runs have played, without a world (launch/replay.py).
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from launch import cli, distributed, replay
from launch.plan import Plan, make_plan
from launch.plan_checks import check_processes

if TYPE_CHECKING:  # importing it starts jax, which flags precede
    from rl.hosts import Hosts


def run(
    plan: Plan,
    workdir: cli.Workdir,
    init: Path | None,
    *,
    stop_at_step: int = 0,
    profile: tuple[int, int] | None = None,
    hosts: "Hosts | None" = None,
) -> None:
    """The whole stage, in this process or with the other `hosts`; everything it leaves is in `workdir`. Raises
    runs.Stopped on a signal.
    """
    from envs import choose_tasks
    from launch import build, draws, policy, runs
    from rl import checkpoint, loop
    from rl.episodes import EpisodeLog
    from rl.hosts import ALONE
    from rl.metrics.engine import engine_metrics
    from rl.types import Trajectory

    hosts = hosts or ALONE

    with cli.validating(), hosts.telling():  # data and checkpoints too: whether they are there, and whole
        world = build.build_world(plan)
        codec = hosts.first(partial(runs.start_codec, plan, world, workdir, init))
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        terms = build.build_terms(plan, codec.view)
        pack = build.build_packer(plan, codec, world, hosts)
        curriculum = draws.build_curriculum(plan, world.tasks("train"))
        draw = draws.build_draw(plan, world, curriculum)
        validation = choose_tasks(world, plan.eval.split, plan.eval.n, plan.seed)
        build.use_compilation_cache()
        learner = build.build_rl_learner(plan, model)
        state, progress, ref = runs.start_rl(
            plan,
            model,
            workdir,
            init,
            learner,
            on_host=lambda host: curriculum.load_state_dict(host["tasks"]),
            hosts=hosts,
        )
    gate = build.build_gate(plan, progress.version, hosts)
    own = {"process": hosts.index, "first_step": progress.step + 1}

    with (
        build.serving(plan, model, policy.sampled(state.params), progress.version, world, codec) as (engine, pool),
        build.evaluating(plan, engine, pool, world, codec) as eval_pool,
        runs.recording(workdir, progress, plan.rl.steps, hosts=hosts) as record,
        EpisodeLog(workdir, **own) as episodes,
        EpisodeLog(workdir, folder="episodes_eval", **own) as eval_episodes,
        checkpoint.Checkpoints(workdir / "ckpt", hosts=hosts) as checkpoints,
        runs.profiling(workdir / "profile", None if hosts.index else profile, progress.step) as mark_step,
        runs.stopping() as stop,
    ):

        def keep(where: EpisodeLog, step: int, finished: list[Trajectory]) -> None:
            for trajectory in finished:
                where.append(trajectory)
            where.end_step(step)

        seen = engine.stats()

        def log(step: int, metrics) -> None:
            nonlocal seen
            before, seen = seen, engine.stats()
            record(step, {**metrics, **engine_metrics(before, seen)})
            mark_step(step)

        def evaluate() -> dict[str, float]:
            result, played = build.greedy_and_sampled(plan, eval_pool, validation, hosts)
            keep(eval_episodes, progress.step, played)
            return result

        loop.train(
            learner,
            state,
            ref,
            pool,
            gate,
            progress,
            draw=draw,
            outcome=curriculum.outcome,
            observe=curriculum.observe,
            pack=pack,
            publish=lambda params, version: engine.publish(policy.sampled(params), version),
            keep_episodes=partial(keep, episodes),
            log=log,
            evaluate=evaluate,
            save=runs.saver(checkpoints, lambda p: {"tasks": curriculum.state_dict(p.ticket)}),
            eval_every=plan.eval.every,
            **runs.loop_options(plan, terms),
            stop=lambda: stop() or bool(stop_at_step and progress.step >= stop_at_step),
            hosts=hosts,
        )
    runs.want_finished(progress, min(stop_at_step or plan.rl.steps, plan.rl.steps))


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
        if flags.FLAGS.reward:
            if flags.FLAGS.config is None:
                raise cli.ConfigError("--reward: a run in --workdir has its own; give --config and a new --workdir")
            if flags.FLAGS.replay is not None:
                raise cli.ConfigError("--reward: with --replay no answer is judged again; use reward.terms")
            cli.override(flags.FLAGS.config, "world.options.reward", flags.FLAGS.reward)
        config = cli.resolve(flags.FLAGS.config, workdir)
        plan = make_plan(config)
        profile = parse_range(flags.FLAGS.profile_steps)
        init = Path(flags.FLAGS.init) if flags.FLAGS.init else None
        cli.check_init(init)
        if init and (Path(workdir) / "init").exists():
            raise cli.ConfigError(f"--init: {workdir} has its start already; resume with --workdir={workdir} alone")
        played = replay.sources(flags.FLAGS.replay, Path(workdir))
        processes = cli.processes()

    stopped = None
    with distributed.joined(*processes) as hosts:
        with cli.validating(), hosts.telling():
            from launch import build, policy  # jax starts here, still before the workdir is made
            from launch.runs import Stopped, check_start

            check_processes(plan, hosts.count)
            given = {"init": init, "replay": played, "stop_at_step": flags.FLAGS.stop_at_step}
            distributed.check_same(hosts, config, **given)
            stage, kept = run, (init or Path(workdir)) / "tokenizer"
            if played:
                policy.check_model(plan, kept)
                own = kept if kept.exists() else played[0] / "tokenizer"
                stage = partial(replay.run, stored=replay.read(plan, played, own))
            else:
                hosts.first(partial(build.check_data, plan, demonstrations=False, kept=kept))
            check_start(plan, Path(workdir), init)

        with distributed.opened(hosts, workdir, config) as folder:
            try:
                stage(plan, folder, init, stop_at_step=flags.FLAGS.stop_at_step, profile=profile, hosts=hosts)
            except Stopped as early:
                stopped = early
    if stopped is not None:
        print(stopped, file=sys.stderr)
        sys.exit(cli.EXIT_STOPPED)


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    cli.define_processes()
    flags.DEFINE_string(
        "init", None, "Folder of the run (launch.sft or launch.train) whose weights and tokenizer to start from"
    )
    flags.DEFINE_string(
        "replay", None, "WORKDIR[,WORKDIR]: train on the episodes that these runs stored, and play none"
    )
    flags.DEFINE_string("reward", None, "module:function that judges answers, where the world has the option reward")
    flags.DEFINE_string("profile_steps", "", "a:b, optimizer steps to record with jax.profiler into D/profile")
    flags.DEFINE_integer(
        "stop_at_step",
        0,
        "End after this optimizer step with a checkpoint, as a signal would (0: at rl.steps)",
        lower_bound=0,
    )


if __name__ == "__main__":
    define_flags()
    cli.run(main)
