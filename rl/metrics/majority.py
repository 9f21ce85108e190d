"""How good a majority is as a label, where the world knows the truth. For the log alone: no reward comes from here.

`correct[i]` says whether sample i is right by the world's account; equal answers of one task are equally right.

| name | over | meaning |
|---|---|---|
| `majority/label_accuracy` | groups | the majority's answer is right; no majority is not |
| `majority/reward_accuracy` | episodes | 1[agrees with the majority] equals 1[right] |
| `majority/ratio` | groups | share of the votes that the majority has |
| `majority/ground_truth_ratio` | groups | share of the votes that are right |
| `majority/tie_frac` | groups | there is no majority |
"""

from collections.abc import Sequence

from rl.metrics.success import powers_of_2
from rl.rewards.majority import answer_of, majority_ratio, vote
from rl.rewards.outcome import is_unlabelled, success
from rl.types import Mean, Trajectory


def label_accuracy(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """1 if the majority's answer is right, else 0, also without a majority."""
    label = vote(answers)
    return float(label is not None and any(c for a, c in zip(answers, correct, strict=True) if a == label))


def reward_accuracy(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Share of the samples whose agreement with the majority says whether they are right.

    A wrong label can give many right rewards: where answers scatter, most are wrong and disagree (2504.16084 §4.3).
    """
    label = vote(answers)
    agrees = [a is not None and a == label for a in answers]
    return sum(a == bool(c) for a, c in zip(agrees, correct, strict=True)) / len(agrees)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Accuracy of the majority of k samples: mean over the n // k runs of k samples in order. Errors: k not in 1..n."""
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj_at_k: got k={k} of n={len(answers)} samples, want 1 <= k <= n")
    starts = range(0, len(answers) - k + 1, k)
    return sum(label_accuracy(answers[i : i + k], correct[i : i + k]) for i in starts) / len(starts)


def majority_at_k(groups: Sequence[Sequence[Trajectory]]) -> dict[int, float]:
    """maj@k for k = 1, 2, 4, ... up to the samples of the smallest group: mean of `maj_at_k` over the groups, one a
    task. Empty where the world does not report success.
    """
    played = [(a, c) for a, c in map(judged, groups) if c is not None]
    most = min((len(a) for a, _ in played), default=0)
    return {k: sum(maj_at_k(a, c, k) for a, c in played) / len(played) for k in powers_of_2(most)}


def judged(group: Sequence[Trajectory]) -> tuple[list[str | None], list[bool] | None]:
    """The answers of a group's scored members, and which are right; None where the world does not say."""
    scored = [t for t in group if t.status.scored]
    told = not any(map(is_unlabelled, scored))
    return [answer_of(t) for t in scored], [success(t) == 1 for t in scored] if told else None


def majority_means(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Mean]:
    """The table above, over groups with a scored member; what compares with the truth, over those whose world reports
    success.
    """
    played = [(answers, correct) for answers, correct in map(judged, groups) if answers]
    votes = [answers for answers, _ in played]
    voted = [(answers, correct) for answers, correct in played if correct is not None]
    n = len(voted)
    return {
        "majority/label_accuracy": Mean(sum(label_accuracy(a, c) for a, c in voted), n),
        "majority/reward_accuracy": Mean(
            sum(reward_accuracy(a, c) * len(a) for a, c in voted), sum(len(a) for a, _ in voted)
        ),
        "majority/ratio": Mean(sum(map(majority_ratio, votes)), len(votes)),
        "majority/ground_truth_ratio": Mean(sum(sum(c) / len(c) for _, c in voted), n),
        "majority/tie_frac": Mean(sum(vote(a) is None for a in votes), len(votes)),
    }
