"""Warm start: `python -m launch.sft --config=configs/quickstart.py --workdir=D`; `--workdir=D` alone resumes.

Trains on the world's scripted, imperfect demonstrations and leaves D/ckpt and D/tokenizer for `launch.train --init=D`.
`--init=RUN` goes on from another run's policy, with its tokenizer.
"""

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from launch import cli, distributed
from launch.plan import Plan, make_plan
from launch.plan_checks import check_processes

if TYPE_CHECKING:  # importing it starts jax, which flags precede
    from rl.hosts import Hosts


def run(plan: Plan, workdir: cli.Workdir, init: Path | None = None, *, hosts: "Hosts | None" = None) -> None:
    """The whole stage, from nothing or from the run in `init`, in this process or with the other `hosts`; everything it
    leaves is in `workdir`. Raises runs.Stopped on a signal.
    """
    import jax

    from envs import choose_tasks
    from launch import build, policy, runs
    from rl import checkpoint, supervised
    from rl.hosts import ALONE

    hosts = hosts or ALONE

    with cli.validating(), hosts.telling():  # data and checkpoints too: whether they are there, and whole
        world = build.build_world(plan)
        demonstrations = hosts.first(partial(build.build_demonstrations, plan, world))
        codec = hosts.first(partial(runs.start_codec, plan, world, workdir, init))
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        build.use_compilation_cache()
        learner = build.build_sft_learner(plan, model)
        rows = build.pack_demonstrations(plan, codec, demonstrations, world)
        start = jax.random.fold_in(jax.random.key(plan.seed), 0)
        if runs.saved(workdir / "ckpt", hosts):
            pass  # it goes on
        elif init is not None or runs.saved(workdir / "init", hosts):
            start = runs.starting_params(plan, model, workdir, init, learner, start, hosts)
        else:
            start = learner.init_params(policy.fresh_start(plan, model, start))  # the state takes its buffers
        state, progress = runs.start_or_resume(workdir, learner, start, donate=True, hosts=hosts)
        del start

    with contextlib.ExitStack() as stack:
        evaluate = None
        if plan.sft.eval_every:
            engine, pool = stack.enter_context(build.serving(plan, model, state.params, progress.step, world, codec))
            pool = stack.enter_context(build.evaluating(plan, engine, pool, world, codec))
            tasks = choose_tasks(world, plan.eval.split, plan.eval.n, plan.seed)

            def evaluate(state) -> float:
                engine.publish(state.params, progress.step)
                return build.play_all(pool, tasks, seed=plan.seed, hosts=hosts)["success"]

        recording = runs.recording(workdir, progress, plan.sft.steps, console_every=10, hosts=hosts)
        log = stack.enter_context(recording)
        checkpoints = stack.enter_context(checkpoint.Checkpoints(workdir / "ckpt", hosts=hosts))
        stop = stack.enter_context(runs.stopping())
        supervised.train(
            learner,
            state,
            rows,
            progress,
            rows_per_step=plan.sft.rows,
            seed=plan.seed,
            steps=plan.sft.steps,
            log=log,
            evaluate=evaluate,
            save=runs.saver(checkpoints),
            eval_every=plan.sft.eval_every,
            save_every=plan.sft.save_every,
            stop=stop,
            hosts=hosts,
        )
    runs.want_finished(progress, plan.sft.steps)


def main(_) -> None:
    with cli.validating():
        workdir = cli.want_workdir(flags.FLAGS.workdir)
        config = cli.resolve(flags.FLAGS.config, workdir)
        plan = make_plan(config)
        init = Path(flags.FLAGS.init) if flags.FLAGS.init else None
        cli.check_init(init, workdir)
        processes = cli.processes()

    stopped = None
    with distributed.joined(*processes) as hosts:
        with cli.validating(), hosts.telling():
            from launch import build  # jax starts here, still before the workdir is made
            from launch.runs import Stopped, check_start

            check_processes(plan, hosts.count)
            distributed.check_same(hosts, config, init=init)
            kept = (init or Path(workdir)) / "tokenizer"
            hosts.first(partial(build.check_data, plan, demonstrations=True, kept=kept))
            check_start(plan, Path(workdir), init)

        with distributed.opened(hosts, workdir, config) as folder:
            try:
                run(plan, folder, init, hosts=hosts)
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
    flags.DEFINE_string("init", None, "Folder of the run whose weights and tokenizer to start from (default: none)")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
