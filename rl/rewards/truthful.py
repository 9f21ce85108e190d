"""Three outcomes instead of two: right, does not know, wrong (TruthRL, 2509.25760). Not knowing is neutral."""

from collections.abc import Sequence
from typing import Any

from envs.answers import normalize
from rl.rewards.compose import RewardTerm
from rl.rewards.outcome import read_fact, success
from rl.types import Status, Trajectory

PHRASES = ("I don't know", "I do not know", "unknown", "unanswerable", "cannot be determined", "no answer")
RIGHT, ABSTAINED, WRONG = "right", "abstained", "wrong"


def truthful_term(weight: float, *, threshold: float = 0.5, phrases: Sequence[str] = PHRASES) -> RewardTerm:
    """+1 right, 0 abstained, `wrong_value(threshold)` wrong; the outcome of a policy that may say that it does not
    know.

    Reach 1 / (1 - t), margin min(1, t / (1 - t)): the lesser of the two steps. Errors: ValueError for a threshold that
    is not between 0 and 1, or a blank phrase.
    """
    wrong = wrong_value(threshold)
    normal = frozenset(map(normalize, phrases))
    if isinstance(phrases, str) or "" in normal:
        raise ValueError(f"truthful: got phrases {phrases!r}, want a sequence of texts, none of them blank")
    value = {RIGHT: 1.0, ABSTAINED: 0.0, WRONG: wrong}
    return RewardTerm(
        "truthful",
        weight,
        "episode",
        lambda t: value[verdict(t, normal)],
        reach=1.0 - wrong,
        margin=min(1.0, -wrong),
        reads=("success", "answer"),
    )


def wrong_value(threshold: float) -> float:
    """R_wrong = -t / (1 - t): with +1 for right and 0 for abstaining, answering pays exactly where p(right) > t.

    p + (1 - p) R_wrong > 0 <=> p > -R_wrong / (1 - R_wrong) = t. t = 1/2 gives -1, 0.8 gives -4.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"truthful: got threshold={threshold}, want more than 0 and less than 1")
    return -threshold / (1 - threshold)


def verdict(trajectory: Trajectory, phrases: frozenset[str]) -> str:
    """RIGHT by `outcome.success` (a world of unanswerable questions says so there); ABSTAINED if the policy gave up,
    the world reports `facts["abstained"]`, or the answer is one of the normalised `phrases`; else WRONG.

    No answer at all, and a limit, are wrong: neither says that it does not know, and silence would be the cheaper way.
    """
    if success(trajectory) == 1:
        return RIGHT
    if trajectory.status is Status.GAVE_UP or (
        trajectory.status is Status.DONE
        and (bool(trajectory.facts.get("abstained")) or _says(read_fact(trajectory, "answer"), phrases))
    ):
        return ABSTAINED
    return WRONG


def truthfulness(verdicts: Sequence[str], *, weights: tuple[float, float, float] = (1.0, 0.0, 1.0)) -> float:
    """w1·accuracy + w2·abstention - w3·hallucination, as shares of the episodes (TruthRL eq. 1). Errors: no verdict."""
    if not verdicts:
        raise ValueError("truthfulness: got no verdicts, want at least one")
    right, abstained, wrong = (verdicts.count(v) / len(verdicts) for v in (RIGHT, ABSTAINED, WRONG))
    return weights[0] * right + weights[1] * abstained - weights[2] * wrong


def _says(answer: Any, phrases: frozenset[str]) -> bool:
    return answer is not None and normalize(str(answer)) in phrases
