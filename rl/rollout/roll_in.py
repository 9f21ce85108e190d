"""Going on from the middle of a stored episode: its first turns are said again, id by id, and then the policy goes on.

The world is brought there by the same actions (a world is a function of task.seed and of what was done), and what it
answers must be what it answered then: the ids before the first new token are exactly the stored ones, or the episode
ends as ENV_ERROR. So a label that comes of it is one of that state.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envs.base import EnvError
from rl.rewards.outcome import success
from rl.rollout.worker import run_episode
from rl.types import Trajectory, Turn


@dataclasses.dataclass(frozen=True)
class _Said:
    """One stored turn: what was read before it since the last one (a whole prompt, where it begins a row), and it."""

    given: list[int]
    turn: Turn


def starts_of(trajectory: Trajectory) -> list[int]:
    """After how many turns it can be gone on from: 1 up to all but the last, after which it was over."""
    return list(range(1, trajectory.n_turns))


def roll_in(starts: Mapping[int, tuple[Trajectory, int]]) -> Callable[..., Trajectory]:
    """The `episode` of a Pool: ticket t goes on after the first n turns of (trajectory, n) = starts[t]. Other arguments
    are those of `run_episode`.

    The limits are those of this run, and count what is said again.
    """

    def episode(env, task, codec, session, *, ticket: int, **options: Any) -> Trajectory:
        return run_episode(env, task, codec, RollIn(session, *starts[ticket]), ticket=ticket, **options)

    return episode


def success_frac(trajectories: Sequence[Trajectory]) -> float:
    """Share of the continuations that succeed: a soft label of Math-Shepherd (2312.08935). NaN without one."""
    scored = [success(t) for t in trajectories if t.status.scored]
    return math.fsum(scored) / len(scored) if scored else math.nan


class RollIn:
    """A session that samples nothing in its first `n` turns: they are those of `trajectory`. Then `session` goes on.

    Does not cover ids that a constraint forced (training has none). Errors: ValueError for an `n` after which the
    episode was over; EnvError where what is to be read is not what was read then.
    """

    def __init__(self, session, trajectory: Trajectory, n: int):
        if n not in starts_of(trajectory):
            raise ValueError(f"roll-in: got {n} turns of an episode of {trajectory.n_turns}, want 1 to all but one")
        self._session, self._told, self._n = session, _told(trajectory), n
        self._next = 0  # the turn that is asked for
        self._ids: list[int] = []  # of the row, as long as the session has not seen them
        self._began = 0  # the turn at which that row began

    def generate(self, new_ids: Sequence[int], **options: Any) -> Turn:
        index, self._next = self._next, self._next + 1
        if index > self._n:
            return self._session.generate(new_ids, **options)
        said = self._told[index]
        if list(new_ids) != said.given:
            raise EnvError(
                f"roll-in: turn {index} reads other ids than it did: {len(new_ids)} now, {len(said.given)} then; want "
                "a world that answers the same actions alike, and the run's own world and tokenizer"
            )
        self._ids += said.given
        if index < self._n:
            self._ids += said.turn.ids
            return said.turn
        if self._began:
            self._session.restart(self._began)
        return self._session.generate(self._ids, **options)

    def restart(self, turn: int) -> None:
        if self._next > self._n:
            self._session.restart(turn)
        else:
            self._ids, self._began = [], turn


def _told(trajectory: Trajectory) -> list[_Said]:
    told = []
    for row in trajectory.rows:
        read = 0
        for turn in np.unique(row.turn[row.action_mask]).tolist():
            (at,) = np.nonzero(row.action_mask & (row.turn == turn))
            columns = (getattr(row, name)[at].tolist() for name in ("tokens", "behavior_logp", "version"))
            told.append(_Said(row.tokens[read : at[0]].tolist(), Turn(*columns, "stop")))
            read = int(at[-1]) + 1
    return told
