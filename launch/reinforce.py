"""One run of rl/loop.py, whoever launches it: its parts, what is open while it goes on, and the loop itself.

parts = build_parts(plan, workdir, init)             what can be wrong with data and checkpoints is said here
with opened(parts, steps=plan.rl.steps) as live:     engine and worlds, records, signals
    train(parts, live, steps=plan.rl.steps)
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from envs import choose_tasks
from envs.base import Task, World
from launch import build, draws, policy, reward_models, runs
from launch.cli import Workdir, validating
from launch.plan import Plan
from models.codec import Codec
from models.config import ModelConfig
from rl import checkpoint, loop
from rl.curriculum import Curriculum
from rl.episodes import EpisodeLog
from rl.hosts import ALONE, Hosts
from rl.learner import Learner, TrainState
from rl.loop import Progress
from rl.metrics.engine import engine_metrics, pool_metrics
from rl.rewards.compose import RewardTerm
from rl.rollout.abandon import Abandonment
from rl.rollout.engine import Engine
from rl.rollout.pool import Pool
from rl.rollout.replicas import Replicas
from rl.rollout.values import Critic
from rl.timeline import Recorder, Timeline, unrecorded
from rl.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run has before anything is sampled. `train` DONATES `state` and goes on with `progress` in place."""

    plan: Plan
    workdir: Workdir
    hosts: Hosts
    world: World
    codec: Codec
    model: ModelConfig
    learner: Learner
    curriculum: Curriculum
    options: Mapping[str, Any]  # `loop_options`, and the quarantine
    abandonment: Abandonment
    critic: Critic | None  # that `abandonment` asks
    validation: Sequence[Task]
    state: TrainState
    ref: Any | None
    progress: Progress


@dataclasses.dataclass(frozen=True)
class Live:
    """What is open while the loop goes on. `keep_episodes` and `keep_evaluated` take (step, episodes), once a step."""

    engine: Engine | Replicas
    pool: Pool
    eval_pool: Pool
    log: Callable[[int, Mapping[str, Any]], None]
    keep_episodes: Callable[[int, Sequence[Trajectory]], None]
    keep_evaluated: Callable[[int, Sequence[Trajectory]], None]
    save: Callable[[TrainState, Progress, float | None], None]
    stop: Callable[[], bool]
    span: Recorder  # of what the loop does when


def build_parts(
    plan: Plan,
    workdir: Workdir,
    init: Path | None,
    *,
    choose: Callable[[World], Sequence[Task]] = lambda world: world.tasks("train"),
    hosts: Hosts = ALONE,
) -> Parts:
    """The parts of the run in `workdir`, from its newest checkpoint or from its start; it trains on the tasks that
    `choose` takes from its world. Errors (ConfigError): data or checkpoints that are not there, or not whole.
    """

    def on_host(host: Mapping[str, Any]) -> None:
        draws.resume(host, curriculum, quarantine)

    with validating(), hosts.telling():
        world = build.build_world(plan)
        codec = hosts.first(partial(runs.start_codec, plan, world, workdir, init))
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        tasks = choose(world)
        curriculum = draws.build_curriculum(plan, tasks)
        terms = reward_models.build_terms(plan, codec, workdir / "tokenizer")
        quarantine = draws.build_quarantine(plan, len(tasks), workdir, hosts)
        options = {**loop_options(plan, codec, world, curriculum, terms, hosts), "quarantine": quarantine}
        validation = choose_tasks(world, plan.eval.split, plan.eval.n, plan.seed)
        build.use_compilation_cache()
        learner = build.build_rl_learner(plan, model)
        state, progress, ref = runs.start_rl(
            plan,
            model,
            workdir,
            init,
            learner,
            on_host=on_host,
            hosts=hosts,
        )
        critic = reward_models.build_critic(plan, model, state.params, progress.version, codec.pad_id)
        abandonment = reward_models.build_abandonment(plan, workdir / "tokenizer", critic)
    return Parts(
        *(plan, workdir, hosts, world, codec, model, learner, curriculum, options),
        *(abandonment, critic, validation, state, ref, progress),
    )


def loop_options(
    plan: Plan,
    codec: Codec,
    world: World,
    curriculum: Curriculum,
    terms: Sequence[RewardTerm],
    hosts: Hosts = ALONE,
) -> dict[str, Any]:
    """What of `loop.train` the plan decides, whoever samples: which tasks are drawn and which groups are trained on,
    what an episode is worth and whose merit that is. Errors: ValueError.
    """
    return {
        "draw": draws.build_draw(plan, world, curriculum),
        "outcome": curriculum.outcome,
        "observe": curriculum.observe,
        "pack": build.build_packer(plan, codec, world, hosts),
        **runs.learning_options(plan, terms),
    }


@contextlib.contextmanager
def opened(
    parts: Parts, *, steps: int, profile: tuple[int, int] | None = None, timeline: bool = False
) -> Iterator[Live]:
    """Engine, worlds, records and signals of a run of `steps` steps, for as long as the block runs; all are closed
    whatever happens in it. With `timeline` process 0 then writes who did what when into timeline.json.
    """
    plan, workdir, hosts, progress = parts.plan, parts.workdir, parts.hosts, parts.progress
    world, codec = parts.world, parts.codec
    own = {"process": hosts.index, "first_step": progress.step + 1}
    params = policy.sampled(parts.state.params)
    kept = Timeline() if timeline and not hosts.index else None
    playing = {"abandonment": parts.abandonment, "timeline": kept}
    with (
        runs.tracing(kept, workdir / "timeline.json"),
        build.serving(plan, parts.model, params, progress.version, world, codec, **playing) as (engine, pool),
        build.evaluating(plan, engine, pool, world, codec) as eval_pool,
        runs.recording(workdir, progress, steps, limits=plan.alarms, hosts=hosts) as record,
        EpisodeLog(workdir, **own) as episodes,
        EpisodeLog(workdir, folder="episodes_eval", **own) as eval_episodes,
        checkpoint.Checkpoints(workdir / "ckpt", hosts=hosts) as checkpoints,
        runs.profiling(
            workdir / "profile", None if hosts.index else profile, progress.step, stride=plan.rl.minibatches
        ) as mark_step,
        runs.stopping() as stop,
    ):

        def keep(where: EpisodeLog, step: int, finished: Sequence[Trajectory]) -> None:
            for trajectory in finished:
                where.append(trajectory)
            where.end_step(step)

        seen, counted = engine.stats(), pool.stats()

        def log(step: int, metrics: Mapping[str, Any]) -> None:
            nonlocal seen, counted
            (before, seen), (counts, counted) = (seen, engine.stats()), (counted, pool.stats())
            record(step, {**metrics, **engine_metrics(before, seen), **pool_metrics(counts, counted)})
            mark_step(step)

        def host(progress: Progress) -> dict[str, Any]:
            tasks = draws.saved(parts.curriculum, progress.ticket, hosts)
            return {"tasks": tasks, "quarantine": parts.options["quarantine"].state_dict()}

        yield Live(
            engine=engine,
            pool=pool,
            eval_pool=eval_pool,
            log=log,
            keep_episodes=partial(keep, episodes),
            keep_evaluated=partial(keep, eval_episodes),
            save=runs.saver(checkpoints, host),
            stop=stop,
            span=unrecorded if kept is None else kept.track("learner"),
        )


def publish(parts: Parts, live: Live, params: Any, version: int) -> None:
    """Sample by a copy of `params` from now on, and judge by one where a critic does."""
    if parts.critic is not None:
        parts.critic.publish(params, version)
    live.engine.publish(policy.sampled(params), version)


def train(parts: Parts, live: Live, *, steps: int, stop_at_step: int = 0) -> None:
    """`loop.train` until `steps`, until a signal, or until after `stop_at_step`, as a signal would (0: never)."""
    plan, hosts, progress = parts.plan, parts.hosts, parts.progress

    def evaluate() -> dict[str, float]:
        result, played = build.greedy_and_sampled(plan, live.eval_pool, parts.validation, hosts)
        live.keep_evaluated(progress.step, played)
        return result

    loop.train(
        parts.learner,
        parts.state,
        parts.ref,
        live.pool,
        build.build_gate(plan, progress.version, hosts),
        progress,
        **parts.options,
        publish=partial(publish, parts, live),
        keep_episodes=live.keep_episodes,
        log=live.log,
        evaluate=evaluate,
        save=live.save,
        steps=steps,
        eval_every=plan.eval.every,
        stop=lambda: live.stop() or bool(stop_at_step and progress.step >= stop_at_step),
        hosts=hosts,
        span=live.span,
    )
