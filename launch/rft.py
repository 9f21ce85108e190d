"""Rejection-sampling fine-tuning: roll out, imitate what succeeded, and again with the policy that comes of it.

    python -m launch.rft --config=configs/r1_arith.py --workdir=D --init=SFT_WORKDIR

Each round plays `rft.tasks` training tasks, keeps them in D/episodes (one file a round), and trains on the successes
alone, by cross-entropy on the sampled tokens, with the rates of `sft`. `--workdir=D` alone resumes; a round that was
played is read back, not played again. The control that reinforcement is compared with: nothing is learnt from failures.
Source: the rejection sampling of Llama 2 (2307.09288) and of STaR (2203.14465), which starts each round afresh; here
the weights go on. Does not cover: several processes.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from launch import cli
from launch.plan import Plan, make_plan

if TYPE_CHECKING:  # importing it starts jax, which flags precede
    from rl.types import Trajectory


def run(plan: Plan, workdir: cli.Workdir, init: Path | None) -> None:
    """The whole stage; everything it leaves is in `workdir`. Raises runs.Stopped on a signal."""
    import jax

    from launch import build, policy, runs
    from rl import checkpoint, supervised
    from rl.curriculum import TaskStream
    from rl.episodes import EpisodeLog, read_episodes

    rft = plan.rft
    total = rft.rounds * rft.steps
    with cli.validating():
        world = build.build_world(plan)
        codec = runs.start_codec(plan, world, workdir, init)
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        stream = TaskStream(world.tasks("train"), plan.seed)
        build.use_compilation_cache()
        # One fall of the rate over all rounds.
        learner = build.build_sft_learner(
            dataclasses.replace(plan, sft=dataclasses.replace(plan.sft, steps=total)), model
        )
        start = None
        if not checkpoint.steps(workdir / "ckpt"):
            key = jax.random.fold_in(jax.random.key(plan.seed), 0)
            start = runs.starting_params(plan, model, workdir, init, learner, key)
        state, progress = runs.start_or_resume(workdir, learner, start, donate=True)
        del start

    def rolled(number: int, params) -> list["Trajectory"]:
        """The episodes of round `number`, played by `params` unless they are kept already."""
        with EpisodeLog(workdir) as log:
            if kept := list(read_episodes(workdir, first=number, last=number)):
                return kept
            first = number * rft.tasks
            tasks = [stream.draw(first + i) for i in range(rft.tasks)]
            with build.serving(plan, model, params, number, world, codec) as (_, pool):
                groups = pool.run_many(tasks, samples=plan.rl.group_size, first_ticket=first)
            played = [trajectory for group in groups for trajectory in group.trajectories]
            for trajectory in played:
                log.append(trajectory)
            log.end_step(number)
        return played

    with (
        runs.recording(workdir, progress, total, console_every=10) as log,
        checkpoint.Checkpoints(workdir / "ckpt") as checkpoints,
        runs.stopping() as stop,
    ):
        while progress.step < total and not stop():
            number = progress.step // rft.steps
            episodes = rolled(number, state.params)
            kept = successes(episodes, rft.per_task)
            print(f"round {number + 1} of {rft.rounds}: {len(kept)} of {len(episodes)} episodes are kept", flush=True)
            if not kept:
                raise ValueError(
                    f"rft: none of {len(episodes)} episodes succeeded; start from a policy that sometimes does (--init)"
                )
            state = supervised.train(
                learner,
                state,
                build.pack_examples(plan, codec, kept, version=number),
                progress,
                rows_per_step=plan.sft.rows,
                seed=plan.seed,
                steps=(number + 1) * rft.steps,
                log=log,
                evaluate=None,
                save=runs.saver(checkpoints),
                eval_every=0,
                save_every=plan.sft.save_every,
                stop=stop,
            )
    runs.want_finished(progress, total)


def successes(episodes: Iterable["Trajectory"], per_task: int) -> list["Trajectory"]:
    """The episodes that ended by themselves with success, in order; of one task the first `per_task` alone, so that an
    easy task does not outweigh the others.
    """
    from rl.rewards.outcome import success

    kept, count = [], Counter()
    for trajectory in episodes:
        if success(trajectory) and count[trajectory.task_id] < per_task:
            count[trajectory.task_id] += 1
            kept.append(trajectory)
    return kept


def main(_) -> None:
    with cli.validating():
        workdir = cli.want_workdir(flags.FLAGS.workdir)
        config = cli.resolve(flags.FLAGS.config, workdir)
        plan = make_plan(config)
        init = Path(flags.FLAGS.init) if flags.FLAGS.init else None
        cli.check_init(init)
        from launch import build, runs  # jax starts here, still before the workdir is made

        build.check_data(plan, demonstrations=False, kept=(init or Path(workdir)) / "tokenizer")
        runs.check_start(plan, Path(workdir), init)
    with runs.exits_when_stopped(), cli.open_workdir(workdir, config) as folder:
        run(plan, folder, init)


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    flags.DEFINE_string("init", None, "Folder of the run whose weights and tokenizer to start from")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
