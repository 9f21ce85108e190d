"""Reward without labels: agreement with the group's majority (TTRL, 2504.16084).

Nothing here takes a gold answer, and the term reads one fact alone, the policy's own answer.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from envs.answers import normalize
from rl.rewards.compose import RewardTerm
from rl.rewards.outcome import read_fact
from rl.types import Status, Trajectory


def majority_term(weight: float, *, train_first: int = 0) -> RewardTerm:
    """1 where an episode's answer is the majority's, else 0.

    All scored members vote. Those numbered below `train_first` are trained on (0: all); the others only vote, and NaN
    leaves them out of the baseline too: N = `rl.group_size`, 64 to vote and 32 to train in the paper.
    """
    if train_first < 0 or train_first == 1:
        raise ValueError(f"majority: got train_first={train_first}, want 0 (all), or at least 2: a group compares")
    return RewardTerm("majority", weight, "group", partial(agreement, train_first=train_first), reads=("answer",))


def agreement(group: Sequence[Trajectory], *, train_first: int = 0) -> list[float]:
    """r_i = 1[answer_i is the majority's]; without a majority all are 0, so that the group teaches nothing."""
    answers = [answer_of(t) for t in group]
    label = vote(answers)
    return [
        math.nan if train_first and t.member >= train_first else float(answer is not None and answer == label)
        for t, answer in zip(group, answers, strict=True)
    ]


def answer_of(trajectory: Trajectory) -> str | None:
    """The normalised answer; None where there is none, it is blank, or the episode did not end by itself."""
    answer = read_fact(trajectory, "answer") if trajectory.status is Status.DONE else None
    return None if answer is None else normalize(str(answer)) or None


def vote(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer; None on a tie for the first place, and where nobody answered.

    "No answer" is not a candidate: a policy that falls silent must not be told that silence is right.
    """
    first_two = Counter(answer for answer in answers if answer is not None).most_common(2)
    if not first_two or (len(first_two) == 2 and first_two[0][1] == first_two[1][1]):
        return None
    return first_two[0][0]


def majority_ratio(answers: Sequence[str | None]) -> float:
    """Votes for the majority over all votes, those without an answer included; 0 without a majority."""
    label = vote(answers)
    return 0.0 if label is None else sum(answer == label for answer in answers) / len(answers)
