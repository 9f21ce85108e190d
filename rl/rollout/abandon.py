"""Giving an episode up before its end: decided between two turns, by what was said so far and by nothing else.

A rule cannot know that an episode would have failed. So a share of those that it would end, the audit, is played to its
end all the same and scored by that: how many of them succeed is the bias of calling the others failures, and what they
still cost is what the others saved (rl/metrics/abandonment.py). Who is audited is addressed by (seed, ticket, member).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from rl.metrics.abandonment import FACT
from rl.rollout.gather import Gathered
from rl.rollout.keys import fold_in, request_key
from rl.types import Trajectory

_AUDIT = 2**32 - 1  # folded into a member's key: the engine folds in positions, turns and forks, all below


@dataclasses.dataclass(frozen=True)
class SoFar:
    """An episode between two turns: for each turn (what the policy read before it, its action); the rows; and the ids
    that the policy goes on from, what it is about to read included.
    """

    said: Sequence[tuple[str, str]]
    trajectory: Callable[[], Trajectory]
    state: Callable[[], Sequence[int]]


Rule = Callable[[SoFar], bool]  # whether the episode is to end here


@dataclasses.dataclass(frozen=True)
class Abandonment:
    """`rules` by name, asked in their order between two turns; `audited(ticket, member)` is played to its end all the
    same.
    """

    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    audited: Callable[[int, int], bool] = lambda ticket, member: False


NEVER = Abandonment()


def repeats(k: int) -> Rule:
    """The last action was said for the k-th time after the same observation; not always in a row, so that going round
    in a circle counts. Errors: ValueError for k < 2.
    """
    if k < 2:
        raise ValueError(f"repeats: got {k=}, want at least 2: the first time is no repetition")
    return lambda so_far: so_far.said.count(so_far.said[-1]) >= k


def judged_below(threshold: float, score: Callable[[Sequence[Trajectory]], list[Float[np.ndarray, " turns"]]]) -> Rule:
    """P(success) after the last turn is below `threshold`, by a process reward model (rl.reward_model.process_scores).
    NaN, not judged, ends nothing.

    What several threads ask while the model is busy is one call, and changes no answer.
    """
    asked = Gathered(score)
    return lambda so_far: bool(asked(so_far.trajectory())[-1] < threshold)


def valued_below(threshold: float, value: Callable[[Sequence[Sequence[int]]], Sequence[float]]) -> Rule:
    """V of the state before the next turn is below `threshold`, by a critic (rl/rollout/values.py). NaN ends none."""
    asked = Gathered(value)
    return lambda so_far: bool(asked(so_far.state()) < threshold)


def audit(seed: int, share: float) -> Callable[[int, int], bool]:
    """A `share` in [0, 1] of the episodes, by (seed, ticket, member): the same ones whenever they are asked about."""
    if not 0 <= share <= 1:
        raise ValueError(f"audit: got {share=}, want 0 to 1")
    return lambda ticket, member: int(fold_in(request_key(seed, ticket, member), _AUDIT)[0]) < share * 2**32


class Verdict:
    """What an `Abandonment` says of one episode, and what that still took after a rule had spoken."""

    def __init__(self, abandonment: Abandonment, ticket: int, member: int):
        self._rules, self._audited = abandonment.rules, lambda: abandonment.audited(ticket, member)
        self._said: list[tuple[str, str]] = []
        self._found: dict[str, Any] | None = None

    def ends(
        self,
        seen: str,
        action: str,
        trajectory: Callable[[], Trajectory],
        state: Callable[[], Sequence[int]],
        *,
        spent_s: float,
    ) -> bool:
        """Whether the episode ends after this turn; after the first rule that spoke none is asked again."""
        if self._found is not None or not self._rules:
            return False
        self._said.append((seen, action))
        so_far = SoFar(self._said, trajectory, state)
        rule = next((name for name, ends in self._rules.items() if ends(so_far)), None)
        if rule is None:
            return False
        audited = self._audited()
        self._found = {"rule": rule, "audited": audited, "turns": len(self._said)}
        if audited:
            self._found |= {"s": spent_s, "tokens": trajectory().n_actions}
        return not audited

    def facts(self, spent_s: float, tokens: int) -> dict[str, Any]:
        """{FACT: ...} once a rule has spoken; of an audited one `s` and `tokens` are those after it."""
        if self._found is None:
            return {}
        found = dict(self._found)
        if found["audited"]:
            found |= {"s": spent_s - found["s"], "tokens": tokens - found["tokens"]}
        return {FACT: found}
