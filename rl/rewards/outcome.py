"""Outcome terms: was the task done, by the world's own account; and facts as terms."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from rl.rewards.compose import RewardTerm
from rl.types import Status, Trajectory

# Facts that lie in [0, 1]. Any other is a count, and only the experiment knows how far that one goes.
FRACTIONS = ("success", "exact_match", "f1", "gold_retrieved", "evidence_frac", "score")
LIMITS = (Status.TURN_LIMIT, Status.TOKEN_LIMIT)
ENDED = (Status.DONE, Status.GAVE_UP)  # by itself


def success_term(weight: float) -> RewardTerm:
    """1 where the world reports success and the episode ended by itself, be it by giving up, else 0."""
    return RewardTerm("success", weight, "episode", success, reads=("success",))


def fact_term(name: str, weight: float, reach: float) -> RewardTerm:
    """The fact `name` as a number; `reach` is its largest value."""
    return RewardTerm(name, weight, "episode", fact(name), reach, reads=(name,))


def orm_term(
    weight: float,
    *,
    path: str,
    threshold: float = 0.0,
    score: Callable[[Sequence[Trajectory]], Float[np.ndarray, " N"]] | None,
) -> RewardTerm:
    """P(success) by an outcome reward model, the frozen one of the `launch.train_rm` run in `path`; with a `threshold`
    1 where P is at least that, else 0 (WebRL, 2411.02337: 0.5). It looks at the ids of an episode, and at no fact.

    `score` judges several episodes (rl/reward_model.py), NaN where it cannot; None: options are checked, and nobody can
    be judged. Errors: ValueError for no path, or a threshold outside [0, 1].
    """
    if not path or not 0 <= threshold <= 1:
        raise ValueError(
            f"orm: got {path=}, {threshold=}; want the workdir of a launch.train_rm run, and 0 <= threshold <= 1"
        )

    def fn(trajectories: Sequence[Trajectory]) -> list[float]:
        if score is None:
            raise ValueError(f"orm: got nobody who judges, want the reward model in {path}")
        p = score(trajectories)
        return np.where(np.isnan(p) | (threshold == 0), p, p >= threshold).tolist()

    return RewardTerm("orm", weight, "episode", fn, batched=True)


def success(trajectory: Trajectory) -> float:
    """1 if the episode ended by itself and the world reports success, else 0: a limit is a failure. Giving up is an end
    of its own, and right where a world says so, of a task that cannot be done.
    """
    return float(trajectory.status in ENDED and bool(read_fact(trajectory, "success")))


def is_unlabelled(trajectory: Trajectory) -> bool:
    """Whether the world does not say if an episode that ended by itself succeeded; any other has failed."""
    return trajectory.status in ENDED and "success" not in trajectory.facts


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
