"""A reward for each turn by a process reward model: how much each turn moves the score of the episode so far."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from rl.rewards.compose import RewardTerm
from rl.types import Trajectory

HOW = ("min", "last")


def prm_term(
    weight: float,
    *,
    path: str,
    how: str = "min",
    score: Callable[[Sequence[Trajectory]], list[Float[np.ndarray, " turns"]]] | None,
) -> RewardTerm:
    """`by_turn` of P(success) after each turn, by the frozen process reward model of the `launch.train_rm` run in
    `path`. It looks at the ids of an episode, and at no fact.

    `score` judges several episodes (rl/reward_model.py); None: options are checked, and nobody can be judged. Errors:
    ValueError for no path, or another `how`.
    """
    if not path or how not in HOW:
        raise ValueError(f"prm: got {path=}, {how=}; want the workdir of a launch.train_rm run, and how of {HOW}")

    def fn(trajectories: Sequence[Trajectory]) -> list[list[float]]:
        if score is None:
            raise ValueError(f"prm: got nobody who judges, want the reward model in {path}")
        return [by_turn(p, how=how) for p in score(trajectories)]

    return RewardTerm("prm", weight, "turn", fn, batched=True)


def by_turn(p: Float[np.ndarray, " turns"], *, how: str) -> list[float]:
    """r_k = s_k - s_{k-1}, s_{-1} = 0, whose sum is the episode's score, the last s, in [0, 1].

    "min": s_k = min(p_0, ..., p_k), Math-Shepherd's score of a solution (2312.08935): a turn pays for making the worst
    worse. "last": s_k = p_k: a turn gets what it adds to the chance of success, or takes from it (process advantages,
    2410.08146, with the policy itself for their prover).

    NaN in `p` is a turn that was not judged: it moves nothing. An episode of which no turn was judged is [NaN].
    """
    if np.isnan(p).all():
        return [math.nan]
    moved, before = [], 0.0
    for k, now in enumerate(p.tolist()):
        first = np.isnan(p[:k]).all()
        if math.isnan(now):
            now = before
        elif how == "min" and not first:
            now = min(before, now)
        moved.append(now - before)
        before = now
    return moved
