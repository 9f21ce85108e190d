"""From facts to scores: a reward is a list of terms, and the world gives none of them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from rl.types import Trajectory


@dataclasses.dataclass(frozen=True)
class RewardTerm:
    """One part of the reward.

    `fn` by scope: "episode": Trajectory -> float; "turn": Trajectory -> one float a turn, whose sum is the score;
    "group": list of the group's scored trajectories -> one float each. NaN means "could not judge", which is never
    silently 0. `reach` is the largest difference that `fn` can make, before the weight: more than 0.
    """

    name: str
    weight: float
    scope: str
    fn: Callable[..., Any]
    reach: float = 1.0

    def __post_init__(self):
        if self.scope not in ("episode", "turn", "group"):
            raise ValueError(f"reward term {self.name!r}: got scope {self.scope!r}, want 'episode', 'turn' or 'group'")
        if not (self.reach > 0 and math.isfinite(self.reach) and math.isfinite(self.weight)):
            raise ValueError(
                f"reward term {self.name!r}: got weight {self.weight}, reach {self.reach}; want both finite, reach > 0"
            )


def check_terms(terms: Sequence[RewardTerm], *, outcome: str = "outcome", max_shaping: float = 0.3) -> None:
    """Raise ValueError unless the outcome leads: its weight is positive, and Σ |weight|·reach of the others is at most
    `max_shaping` of its own.
    """
    names = [term.name for term in terms]
    if len(set(names)) < len(names) or outcome not in names:
        raise ValueError(f"reward terms: got names {names}, want each once and {outcome!r} among them")
    reach = {term.name: abs(term.weight) * term.reach for term in terms}
    lead = reach.pop(outcome)
    weight = next(term.weight for term in terms if term.name == outcome)
    if weight <= 0:
        raise ValueError(f"reward term {outcome!r}: got weight {weight:g}, want more than 0: the outcome leads")
    shaping = math.fsum(reach.values())
    if shaping > max_shaping * lead * (1 + 1e-9):  # .1 + .2 is .3
        raise ValueError(
            f"shaping can reach {shaping:g} ({reach}), want at most {max_shaping:g} of the outcome's {lead:g}; "
            "lower the weights, or raise max_shaping and watch for hacking"
        )


def score_group(terms: Sequence[RewardTerm], group: Sequence[Trajectory]) -> list[Trajectory]:
    """The group with `scores[name] = weight · fn(...)` for every term: an episode's reward is the sum of its scores.

    Members whose status is not scored (ENV_ERROR, CANCELLED) keep empty scores and are shown to no term.
    """
    scored = [i for i, trajectory in enumerate(group) if trajectory.status.scored]
    members = [group[i] for i in scored]
    scores = [dict() for _ in members]
    for term in terms:
        for own, value in zip(scores, _values(term, members), strict=True):
            own[term.name] = term.weight * float(value)
    out = [dataclasses.replace(trajectory, scores={}) for trajectory in group]
    for i, own in zip(scored, scores, strict=True):
        out[i] = dataclasses.replace(group[i], scores=own)
    return out


def _values(term: RewardTerm, members: list[Trajectory]) -> Sequence[float]:
    if term.scope == "episode":
        return [term.fn(trajectory) for trajectory in members]
    if term.scope == "turn":
        return [math.fsum(term.fn(trajectory)) for trajectory in members]
    values = list(term.fn(members)) if members else []
    if len(values) != len(members):
        raise ValueError(f"reward term {term.name!r}: got {len(values)} scores for a group of {len(members)}")
    return values


def reward(trajectory: Trajectory) -> float:
    """Σ scores. NaN for an episode that was not scored, or not judged by some term: it takes no part in its group."""
    return math.fsum(trajectory.scores.values()) if trajectory.scores else math.nan
