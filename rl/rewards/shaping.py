"""Shaping: small terms beside the outcome, about how it was reached. Costs are values in [-1, 0] under a positive
weight, and every term's reach is 1, so that a weight says the most that its term can do.

Lengths are counted in tokens that the policy sampled, over all turns: world text and forced tokens are nobody's length.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from rl.rewards.compose import RewardTerm
from rl.rewards.outcome import LIMITS, read_fact, success
from rl.types import Trajectory


def search_bonus_term(weight: float, *, at_most: int = 1) -> RewardTerm:
    """min(n, at_most) / at_most for n different searches (`searches` - `repeated`): asking again pays nothing."""
    _want(at_most >= 1, f"search_bonus: got at_most={at_most}, want at least 1")

    def fn(trajectory: Trajectory) -> float:
        return min(read_fact(trajectory, "searches") - read_fact(trajectory, "repeated"), at_most) / at_most

    return RewardTerm("search_bonus", weight, "episode", fn, reads=("searches", "repeated"))


def step_cost_term(weight: float, *, turns: int) -> RewardTerm:
    """-min(n / turns, 1) for an episode of n turns."""
    _want(turns >= 1, f"step_cost: got turns={turns}, want at least 1, e.g. the world's max_turns")
    return RewardTerm("step_cost", weight, "episode", lambda t: -min(len(sampled_by_turn(t)) / turns, 1.0))


def length_cost_term(weight: float, *, tokens: int) -> RewardTerm:
    """-min(n / tokens, 1) for an episode of n sampled tokens."""
    _want(tokens >= 1, f"length_cost: got tokens={tokens}, want at least 1")
    return RewardTerm("length_cost", weight, "episode", lambda t: -min(n_sampled(t) / tokens, 1.0))


def repetition_term(weight: float, *, ngram: int = 3) -> RewardTerm:
    """`repetition` of the sampled ids; a phrase that comes again in another turn is no repetition."""
    _want(ngram >= 1, f"repetition: got ngram={ngram}, want at least 1")

    def fn(trajectory: Trajectory) -> float:
        return repetition(sampled_by_turn(trajectory).values(), ngram=ngram)

    return RewardTerm("repetition", weight, "episode", fn)


def soft_overlong_term(weight: float, *, max_tokens: int, cache_tokens: int) -> RewardTerm:
    """`soft_overlong` of the episode's sampled tokens."""
    _want(
        0 < cache_tokens <= max_tokens,
        f"soft_overlong: got max_tokens={max_tokens}, cache_tokens={cache_tokens}; want 0 < cache_tokens <= max_tokens",
    )

    def fn(trajectory: Trajectory) -> float:
        return soft_overlong(n_sampled(trajectory), max_tokens=max_tokens, cache_tokens=cache_tokens)

    return RewardTerm("soft_overlong", weight, "episode", fn)


def kimi_length_term(weight: float) -> RewardTerm:
    """`kimi_length` over the group, correct by `outcome.success`. Begin with it off: it shortens what is not yet right.

    Its values are in [-1/2, 1/2].
    """

    def fn(group: Sequence[Trajectory]) -> list[float]:
        return kimi_length([n_sampled(t) for t in group], [success(t) == 1 for t in group])

    return RewardTerm("kimi_length", weight, "group", fn, reads=("success",))


def soft_overlong(n: int, *, max_tokens: int, cache_tokens: int) -> float:
    """0 up to L = max_tokens - cache_tokens, then (L - n) / cache_tokens, from max_tokens on -1 (DAPO, 2503.14476 eq.
    13). Tokens, not characters; the floor holds however long the episode is.
    """
    return max(-1.0, min(0.0, (max_tokens - cache_tokens - n) / cache_tokens))


def repetition(turns: Iterable[Sequence[int]], *, ngram: int) -> float:
    """-(1 - unique / total) n-grams of ids, each turn's counted by itself; 0 where no turn has one. In (-1, 0].

    For one turn this is TRL's repetition penalty (Demystifying Long CoT, 2502.03373, appendix B) with maximum -1.
    """
    unique = total = 0
    for ids in turns:
        ids = [int(i) for i in ids]
        grams = list(zip(*(ids[at:] for at in range(ngram)), strict=False))
        unique, total = unique + len(set(grams)), total + len(grams)
    return unique / total - 1.0 if total else 0.0


def kimi_length(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """λ = 1/2 - (n - min) / (max - min) over the group; λ where correct, min(0, λ) where not; all 0 where every length
    is the same (Kimi k1.5, 2501.12599 §2.3.3).
    """
    if not lengths or max(lengths) == min(lengths):
        return [0.0] * len(lengths)
    least, span = min(lengths), max(lengths) - min(lengths)
    scores = [0.5 - (n - least) / span for n in lengths]
    return [score if right else min(0.0, score) for score, right in zip(scores, correct, strict=True)]


def without_overlong(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Overlong filtering (DAPO, 2503.14476 §3.4): the episodes to train on, without those that a token or turn limit
    cut.

    For after the advantages: what was cut stays in its group's mean and deviation, as the failure that it is, and adds
    no loss and no count, as a fully masked row would. A group whose members were all cut leaves nothing.
    """
    return [t for t in trajectories if t.status not in LIMITS]


def sampled_by_turn(trajectory: Trajectory) -> dict[int, np.ndarray]:
    """Sampled ids of each turn that has any."""
    out: dict[int, np.ndarray] = {}
    for row in trajectory.rows:
        ids, turn = row.tokens[row.action_mask], row.turn[row.action_mask]
        out |= {int(k): ids[turn == k] for k in np.unique(turn)}
    return out


def n_sampled(trajectory: Trajectory) -> int:
    return sum(int(row.action_mask.sum()) for row in trajectory.rows)


def _want(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)
