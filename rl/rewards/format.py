"""Format: did the policy speak as it was told to, beside whether it was right.

The world judges each turn, because it alone knows its protocol: `facts["well_formed"]` is one bool for each turn that
it saw. An episode is well formed if every turn is, and the last one answered (for Search-R1: think, then search or
answer, white space alone around them; what the engine found comes between turns, from the world).
"""

from functools import partial

from rl.rewards.compose import RewardTerm
from rl.rewards.outcome import read_fact, success
from rl.types import Status, Trajectory


def format_term(weight: float) -> RewardTerm:
    """1 for a well-formed episode, else 0: R_format of DeepSeek-R1 (2501.12948 §2.2.2)."""
    return RewardTerm("format", weight, "episode", lambda t: float(is_well_formed(t)), reads=("well_formed", "answer"))


def search_r1_term(weight: float, *, structure: float = 0.2, final: float = 0.1, retrieval: float = 0.0) -> RewardTerm:
    """`search_r1` as the outcome: answer, format and retrieval in one table.

    Its margin is between the least right answer and the best wrong one. Errors: ValueError where there is none, for
    then form would pay as much as being right.
    """
    least, most = 1 - structure, max(structure + retrieval, final)
    if not (structure >= 0 and final >= 0 and retrieval >= 0 and most < least):
        raise ValueError(
            f"search_r1: got structure={structure}, final={final}, retrieval={retrieval}, so that a wrong answer gets "
            f"up to {most:g} and a right one {least:g}; want none negative, and right above wrong"
        )

    def fn(trajectory: Trajectory) -> float:
        return score(
            success(trajectory) == 1,
            is_well_formed(trajectory),
            retrieved=bool(read_fact(trajectory, "gold_retrieved")),
            answered=has_answer(trajectory),
        )

    score = partial(search_r1, structure=structure, final=final, retrieval=retrieval)
    reads = ("success", "well_formed", "gold_retrieved", "answer")
    return RewardTerm("search_r1", weight, "episode", fn, 1.0, least - most, reads)


def search_r1(
    correct: bool,
    formatted: bool,
    *,
    retrieved: bool,
    answered: bool,
    structure: float = 0.2,
    final: float = 0.1,
    retrieval: float = 0.0,
) -> float:
    """The reward of Search-R1's empirical study (2505.15117 §3; λ_f `structure`, λ_r `retrieval`):

    | answer | formatted | retrieved | |
    |---|---|---|---|
    | right | yes | - | 1 |
    | right | no | - | 1 - structure |
    | wrong | yes | yes | structure + retrieval |
    | wrong | yes | no | structure |
    | wrong, but there | no | - | final |
    | none | no | - | 0 |
    """
    if correct:
        return 1.0 if formatted else 1.0 - structure
    if formatted:
        return structure + retrieval if retrieved else structure
    return final if answered else 0.0


def is_well_formed(trajectory: Trajectory) -> bool:
    """Every turn is well formed by the world's account, and the episode ended with an answer."""
    turns = read_fact(trajectory, "well_formed", at_limit=())
    return has_answer(trajectory) and len(turns) > 0 and all(turns)


def has_answer(trajectory: Trajectory) -> bool:
    return trajectory.status is Status.DONE and read_fact(trajectory, "answer", at_limit=None) is not None
