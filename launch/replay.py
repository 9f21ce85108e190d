"""Reinforcement learning on stored episodes alone: `launch.train --replay=WORKDIR[,WORKDIR]`. No world, no engine.

Groups come in the order of the runs named and of their tickets, after the last one again from the first, until
`rl.steps`. Rewards are computed anew by the config's terms from the stored facts, advantages by its credit; what is not
admitted gives its place to the next group, as in a run that plays. `behavior_logp` is the stored one, so the ratio of
the loss corrects for the policy having been another (`ppo_decoupled`, or `rl.is_cap`: with the proximal policy of the
moment at which the batch is cut). A token's staleness is this run's version, plus 1 and the newest stored version, less
its own: every stored token is at least one version old, and `rl.max_staleness` does not hold.

Config, checkpoints, metrics, resuming and signals are those of launch.train. Not read: `curriculum.name`, `hints`,
`engine` and, but for `abandoned`, `rollout` (what was played was played), and `eval`: nothing is evaluated while it
trains, for want of a world, and no checkpoint is the best; `launch.evaluate --workdir=D` does it afterwards. The
episodes are not copied into D, which keeps their address and size in replay.json: `--workdir=D` alone resumes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import cli
from launch.plan import Plan
from launch.workdir import write_json

if TYPE_CHECKING:  # importing them starts jax, which flags precede
    from rl.hosts import Hosts
    from rl.replay import Replay

NOTE = "replay.json"


def sources(flag: str | None, workdir: Path) -> list[Path]:
    """The runs to replay: those that `flag` names, or that the run in `workdir` began with; [] for one that plays.

    Errors: ConfigError where these differ.
    """
    named = [Path(name).resolve() for name in (flag or "").split(",") if name]
    if flag is not None and (not named or len(set(named)) < len(named)):
        raise cli.ConfigError(f"--replay: got {flag!r}, want WORKDIR[,WORKDIR], folders of runs, each once")
    if not (workdir / "config.json").exists():
        return named
    began = [Path(name) for name in _noted(workdir).get("workdirs", [])]
    if named and named != began:
        there = f"with --replay={','.join(map(str, began))}" if began else "without --replay"
        raise cli.ConfigError(f"--replay: {workdir} began {there}; give a new --workdir")
    return began


def read(plan: Plan, workdirs: Sequence[Path], kept: Path) -> "Replay":
    """The stored groups, of which a batch can be made, and whose facts the plan's terms read.

    `kept`: the folder of the tokenizer that the policy reads by. Errors: ValueError, OSError.
    """
    from launch import build
    from rl.replay import Replay
    from rl.rewards.outcome import ENDED

    check_tokenizers(workdirs, kept)
    stored, n = Replay(workdirs, plan.rl.group_size), plan.rl.groups_per_batch
    if len(stored) < n:
        raise ValueError(f"--replay: got {len(stored)} groups, want at least rl.groups_per_batch={n}")
    rows = sorted((sum(len(t.rows) for t in group) for group in stored.groups), reverse=True)
    longest = max((len(row.tokens) for group in stored.groups for t in group for row in t.rows), default=0)
    most = sum(rows[:n])
    for name, got, room in (("length", longest, plan.batch.length), ("rows", most, plan.batch.rows)):
        if got > room:
            raise ValueError(f"--replay: the stored episodes need batch.{name}={got}, got {room}; raise it")
    for term in build.build_terms(plan):
        for t in (t for group in stored.groups for t in group if t.status in ENDED):
            if absent := sorted({*term.reads} - t.facts.keys()):
                raise ValueError(
                    f"reward.terms.{term.name}: reads {absent}, which the stored episode of task {t.task_id} does not "
                    f"report; want of {sorted(t.facts)}"
                )
    return stored


def check_tokenizers(workdirs: Sequence[Path], kept: Path) -> None:
    """That the ids stored there are those of the tokenizer in the folder `kept`. Errors: ValueError."""
    for own in (workdir / "tokenizer" / "tokenizer.json" for workdir in workdirs):
        if not own.is_file():
            raise ValueError(f"--replay: no {own}; want the folder of a run")
        if own.read_bytes() != (kept / "tokenizer.json").read_bytes():
            raise ValueError(f"--replay: {own.parent} is another tokenizer than {kept}: its ids mean something else")


def run(
    plan: Plan,
    workdir: cli.Workdir,
    init: Path | None,
    stored: "Replay",
    *,
    stop_at_step: int = 0,
    profile: tuple[int, int] | None = None,
    hosts: "Hosts | None" = None,
) -> None:
    """The whole stage, as `train.run`, on what `read` has found."""
    from launch import build, policy, reward_models, runs
    from rl import checkpoint, loop
    from rl.hosts import ALONE

    hosts = hosts or ALONE

    def start_codec():
        if init is not None:
            runs.note_init(init, workdir)
            runs.copy_tokenizer(init, workdir)
        elif not (plan.model_path or plan.tokenizer_path):
            runs.copy_tokenizer(stored.workdirs[0], workdir)
        return policy.build_codec(plan, None, workdir / "tokenizer")

    with cli.validating(), hosts.telling():
        hosts.first(lambda: _note(workdir, stored))
        codec = hosts.first(start_codec)
        check_tokenizers(stored.workdirs, workdir / "tokenizer")
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        terms = reward_models.build_terms(plan, codec, workdir / "tokenizer")
        packed = build.build_packer(plan, codec, None, hosts)
        build.use_compilation_cache()
        learner = build.build_rl_learner(plan, model)
        state, progress, ref = runs.start_rl(plan, model, workdir, init, learner, hosts=hosts)
    passes = plan.rl.steps // plan.rl.minibatches * plan.rl.groups_per_batch / len(stored)
    print(f"{len(stored)} stored groups; {plan.rl.steps} steps go through them {passes:.2g} times or more", flush=True)

    def pack(*episodes: Any, version: int):
        """Whoever sampled these was older than this run's first policy, by its own run's count."""
        return packed(*episodes, version=version + stored.newest + 1)

    with (
        runs.recording(workdir, progress, plan.rl.steps, limits=plan.alarms, hosts=hosts) as record,
        checkpoint.Checkpoints(workdir / "ckpt", hosts=hosts) as checkpoints,
        runs.profiling(
            workdir / "profile", None if hosts.index else profile, progress.step, stride=plan.rl.minibatches
        ) as mark_step,
        runs.stopping() as stop,
    ):

        def log(step: int, metrics) -> None:
            record(step, metrics)
            mark_step(step)

        loop.train(
            learner,
            state,
            ref,
            stored,
            build.build_gate(plan, progress.version, hosts),
            progress,
            draw=stored.draw,
            outcome=lambda ticket, trajectories: None,
            observe=lambda outcomes, ticket: None,
            pack=pack,
            publish=lambda params, version: None,
            keep_episodes=lambda step, episodes: None,
            log=log,
            evaluate=None,
            save=runs.saver(checkpoints),
            steps=plan.rl.steps,
            eval_every=0,
            **runs.learning_options(plan, terms),
            stop=lambda: stop() or bool(stop_at_step and progress.step >= stop_at_step),
            hosts=hosts,
        )
    runs.want_finished(progress, min(stop_at_step or plan.rl.steps, plan.rl.steps))


def _noted(workdir: Path) -> dict[str, Any]:
    file = workdir / NOTE
    return json.loads(file.read_text()) if file.exists() else {}


def _note(workdir: Path, stored: "Replay") -> None:
    """What is replayed, at the start; ever after it must be the same. Errors: ValueError."""
    now = {"workdirs": list(map(str, stored.workdirs)), "groups": len(stored), "newest": stored.newest}
    before = _noted(workdir)
    if before and before != now:
        raise ValueError(f"{workdir}: began with the episodes {before}, got {now}; did the run go on that wrote them?")
    write_json(workdir / NOTE, now)
