"""The loop: draw → roll out → gate → score → batch → step → publish → log. Read it top to bottom.

Synchronous placement: batch v is sampled by the weights of version v alone. The unit is a *group*, `group_size`
episodes of one task; each group has a *ticket*, and batch v is the next `groups_per_batch` admitted tickets in ticket
order. The place of a group that is not admitted goes to the next ticket, so what a batch holds does not depend on timing.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from envs.base import Task
from rl import advantages
from rl.learner import Learner, TrainState
from rl.metrics.episodes import episode_means
from rl.rewards.compose import RewardTerm, reward, score_group
from rl.rollout.pool import Group, Pool
from rl.types import Mean, Trajectory


@dataclasses.dataclass
class Progress:
    """Where a run stands: host state, saved with the weights.

    `step` counts optimizer updates, `version` published batches; `ticket` is the next group to draw.
    """

    step: int = 0
    version: int = 0
    ticket: int = 0
    best_success: float = -1.0
    trained_s: float = 0.0  # the clock survives a restart


def train(
    learner: Learner,
    state: TrainState,
    ref: Any | None,
    pool: Pool,
    progress: Progress,
    *,
    draw: Callable[[int], Task],
    terms: Sequence[RewardTerm],
    pack: Callable[..., tuple[Any, Mapping[str, float]]],
    publish: Callable[[Any, int], None],
    keep_episodes: Callable[[int, Sequence[Trajectory]], None],
    log: Callable[[int, Mapping[str, Any]], None],
    evaluate: Callable[[Progress], Mapping[str, float]],
    save: Callable[[TrainState, Progress, float | None], None],
    steps: int,
    groups_per_batch: int,
    group_size: int,
    scale: str,
    drop_equal_groups: bool,
    eval_every: int,
    save_every: int,
    stop: Callable[[], bool] = lambda: False,
) -> TrainState:
    """Train until `progress.step` is `steps`, or until `stop()` after a step; updates `progress` in place.

    A failed *episode* is data; whatever a thread, the fault budget or the device raises ends the loop.
    """
    while progress.step < steps:
        clock = _Clock()

        # Draw and roll out: the next tickets, until enough groups are admitted.
        groups, refused = roll_out(pool, draw, terms, progress, groups_per_batch, group_size, drop_equal_groups)
        clock.mark("rollout")

        # Credit: one advantage an episode, relative to its group; absent where it was not judged.
        episodes = [t for group in groups for t in group.trajectories]
        rewards = np.array([reward(t) for t in episodes])
        judged = np.isfinite(rewards)
        credit = advantages.group_relative(
            np.where(judged, rewards, 0.0), np.array([t.ticket for t in episodes]), judged, scale=scale
        )
        place = [(t.ticket, t.member) for t in episodes]
        batch, packing = pack(
            episodes,
            dict(zip(place, credit, strict=True)),
            dict(zip(place, np.where(judged, rewards, 0.0), strict=True)),
            version=progress.version,
        )
        dropped = [t for group in refused for t in group.trajectories]
        keep_episodes(progress.step, [*episodes, *dropped])
        clock.mark("batch")

        # One optimizer update.
        state, learned = learner.train_step(state, learner.prepare(state, ref, batch))
        learned = jax.device_get(learned)  # D2H, once a step; waits for the update
        progress.step += 1
        clock.mark("learn")

        # Publish, evaluate, log, save.
        progress.version += 1
        publish(state.params, progress.version)
        last = progress.step == steps or stop()
        record = {
            **episode_means(episodes, dropped, families=_families([*groups, *refused])),
            **learned,
            **batch_means(groups, packing),
        }
        success = None
        if eval_every and (progress.step % eval_every == 0 or last):
            result = evaluate(progress)
            success = result["sampled"]
            record |= {f"eval/{name}": value for name, value in result.items()}
            clock.mark("eval")
        progress.trained_s += clock.total_s()
        record |= clock.means(packing["tokens"]) | {"time/trained_s": progress.trained_s}
        if last or success is not None or (save_every and progress.step % save_every == 0):
            progress.best_success = max(progress.best_success, -1.0 if success is None else success)
            save(state, progress, success)
        log(progress.step, record)
        if last:
            break
    return state


def roll_out(
    pool: Pool,
    draw: Callable[[int], Task],
    terms: Sequence[RewardTerm],
    progress: Progress,
    groups_per_batch: int,
    group_size: int,
    drop_equal_groups: bool,
) -> tuple[list[Group], list[Group]]:
    """The next `groups_per_batch` admitted groups in ticket order, scored, and the groups refused on the way.

    Refused: too few scored members (the pool says so), or equal rewards if `drop_equal_groups`. Moves
    `progress.ticket`. Exactly as many groups are under way as are still missing, so which tickets are drawn does not
    depend on timing.
    """
    admitted, refused = [], []
    under_way = 0
    while len(admitted) < groups_per_batch:
        while under_way < groups_per_batch - len(admitted):
            pool.submit_group(progress.ticket, draw(progress.ticket), group_size)
            progress.ticket += 1
            under_way += 1
        group = pool.next_group()
        under_way -= 1
        group = dataclasses.replace(group, trajectories=tuple(score_group(terms, group.trajectories)))
        if group.dropped or (drop_equal_groups and is_equal(group)):
            refused.append(group)
        else:
            admitted.append(group)
    return sorted(admitted, key=lambda group: group.ticket), sorted(refused, key=lambda group: group.ticket)


def is_equal(group: Group) -> bool:
    """True where every judged member has the same reward: such a group teaches nothing."""
    rewards = [r for r in map(reward, group.trajectories) if np.isfinite(r)]
    return not rewards or max(rewards) == min(rewards)


def batch_means(groups: Iterable[Group], packing: Mapping[str, float]) -> dict[str, Mean]:
    """How the batch was made: groups that teach nothing, retries of failed worlds, padding of the packed rows."""
    groups = list(groups)
    return {
        "batch/equal_groups_frac": Mean(sum(map(is_equal, groups)), len(groups)),
        "batch/env_retries": Mean(sum(group.retries for group in groups), len(groups)),
        "batch/pad_frac": Mean(packing["pad_frac"], 1),
        "batch/rows": Mean(packing["rows"], 1),
        "batch/tokens": Mean(packing["tokens"], 1),
        "batch/action_tokens": Mean(packing["action_tokens"], 1),
    }


def _families(groups: Iterable[Group]) -> dict[str, str]:
    return {group.task.task_id: group.task.family for group in groups}


class _Clock:
    """Seconds of each phase of one step."""

    def __init__(self):
        self._last = self._start = time.monotonic()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self._phases[phase] = now - self._last
        self._last = now

    def total_s(self) -> float:
        return time.monotonic() - self._start

    def means(self, tokens: float) -> dict[str, float]:
        """time/{phase}_s, and the tokens that were trained per second of the whole step, evaluation apart."""
        working_s = sum(s for phase, s in self._phases.items() if phase != "eval")
        return {f"time/{phase}_s": s for phase, s in self._phases.items()} | {"time/tokens_per_s": tokens / working_s}
