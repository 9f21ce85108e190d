"""Outcome terms: was the task done, by the world's own account."""

import math
from collections.abc import Callable, Mapping

from rl.rewards.compose import RewardTerm, check_terms
from rl.types import Status, Trajectory

# Facts that lie in [0, 1]. Any other is a count, and only the experiment knows how far that one goes.
FRACTIONS = ("success", "exact_match", "f1", "gold_retrieved", "evidence_frac", "score")


def terms(weights: Mapping[str, float], reach: Mapping[str, float], *, max_shaping: float = 0.3) -> list[RewardTerm]:
    """Terms by name, "success" or a fact of the world, in which the outcome leads (`check_terms`).

    `reach`: the largest value of each fact that is a count. Raises ValueError for a count without it.
    """
    unbounded = [name for name in weights if name not in FRACTIONS and name not in reach]
    if unbounded:
        raise ValueError(
            f"reward.terms: {unbounded[0]!r} is not known to lie in [0, 1]; say how large it can get, "
            f"reward.reach.{unbounded[0]}=N (for something counted once a turn: the turns)"
        )
    made = [
        RewardTerm(name, weight, "episode", success if name == "success" else fact(name), float(reach.get(name, 1.0)))
        for name, weight in weights.items()
    ]
    check_terms(made, outcome="success", max_shaping=max_shaping)
    return made


def success(trajectory: Trajectory) -> float:
    """1 if the episode ended by itself and the world reports success, else 0: a limit is a failure."""
    return float(trajectory.status is Status.DONE and bool(_fact(trajectory, "success")))


def fact(name: str) -> Callable[[Trajectory], float]:
    """A term that reads the fact `name` as a number: exact match, F1, a count. None reads as NaN, not judged.

    An episode that met a limit may have had no turn in which the world could report: there, a missing fact is 0.
    """

    def read(trajectory: Trajectory) -> float:
        value = _fact(trajectory, name)
        return math.nan if value is None else float(value)

    return read


def _fact(trajectory: Trajectory, name: str):
    if name not in trajectory.facts:
        if trajectory.status in (Status.TURN_LIMIT, Status.TOKEN_LIMIT):
            return 0.0
        raise ValueError(
            f"episode {trajectory.task_id} (ticket {trajectory.ticket}, {trajectory.status.name}): no fact {name!r}, "
            f"the world reports {sorted(trajectory.facts)}; name one of them in the reward"
        )
    return trajectory.facts[name]
