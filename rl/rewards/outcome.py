"""Outcome terms: was the task done, by the world's own account."""

import math
from collections.abc import Callable

from rl.types import Status, Trajectory


def success(trajectory: Trajectory) -> float:
    """1 if the episode ended by itself and the world reports success, else 0: a limit is a failure."""
    return float(trajectory.status is Status.DONE and bool(_fact(trajectory, "success")))


def fact(name: str) -> Callable[[Trajectory], float]:
    """A term that reads the fact `name` as a number: exact match, F1, a count. None reads as NaN, not judged."""

    def read(trajectory: Trajectory) -> float:
        value = _fact(trajectory, name)
        return math.nan if value is None else float(value)

    return read


def _fact(trajectory: Trajectory, name: str):
    if name not in trajectory.facts:
        raise ValueError(
            f"episode {trajectory.task_id} (ticket {trajectory.ticket}, {trajectory.status.name}): no fact {name!r}, "
            f"the world reports {sorted(trajectory.facts)}; name one of them in the reward"
        )
    return trajectory.facts[name]
