"""From facts to scores: a reward is a list of terms, and the world gives none of them."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rl.types import Status, Trajectory


@dataclasses.dataclass(frozen=True)
class RewardTerm:
    """One part of the reward.

    `fn` by scope: "episode": Trajectory -> float; "turn": Trajectory -> one float a turn, up to the last that has any,
    whose sum is the score;
    "group": list of the group's scored trajectories -> one float each. NaN means "could not judge", which is never
    silently 0. `batched`: `fn` takes several trajectories at once, and gives a list of what it would give each by
    itself. `reach` is the largest difference that `fn` can make, before the weight: more than 0. `margin`, of a
    term that may lead: the least by which `fn` of a better outcome is above that of a worse one; None: its reach, as
    where there are two values. `reads` names the facts that `fn` looks at. `stats` gives counts since the start of a
    term that asks somebody (calls, failures), by name.
    """

    name: str
    weight: float
    scope: str
    fn: Callable[..., Any]
    reach: float = 1.0
    margin: float | None = None
    reads: tuple[str, ...] = ()
    stats: Callable[[], Mapping[str, int]] | None = None
    batched: bool = False

    def __post_init__(self):
        if self.margin is not None and not 0 < self.margin <= self.reach:
            raise ValueError(
                f"reward term {self.name!r}: got margin {self.margin}, reach {self.reach}; want 0 < margin <= reach"
            )
        if self.scope not in ("episode", "turn", "group"):
            raise ValueError(f"reward term {self.name!r}: got scope {self.scope!r}, want 'episode', 'turn' or 'group'")
        if not (self.reach > 0 and math.isfinite(self.reach) and math.isfinite(self.weight)):
            raise ValueError(
                f"reward term {self.name!r}: got weight {self.weight}, reach {self.reach}; want both finite, reach > 0"
            )

    def values(self, members: Sequence[Trajectory]) -> list[Any]:
        """What `fn` gives each of `members`: those of one group, where the scope is "group".

        Errors: ValueError for another number of values.
        """
        if not (self.batched or self.scope == "group"):
            return [self.fn(trajectory) for trajectory in members]
        values = list(self.fn(members)) if members else []
        if len(values) != len(members):
            raise ValueError(f"reward term {self.name!r}: got {len(values)} scores for a group of {len(members)}")
        return values


def check_terms(terms: Sequence[RewardTerm], *, outcome: str = "outcome", max_shaping: float = 0.3) -> None:
    """Raise ValueError unless the outcome leads: its weight is positive, and Σ |weight|·reach of the others is at most
    `max_shaping` of its weight·margin.

    Then a better outcome is above a worse one by (1 - max_shaping)·weight·margin at least, whatever the shaping.
    """
    names = [term.name for term in terms]
    if len(set(names)) < len(names) or outcome not in names:
        raise ValueError(f"reward terms: got names {names}, want each once and {outcome!r} among them")
    reach = {term.name: abs(term.weight) * term.reach for term in terms}
    reach.pop(outcome)
    leader = next(term for term in terms if term.name == outcome)
    if leader.weight <= 0:
        raise ValueError(f"reward term {outcome!r}: got weight {leader.weight:g}, want more than 0: the outcome leads")
    lead = leader.weight * (leader.reach if leader.margin is None else leader.margin)
    shaping = math.fsum(reach.values())
    if shaping > max_shaping * lead * (1 + 1e-9):  # .1 + .2 is .3
        raise ValueError(
            f"shaping can reach {shaping:g} ({reach}), want at most {max_shaping:g} of the outcome's {lead:g}; "
            "lower the weights, or raise max_shaping and watch for hacking"
        )


def score_group(
    terms: Sequence[RewardTerm], group: Sequence[Trajectory], *, excluded: Collection[Status] = ()
) -> list[Trajectory]:
    """The group with `scores[name] = weight · fn(...)` for every term: an episode's reward is the sum of its scores.

    Members whose status is not scored (ENV_ERROR, CANCELLED) keep empty scores and are shown to no term. Nor are those
    that ended as one of `excluded`, whose scores are NaN: the others are scored as if there were none.
    """
    compared = [i for i, t in enumerate(group) if t.status.scored and t.status not in excluded]
    members = [group[i] for i in compared]
    scores = [dict() for _ in members]
    for term in terms:
        for own, value in zip(scores, term.values(members), strict=True):
            own[term.name] = term.weight * float(math.fsum(value) if term.scope == "turn" else value)
    none = {term.name: math.nan for term in terms}
    out = [dataclasses.replace(t, scores=dict(none) if t.status.scored else {}) for t in group]
    for i, own in zip(compared, scores, strict=True):
        out[i] = dataclasses.replace(group[i], scores=own)
    return out


def reward(trajectory: Trajectory) -> float:
    """Σ scores. NaN for an episode that was not scored, or not judged by some term: it takes no part in its group."""
    return math.fsum(trajectory.scores.values()) if trajectory.scores else math.nan
