"""Outcome terms: was the task done, by the world's own account; and facts as terms."""

import math
from collections.abc import Callable
from typing import Any

from rl.rewards.compose import RewardTerm
from rl.types import Status, Trajectory

# Facts that lie in [0, 1]. Any other is a count, and only the experiment knows how far that one goes.
FRACTIONS = ("success", "exact_match", "f1", "gold_retrieved", "evidence_frac", "score")
LIMITS = (Status.TURN_LIMIT, Status.TOKEN_LIMIT)


def success_term(weight: float) -> RewardTerm:
    """1 where the world reports success and the episode ended by itself, else 0."""
    return RewardTerm("success", weight, "episode", success, reads=("success",))


def fact_term(name: str, weight: float, reach: float) -> RewardTerm:
    """The fact `name` as a number; `reach` is its largest value."""
    return RewardTerm(name, weight, "episode", fact(name), reach, reads=(name,))


def success(trajectory: Trajectory) -> float:
    """1 if the episode ended by itself and the world reports success, else 0: a limit is a failure."""
    return float(trajectory.status is Status.DONE and bool(read_fact(trajectory, "success")))


def fact(name: str) -> Callable[[Trajectory], float]:
    """A term that reads the fact `name` as a number: exact match, F1, a count. None reads as NaN, not judged.

    An episode that met a limit may have had no turn in which the world could report: there, a missing fact is 0.
    """

    def read(trajectory: Trajectory) -> float:
        value = read_fact(trajectory, name, at_limit=0.0)
        return math.nan if value is None else float(value)

    return read


def read_fact(trajectory: Trajectory, name: str, *, at_limit: Any = 0.0) -> Any:
    """`facts[name]`; `at_limit` where it is missing because a limit came before the world's first report.

    Errors: ValueError that lists what the world reports.
    """
    if name not in trajectory.facts:
        if trajectory.status in LIMITS:
            return at_limit
        raise ValueError(
            f"episode {trajectory.task_id} (ticket {trajectory.ticket}, {trajectory.status.name}): no fact {name!r}, "
            f"the world reports {sorted(trajectory.facts)}; name one of them in the reward"
        )
    return trajectory.facts[name]
