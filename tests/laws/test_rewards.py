"""Laws of every reward term: it stays within its reach, shaping turns no outcome round, a vote reads no gold."""

import inspect
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl import advantages, loop
from rl.metrics.episodes import term_means
from rl.rewards import outcome
from rl.rewards.compose import RewardTerm, check_terms, reward, score_group
from rl.rewards.majority import agreement, majority_term
from rl.rewards.shaping import without_overlong
from rl.rewards.terms import make_terms
from rl.types import Status, Trajectory
from tests.rl.test_reward_terms import episode

SCORED = [status for status in Status if status.scored]
TURNS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=3)
ANSWERS = st.sampled_from([None, "", " ", "a", "A.", "the b", "unknown", "I don't know"])

OPTIONS = {
    "search_r1": st.fixed_dictionaries(
        {"structure": st.floats(0, 0.45), "final": st.floats(0, 0.5), "retrieval": st.floats(0, 0.05)}
    ),
    "truthful": st.fixed_dictionaries({"threshold": st.floats(0.01, 0.99)}),
    "majority": st.fixed_dictionaries({"train_first": st.sampled_from([0, 2, 3])}),
    "milestones": st.fixed_dictionaries({"names": st.sampled_from([(), ("x",), ("x", "y"), ("z", "y", "x")])}),
    "search_bonus": st.fixed_dictionaries({"at_most": st.integers(1, 4)}),
    "step_cost": st.fixed_dictionaries({"turns": st.integers(1, 6)}),
    "length_cost": st.fixed_dictionaries({"tokens": st.integers(1, 30)}),
    "repetition": st.fixed_dictionaries({"ngram": st.integers(1, 4)}),
    "soft_overlong": st.integers(1, 20).flatmap(
        lambda n: st.fixed_dictionaries({"max_tokens": st.just(n), "cache_tokens": st.integers(1, n)})
    ),
    **dict.fromkeys(("success", "format", "kimi_length"), st.just({})),
}


@st.composite
def groups(draw, least=1):
    return [draw(episodes(member)) for member in range(draw(st.integers(least, 4)))]


@st.composite
def episodes(draw, member):
    """Whatever a world may report, limits before its first report included."""
    turns, status = draw(TURNS), draw(st.sampled_from(SCORED))
    if status in outcome.LIMITS and draw(st.booleans()):
        return episode(turns, status, member)
    turn, searches = st.none() | st.integers(0, 5), draw(st.integers(0, 9))
    return episode(
        turns,
        status,
        member,
        success=draw(st.booleans()),
        answer=draw(ANSWERS),
        gold_retrieved=draw(st.booleans()),
        well_formed=draw(st.lists(st.booleans(), max_size=4)),
        milestones={name: draw(turn) for name in "xyz"},
        searches=searches,
        repeated=draw(st.integers(0, searches)),
        f1=draw(st.floats(0, 1)),
    )


def test_every_named_term_is_in_these_laws():
    """But the judge, whose score in [0, 1] is read in tests/rl/test_judge.py, and the reward models, whose scores are
    probabilities (tests/rl/test_reward_model.py).
    """
    source = inspect.getsource(make_terms)
    named = {line.split('"')[1] for line in source.splitlines() if line.strip().endswith("_term,")}
    assert named == {*OPTIONS, "judge", "orm", "prm"}


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_term_goes_beyond_its_reach(name, data):
    """max - min of a term over any two groups is at most its reach (groups of one to four episodes)."""
    options = data.draw(OPTIONS[name])
    (term,) = make_terms({name: 1.0}, {}, {name: options}, leader=name)
    found = []
    for _ in range(2):
        found += [t.scores[name] for t in score_group([term], data.draw(groups()))]
    found = [value for value in found if not math.isnan(value)] or [0.0]
    assert all(map(math.isfinite, found)) and max(found) - min(found) <= term.reach + 1e-9


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.tuples(st.floats(-1, 1), st.floats(0.01, 10)), max_size=5),
    lead=st.floats(0.1, 3),
    margin=st.floats(0.05, 1),
    max_shaping=st.floats(0, 0.9),
    data=st.data(),
)
def test_shaping_that_passes_never_turns_an_outcome_round(weights, lead, margin, max_shaping, data):
    """Σ |w|·reach <= max_shaping·w·margin passes, more is refused; what passes leaves a better outcome ahead by
    (1 - max_shaping)·w·margin, whatever two values each term has for the two episodes.
    """
    values: dict[str, dict[int, float]] = {}
    terms = [RewardTerm("o", lead, "episode", lambda t: values["o"][t.member], 1.0, margin)]
    for i, (weight, reach) in enumerate(weights):
        terms.append(RewardTerm(f"s{i}", weight, "episode", lambda t, i=i: values[f"s{i}"][t.member], reach))
    shaping, allowed = sum(abs(w) * r for w, r in weights), max_shaping * lead * margin
    if shaping > allowed:
        if shaping > allowed * (1 + 1e-6):
            with pytest.raises(ValueError, match="shaping can reach"):
                check_terms(terms, outcome="o", max_shaping=max_shaping)
        return
    check_terms(terms, outcome="o", max_shaping=max_shaping)
    values["o"] = {0: margin, 1: 0.0}
    for i, (_, reach) in enumerate(weights):
        base = data.draw(st.floats(-5, 5))
        values[f"s{i}"] = {m: base + data.draw(st.sampled_from([0.0, reach])) for m in (0, 1)}
    better, worse = score_group(terms, [episode(member=m) for m in (0, 1)])
    assert reward(better) - reward(worse) >= (1 - max_shaping) * lead * margin - 1e-6


class Sealed(dict):
    """Facts that hold the gold: any look but one at the answer is an error."""

    def __getitem__(self, name):
        assert name == "answer", f"the vote read {name!r}"
        return super().__getitem__(name)

    def _refuse(self, *_):
        raise AssertionError("the vote looked around in the facts")

    get = items = keys = values = __iter__ = _refuse

    def __contains__(self, name):
        return name == "answer" or self._refuse()


@settings(deadline=None)
@given(answers=st.lists(ANSWERS, min_size=1, max_size=6), gold=ANSWERS, other=ANSWERS)
def test_a_vote_reads_no_gold(answers, gold, other):
    """It reads facts["answer"] alone, and what the world knows changes nothing."""

    def group(gold):
        return [
            Trajectory("t", 0, i, Status.DONE, (), Sealed(answer=a, success=a == gold, gold=gold), {"success": 1.0})
            for i, a in enumerate(answers)
        ]

    assert agreement(group(gold)) == agreement(group(other)) == majority_term(1.0).fn(group(None))
    assert majority_term(1.0).reads == ("answer",)


@settings(max_examples=30, deadline=None)
@given(played=groups(2))
def test_filtering_the_overlong_leaves_the_others_what_they_had(played):
    """What was cut is in the baseline: the advantages of the others are those of the whole group, and finite."""
    scored = score_group(make_terms({"success": 1.0}, {}), played)
    rewards = np.array([reward(t) for t in scored])
    credit = advantages.group_relative(rewards, np.zeros(len(scored), int), scale="std")
    kept = without_overlong(scored)
    assert np.isfinite(credit).all() and [t.member for t in kept] == [
        t.member for t in scored if t.status not in (Status.TOKEN_LIMIT, Status.TURN_LIMIT)
    ]


def test_the_loop_trains_on_what_no_limit_cut_and_compares_with_all():
    from tests.rl.test_loop import FakePool, group, run

    cut = group(0, [1.0, 0.0, 0.0, 0.0], statuses=[Status.DONE, Status.DONE, Status.TOKEN_LIMIT, Status.TURN_LIMIT])
    whole = group(1, [0.0, 0.0], statuses=[Status.TOKEN_LIMIT, Status.TURN_LIMIT])
    for filtered, want in ((True, [(0, 0), (0, 1)]), (False, [(0, m) for m in range(4)] + [(1, 0), (1, 1)])):
        _, _, [(trained, credit, *_)], metrics = run(FakePool([cut, whole].__getitem__), filter_overlong=filtered)
        assert [(t.ticket, t.member) for t in trained] == want
        assert credit[0, 0] == 0.75 and credit[0, 1] == -0.25  # against the mean of all four
        assert metrics[1]["status/token_limit"].total == 2
        assert metrics[1]["reward/outcome/weighted"].count == 6
    assert loop.group_means([], [])["batch/equal_groups_frac"].count == 0 and term_means([], []) == {}
