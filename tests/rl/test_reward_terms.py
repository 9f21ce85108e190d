"""Worked numbers of the named reward terms."""

import math

import numpy as np
import pytest

from rl.metrics.majority import label_accuracy, maj_at_k, majority_at_k, majority_means, reward_accuracy
from rl.rewards import format, majority, milestones, shaping, truthful
from rl.rewards.compose import reward, score_group
from rl.rewards.outcome import success_term
from rl.rewards.terms import make_terms
from rl.types import Row, Status, Trajectory


def episode(turns=((1, 2),), status=Status.DONE, member=0, **facts):
    """One token of prompt, then turns of sampled ids, each followed by one token of the world."""
    tokens, turn, mask = [0], [-1], [False]
    for k, ids in enumerate(turns):
        tokens += [*ids, 0]
        turn += [k] * (len(ids) + 1)
        mask += [True] * len(ids) + [False]
    mask = np.array(mask, bool)
    row = Row(
        np.array(tokens, np.int32),
        np.array(turn, np.int32),
        mask,
        np.zeros(len(mask), np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )
    return Trajectory("t", 0, member, status, (row,), {"success": False, **facts}, {})


# --- shaping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "want"), [(10, 0), (14, 0), (15, -0.166667), (18, -0.666667), (20, -1), (25, -1), (2000, -1)]
)
def test_soft_overlong_has_a_floor(n, want):
    assert shaping.soft_overlong(n, max_tokens=20, cache_tokens=6) == pytest.approx(want, abs=1e-6)
    term = shaping.soft_overlong_term(1.0, max_tokens=20, cache_tokens=6)
    assert term.fn(episode([range(n // 2), range(n - n // 2)])) == pytest.approx(
        want, abs=1e-6
    )  # the world's ids: none


def test_soft_overlong_of_public_tests():
    """TRL: maximum 100, cache 20."""
    got = [shaping.soft_overlong(n, max_tokens=100, cache_tokens=20) for n in (50, 80, 90, 110)]
    assert got == [0, 0, -0.5, -1]


def test_repetition():
    assert shaping.repetition([[5] * 5], ngram=2) == -0.75  # 4 bigrams, 1 of its kind
    assert shaping.repetition([[1, 2, 3, 4]], ngram=2) == 0
    assert shaping.repetition([[1], []], ngram=2) == 0  # none at all
    term = shaping.repetition_term(1.0, ngram=2)
    assert term.fn(episode([[7, 8], [7, 8]])) == 0  # said again in another turn
    assert term.fn(episode([[7, 7, 7], [1, 2, 3]])) == pytest.approx(3 / 4 - 1)  # the world's 0 between is in no bigram


def test_search_bonus_pays_for_different_searches_up_to_a_number():
    term = shaping.search_bonus_term(0.1, at_most=2)
    got = [
        term.fn(episode(searches=n, repeated=again)) for n, again in ((0, 0), (1, 0), (2, 1), (2, 0), (9, 0), (9, 8))
    ]
    assert got == [0, 0.5, 0.5, 1, 1, 0.5]


def test_costs_of_steps_and_tokens():
    long = episode([[1, 2], [3], [4]])
    assert shaping.step_cost_term(0.1, turns=4).fn(long) == -0.75
    assert shaping.step_cost_term(0.1, turns=2).fn(long) == -1
    assert shaping.length_cost_term(0.1, tokens=8).fn(long) == -0.5
    assert shaping.length_cost_term(0.1, tokens=3).fn(long) == -1


def test_kimi_length():
    """λ = 1/2 - (n - 2) / 8 of 2, 4, 6, 10 tokens: 1/2, 1/4, 0, -1/2; a wrong one gains nothing by being short."""
    assert shaping.kimi_length([2, 4, 6, 10], [True] * 4) == [0.5, 0.25, 0, -0.5]
    assert shaping.kimi_length([2, 4, 6, 10], [False] * 4) == [0, 0, 0, -0.5]
    assert shaping.kimi_length([3, 3], [True, False]) == [0, 0] and shaping.kimi_length([], []) == []
    terms = [success_term(1.0), shaping.kimi_length_term(0.2)]
    group = [episode([[1]], success=True), episode([[1, 2, 3]], success=True), episode([[1]], success=False)]
    assert [reward(t) for t in score_group(terms, group)] == pytest.approx([1.1, 0.9, 0])


def test_overlong_filtering_leaves_out_what_a_limit_cut():
    group = [episode(status=status, member=i) for i, status in enumerate(Status)]
    kept = {t.status for t in shaping.without_overlong(group)}
    assert kept == set(Status) - {Status.TOKEN_LIMIT, Status.TURN_LIMIT}


@pytest.mark.parametrize(
    ("builder", "options", "message"),
    [
        (shaping.search_bonus_term, {"at_most": 0}, "at_most=0, want at least 1"),
        (shaping.step_cost_term, {"turns": 0}, "turns=0, want at least 1"),
        (shaping.length_cost_term, {"tokens": 0}, "tokens=0, want at least 1"),
        (shaping.repetition_term, {"ngram": 0}, "ngram=0, want at least 1"),
        (shaping.soft_overlong_term, {"max_tokens": 4, "cache_tokens": 5}, "want 0 < cache_tokens <= max_tokens"),
        (shaping.soft_overlong_term, {"max_tokens": 4, "cache_tokens": 0}, "want 0 < cache_tokens <= max_tokens"),
        (milestones.milestones_term, {"names": ("a", "a")}, "want each once"),
        (milestones.milestones_term, {"names": "ab"}, "want each once"),
        (majority.majority_term, {"train_first": 1}, "want 0 .all., or at least 2"),
        (truthful.truthful_term, {"threshold": 1.0}, "want more than 0 and less than 1"),
        (truthful.truthful_term, {"threshold": 0.0}, "want more than 0 and less than 1"),
        (truthful.truthful_term, {"phrases": ("", "no")}, "none of them blank"),
        (format.search_r1_term, {"structure": 0.5}, "a wrong answer gets up to 0.5 and a right one 0.5"),
        (format.search_r1_term, {"final": 0.9}, "gets up to 0.9"),
        (format.search_r1_term, {"retrieval": -0.1}, "want none negative"),
    ],
)
def test_options_that_make_no_sense(builder, options, message):
    with pytest.raises(ValueError, match=message):
        builder(0.1, **options)


# --- milestones -------------------------------------------------------------------------------------------------------


def test_milestones_are_paid_once_in_the_turn_that_reached_them():
    reached = episode(milestones={"found": 1, "gold": 3, "evidence": None, "more": 1})
    assert milestones.paid(reached) == [0, 0.5, 0, 0.25]
    assert milestones.paid(reached, names=("gold", "evidence")) == [0, 0, 0, 0.5]
    assert milestones.paid(episode(milestones={"found": None})) == []
    assert milestones.paid(episode(milestones={})) == []
    terms = [success_term(1.0), milestones.milestones_term(0.2, names=("found", "gold", "evidence"))]
    (scored,) = score_group(terms, [reached])
    assert scored.scores["milestones"] == pytest.approx(0.2 * 2 / 3)
    cut = Trajectory("t", 0, 0, Status.TOKEN_LIMIT, (), {"success": False}, {})
    assert milestones.paid(cut) == []  # before the world's first report


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "no fact 'milestones'"),
        ({"milestones": ["found"]}, "want {name: turn from 0, or None}"),
        ({"milestones": {"found": True}}, "want {name: turn from 0, or None}"),
        ({"milestones": {"found": -1}}, "want {name: turn from 0, or None}"),
        ({"milestones": {"gold": 1}}, r"no milestone 'found', the world reports \['gold'\]"),
    ],
)
def test_milestones_that_the_world_does_not_report(facts, message):
    with pytest.raises(ValueError, match=message):
        milestones.paid(episode(**facts), names=("found",))


# --- format -----------------------------------------------------------------------------------------------------------

TABLE = [  # exact, well formed, retrieved, answer -> reward
    (True, True, False, "a", 1.0),
    (True, False, True, "a", 0.8),
    (False, True, True, "a", 0.3),
    (False, True, False, "a", 0.2),
    (False, False, True, "a", 0.1),
    (False, False, False, None, 0.0),
]


@pytest.mark.parametrize(("exact", "formatted", "retrieved", "answer", "want"), TABLE)
def test_the_table_of_search_r1(exact, formatted, retrieved, answer, want):
    term = format.search_r1_term(1.0, structure=0.2, final=0.1, retrieval=0.1)
    turns = [True, formatted] if answer else [True, True]  # without an answer the form is not whole, whatever its turns
    played = episode(success=exact, well_formed=turns, gold_retrieved=retrieved, answer=answer)
    assert term.fn(played) == pytest.approx(want)
    assert (term.reach, term.margin) == (1, pytest.approx(0.5))


def test_a_limit_is_never_right_nor_well_formed():
    term = format.search_r1_term(1.0)
    for status in set(Status) - {Status.GAVE_UP}:  # giving up has no answer to be well formed
        played = episode(status=status, success=True, well_formed=[True], gold_retrieved=True, answer="a")
        assert term.fn(played) == (status is Status.DONE)
        assert format.is_well_formed(played) == (status is Status.DONE)
    assert term.fn(episode(status=Status.TOKEN_LIMIT)) == 0  # no report at all
    given_up = episode(status=Status.GAVE_UP, success=True, well_formed=[True], gold_retrieved=True)
    assert term.fn(given_up) == 0.8 and not format.is_well_formed(
        given_up
    )  # right, and the form is not that of an answer
    assert not format.is_well_formed(episode(answer="a", well_formed=[]))
    assert format.format_term(0.1).fn(episode(answer="a", well_formed=[True, True])) == 1


# --- truthful ---------------------------------------------------------------------------------------------------------


def test_three_outcomes():
    term = truthful.truthful_term(1.0, threshold=0.8)
    assert term.fn(episode(success=True, answer="Lima")) == 1
    assert term.fn(episode(success=True, answer="I don't know")) == 1  # the world's oracle says: not answerable
    for answer in ("I DON'T KNOW.", "Unknown", "the unknown"):
        assert term.fn(episode(answer=answer)) == 0
    assert term.fn(episode(answer="x", abstained=True)) == 0 == term.fn(episode(status=Status.GAVE_UP))
    for wrong in (episode(answer="Paris"), episode(answer=None), episode(answer="I don't know, but maybe Lima")):
        assert term.fn(wrong) == pytest.approx(-4)
    for status in (Status.TURN_LIMIT, Status.TOKEN_LIMIT, Status.TIME_LIMIT, Status.ABANDONED):
        assert term.fn(episode(status=status, answer="unknown", abstained=True)) == pytest.approx(-4)
    assert truthful.truthful_term(1.0).fn(episode(answer="Paris")) == -1


@pytest.mark.parametrize(("threshold", "wrong"), [(0.5, -1), (0.8, -4), (0.2, -0.25), (0.9, -9)])
def test_answering_pays_above_the_threshold_alone(threshold, wrong):
    value = truthful.wrong_value(threshold)
    assert value == pytest.approx(wrong)
    for p in (threshold - 0.01, threshold + 0.01):
        assert (p + (1 - p) * value > 0) == (p > threshold)


def test_truthfulness_counts_abstaining_as_neither():
    verdicts = ["right"] * 5 + ["abstained"] * 3 + ["wrong"] * 2
    assert truthful.truthfulness(verdicts) == pytest.approx(0.3)
    assert truthful.truthfulness(verdicts, weights=(1, 0.5, 1)) == pytest.approx(0.45)
    with pytest.raises(ValueError, match="got no verdicts"):
        truthful.truthfulness([])


# --- majority ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "label", "ratio"),
    [
        (["a", "a", "b", None], "a", 0.5),
        (["a", None, None, None], "a", 0.25),  # "no answer" is no candidate, however frequent
        (["a", "b"], None, 0),
        (["a", "a", "b", "b", "c"], None, 0),  # a tie for the first place
        ([None, None], None, 0),
        ([], None, 0),
    ],
)
def test_vote(answers, label, ratio):
    assert majority.vote(answers) == label and majority.majority_ratio(answers) == ratio


def voters(answers, correct=(), **facts):
    right = [*correct, *[False] * len(answers)]
    return [episode(member=i, answer=a, success=right[i], **facts) for i, a in enumerate(answers)]


def test_agreement_with_the_majority():
    assert majority.agreement(voters(["Lima", "the LIMA.", "Quito", None])) == [1, 1, 0, 0]
    assert majority.agreement(voters(["Lima", "Quito", " ", None])) == [0, 0, 0, 0]  # a tie: nothing is learnt
    assert majority.agreement(voters([None, None])) == [0, 0]
    group = voters(["a", "b", "b"])
    group[1] = episode(member=1, status=Status.TURN_LIMIT, answer="b")  # a limit does not vote
    assert majority.agreement(group) == [0, 0, 0]
    group[0] = episode(member=0, status=Status.TOKEN_LIMIT)
    assert majority.agreement(group) == [0, 0, 1]


def test_all_vote_and_the_first_are_trained_on():
    terms = make_terms({"majority": 1.0}, {}, {"majority": {"train_first": 2}}, leader="majority")
    scored = score_group(terms, voters(["a", "b", "b", "b"]))
    assert [reward(t) for t in scored[:2]] == [0, 1] and all(math.isnan(reward(t)) for t in scored[2:])
    group = voters(["a", "b", "b", "b"])
    kept = score_group(terms, [group[3], group[1], group[0]])  # by member, not by place: one of them failed
    assert math.isnan(reward(kept[0])) and [reward(t) for t in kept[1:]] == [1, 0]


def test_a_wrong_label_can_give_right_rewards():
    """The lucky hit: 2 of 8 agree on a wrong answer, 1 is right, and 5 of 8 rewards are right all the same."""
    answers, correct = ["x", "x", "a", "b", "c", "d", "e", None], [False, False, True] + [False] * 5
    assert label_accuracy(answers, correct) == 0 and reward_accuracy(answers, correct) == 5 / 8
    assert label_accuracy(["a", "a", "b"], [True, True, False]) == 1
    assert label_accuracy(["a", "b"], [True, False]) == 0  # a tie is no label
    assert reward_accuracy(["a", "b"], [True, False]) == 0.5
    with pytest.raises(ValueError, match="got k=3 of n=2"):
        maj_at_k(["a", "b"], [True, False], 3)
    assert maj_at_k(["a", "a", "b", "b", "c", "b", "a"], [True, True, False, False, False, False, True], 3) == 0.5
    assert maj_at_k(["a", "b"], [True, False], 1) == 0.5

    three, four = voters(["a", "a", "b"], [True, True]), voters(["a", "b", "b", "b"], [True])
    # k = 1: two of three and one of four are right; k = 2: the pairs [a a], and [a b] (a tie), [b b]
    assert majority_at_k([three, four]) == {1: pytest.approx((2 / 3 + 1 / 4) / 2), 2: (1 + 0) / 2}
    assert majority_at_k([]) == majority_at_k([[Trajectory("t", 0, 0, Status.DONE, (), {"answer": "a"}, {})]]) == {}

    failed = Trajectory("t", 0, 9, Status.ENV_ERROR, (), {}, {})
    means = majority_means([[*voters(answers, correct), failed], voters(["a", "a"], [True, True]), [failed]])
    assert {name: mean.value for name, mean in means.items()} == {
        "majority/label_accuracy": 0.5,
        "majority/reward_accuracy": pytest.approx(7 / 10),
        "majority/ratio": pytest.approx((2 / 8 + 1) / 2),
        "majority/ground_truth_ratio": pytest.approx((1 / 8 + 1) / 2),
        "majority/tie_frac": 0,
    }
