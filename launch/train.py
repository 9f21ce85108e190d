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
    timeline: bool = False,
    hosts: "Hosts | None" = None,
) -> None:
    """The whole stage, in this process or with the other `hosts`; everything it leaves is in `workdir`. Raises
    runs.Stopped on a signal.
    """
    from launch import reinforce, runs
    from rl.hosts import ALONE

    steps = plan.rl.steps
    parts = reinforce.build_parts(plan, workdir, init, hosts=hosts or ALONE)
    with reinforce.opened(parts, steps=steps, profile=profile, timeline=timeline) as live:
        reinforce.train(parts, live, steps=steps, stop_at_step=stop_at_step)
    runs.want_finished(parts.progress, min(stop_at_step or steps, steps))


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
        cli.check_init(init, workdir)
        played = replay.sources(flags.FLAGS.replay, Path(workdir))
        processes = cli.processes()

    stopped = None
    with distributed.joined(*processes) as hosts:
        with cli.validating(), hosts.telling():
            from launch import build, policy, reward_models  # jax starts here, still before the workdir is made
            from launch.runs import Stopped, check_start

            check_processes(plan, hosts.count)
            if played and flags.FLAGS.timeline:
                raise cli.ConfigError("--timeline: with --replay nothing is played beside the learner; leave it out")
            given = {"init": init, "replay": played, "stop_at_step": flags.FLAGS.stop_at_step}
            distributed.check_same(hosts, config, **given)
            stage, kept = partial(run, timeline=flags.FLAGS.timeline), (init or Path(workdir)) / "tokenizer"
            if played:
                policy.check_model(plan, kept)
                own = kept if kept.exists() else played[0] / "tokenizer"
                stage = partial(replay.run, stored=replay.read(plan, played, own))
            else:
                hosts.first(partial(build.check_data, plan, demonstrations=False, kept=kept))
            check_start(plan, Path(workdir), init)
            own = {"tokenizer": kept, "processes": hosts.count}
            reward_models.check(reward_models.paths_of(plan), **own)
            reward_models.check(reward_models.abandons_by(plan), **own, key=reward_models.ABANDONS)

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
    flags.DEFINE_bool("timeline", False, "Write what learner and engine do when into D/timeline.json (ui.perfetto.dev)")
    flags.DEFINE_integer(
        "stop_at_step",
        0,
        "End after this optimizer step with a checkpoint, as a signal would (0: at rl.steps)",
        lower_bound=0,
    )


if __name__ == "__main__":
    define_flags()
    cli.run(main)
