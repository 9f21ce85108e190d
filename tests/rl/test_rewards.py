"""Facts become scores, a failed world is never a reward of 0, and episode means count what they say."""

import math

import numpy as np
import pytest

from rl.metrics.episodes import episode_means, term_means
from rl.rewards import outcome
from rl.rewards.compose import RewardTerm, check_terms, reward, score_group
from rl.rewards.terms import make_terms
from rl.types import Row, Status, Trajectory


def episode(status=Status.DONE, task_id="t", scores=None, turns=(0, 0, 1, 1), mask=(0, 1, 0, 1), **facts):
    mask = np.array(mask, bool)
    row = Row(
        tokens=np.arange(len(turns), dtype=np.int32),
        turn=np.array(turns, np.int32),
        action_mask=mask,
        behavior_logp=np.zeros(len(turns), np.float32),
        version=np.where(mask, 0, -1).astype(np.int32),
    )
    return Trajectory(task_id, 0, 0, status, (row,), facts, scores or {})


OUTCOME = RewardTerm("outcome", 1.0, "episode", outcome.success)


def test_a_limit_is_failure():
    for status in Status:
        assert outcome.success(episode(status, success=True)) == (status in (Status.DONE, Status.GAVE_UP))
        assert outcome.success(episode(status, success=False)) == 0
    assert outcome.success(episode(success=False)) == 0
    assert outcome.fact("f1")(episode(f1=0.5)) == 0.5 and math.isnan(outcome.fact("f1")(episode(f1=None)))
    with pytest.raises(ValueError, match=r"episode t \(ticket 0, DONE\): no fact 'f2', the world reports \['f1'\]"):
        outcome.fact("f2")(episode(f1=1))


def test_an_episode_that_met_a_limit_before_its_first_turn_has_no_facts_and_scores_0():
    terms = make_terms({"success": 1.0, "f1": 0.1, "searches": -0.05}, {"searches": 4})
    for status in (Status.TOKEN_LIMIT, Status.TURN_LIMIT):
        (scored,) = score_group(terms, [episode(status, success=False)])
        assert scored.scores == {"success": 0.0, "f1": 0.0, "searches": 0.0} and reward(scored) == 0
    for status in (Status.DONE, Status.GAVE_UP):
        with pytest.raises(ValueError, match=f"{status.name}.: no fact 'f1'"):
            score_group(terms, [episode(status, success=False)])


def test_scores_are_weighted_terms_and_the_reward_is_their_sum():
    terms = [
        OUTCOME,
        RewardTerm("cost", -0.1, "episode", outcome.fact("searches"), reach=2),
        RewardTerm("form", 0.01, "turn", lambda t: [1.0, 2.0]),
        RewardTerm("rank", 0.5, "group", lambda group: [float(i) for i in range(len(group))]),
    ]
    group = [
        episode(success=True, searches=2),
        episode(Status.ENV_ERROR, scores={"outcome": 9.0}),
        episode(success=False, searches=1),
    ]
    scored = score_group(terms, group)
    assert scored[0].scores == pytest.approx({"outcome": 1.0, "cost": -0.2, "form": 0.03, "rank": 0.0})
    assert reward(scored[0]) == pytest.approx(0.83) and reward(scored[2]) == pytest.approx(-0.1 + 0.03 + 0.5)
    # ENV_ERROR: no score, not a 0, and unseen by the group's term (its ranks are 0 and 1)
    assert scored[1].scores == {} and math.isnan(reward(scored[1]))
    assert score_group(terms, [group[1]])[0].scores == {}
    with pytest.raises(ValueError, match="'rank': got 1 scores for a group of 2"):
        score_group([RewardTerm("rank", 1.0, "group", lambda group: [0.0])], group)


def test_not_judged_is_not_zero():
    terms = [OUTCOME, RewardTerm("judge", 0.1, "episode", lambda t: math.nan)]
    assert math.isnan(reward(score_group(terms, [episode(success=True)])[0]))


def test_the_outcome_leads():
    check_terms([OUTCOME, RewardTerm("a", 0.1, "episode", len), RewardTerm("b", -0.1, "episode", len, reach=2)])
    with pytest.raises(ValueError, match="shaping can reach 0.5 .*want at most 0.3 of the outcome's 1"):
        check_terms([OUTCOME, RewardTerm("a", -0.1, "episode", len, reach=5)])
    with pytest.raises(ValueError, match="want each once and 'outcome' among them"):
        check_terms([RewardTerm("a", 0.1, "episode", len)])
    with pytest.raises(ValueError, match="'a': got scope 'step', want"):
        RewardTerm("a", 0.1, "step", len)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
@pytest.mark.parametrize("reach", [0.0, -1.0, math.inf, math.nan])
def test_a_term_is_finite(weight, reach):
    with pytest.raises(ValueError, match="'a': got weight .* want both finite, reach > 0"):
        RewardTerm("a", weight, "episode", len)
    with pytest.raises(ValueError, match="'a': got weight .* want both finite, reach > 0"):
        RewardTerm("a", 1.0, "episode", len, reach)


def test_terms_by_name_state_their_reach():
    """A count may go as far as the experiment says; a weight alone does not bound what it adds."""
    made = make_terms({"success": 2.0, "f1": 0.2, "searches": -0.1}, {"searches": 4})
    assert [(term.name, term.weight, term.reach) for term in made] == [
        ("success", 2.0, 1.0),
        ("f1", 0.2, 1.0),
        ("searches", -0.1, 4.0),
    ]
    facts = dict(success=True, f1=0.5, searches=3)
    assert reward(score_group(made, [episode(**facts)])[0]) == pytest.approx(2 + 0.1 - 0.3)
    for name in outcome.FRACTIONS[1:]:
        make_terms({"success": 1.0, name: 0.3}, {})
    for weights, reach, message in [
        ({"success": 1.0, "searches": 0.01}, {}, "'searches' is not known to lie in .* reward.reach.searches=N"),
        ({"success": 1.0, "searches": 0.3}, {"searches": 4}, "shaping can reach 1.2 .*want at most 0.3"),
        ({"success": 1.0, "f1": 0.2, "score": -0.2}, {}, "shaping can reach 0.4"),
        ({"f1": 0.1}, {}, "'success' among them"),
        ({"success": 0.0}, {}, "'success': got weight 0, want more than 0"),
        ({"success": -1.0, "f1": 0.1}, {}, "got weight -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_terms(weights, reach)
    make_terms({"success": 1.0, "searches": 0.3}, {"searches": 4}, max_shaping=1.2)


def test_the_named_terms_and_their_options():
    weights = {"success": 1.0, "soft_overlong": 0.1, "repetition": 0.05, "f1": 0.0, "searches": 0.0}
    made = make_terms(weights, {}, {"soft_overlong": {"max_tokens": 20, "cache_tokens": 6}, "repetition": {"ngram": 2}})
    assert [term.name for term in made] == ["success", "soft_overlong", "repetition"]  # a weight of 0 leaves it out
    (alone,) = make_terms({"truthful": 1.0}, {}, {"truthful": {"threshold": 0.8}}, leader="truthful")
    assert (alone.reach, alone.margin) == (pytest.approx(5), 1)
    two = {"truthful": 1.0, "format": 0.3}
    make_terms(two, {}, leader="truthful")
    with pytest.raises(ValueError, match="at most 0.3 of the outcome's 0.25"):  # the step from abstaining to wrong
        make_terms(two, {}, {"truthful": {"threshold": 0.2}}, leader="truthful")
    with pytest.raises(ValueError, match="shaping can reach 1 .*of the outcome's 1"):  # only one of two outcomes leads
        make_terms({"success": 1.0, "majority": 1.0}, {})
    for weights, options, message in [
        (
            {"success": 1.0, "repetitoin": 0.1},
            {},
            "neither a term .success, search_r1, truthful, majority.* nor a fact",
        ),
        ({"success": 1.0, "repetition": -0.1}, {}, "got weight -0.1, want more than 0; what costs has values below 0"),
        ({"success": 1.0, "soft_overlong": 0.1}, {}, "missing 2 required.*it takes .*max_tokens: int"),
        ({"success": 1.0, "repetition": 0.1}, {"repetition": {"n": 2}}, r"'n'; it takes \['ngram: int = 3'\]"),
        (
            {"success": 1.0},
            {"repetition": {"ngram": 2}},
            r"reward.options: got \['repetition'\].*take options: \['succ",
        ),
        ({"success": 1.0, "f1": 0.1}, {"f1": {"ngram": 2}}, r"reward.options: got \['f1'\]"),
        ({"success": 1.0, "judge": 0.1}, {"judge": {"url": "http://x/v1"}}, "it takes .*max_calls: int"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_terms(weights, {}, options)


def test_each_term_is_logged_raw_and_weighted():
    asked = {"calls": 3, "failed": 1}
    judge = RewardTerm("judge", 0.1, "episode", lambda t: t.facts["f1"], stats=lambda: asked)
    terms = [OUTCOME, RewardTerm("cost", -0.2, "episode", outcome.fact("searches"), reach=4), judge]
    group = [
        episode(success=True, searches=2, f1=0.5),
        episode(success=False, searches=4, f1=math.nan),
        episode(Status.ENV_ERROR, searches=9, f1=1.0),
    ]
    means = term_means(terms, score_group(terms, group))
    assert {name: (mean.total, mean.count) for name, mean in means.items()} == {
        "reward/outcome/raw": (1, 2),
        "reward/outcome/weighted": (1, 2),
        "reward/outcome/not_judged_frac": (0, 2),
        "reward/cost/raw": (pytest.approx(6), 2),
        "reward/cost/weighted": (pytest.approx(-1.2), 2),
        "reward/cost/not_judged_frac": (0, 2),
        "reward/judge/raw": (pytest.approx(0.5), 1),  # NaN is in the count of nothing else
        "reward/judge/weighted": (pytest.approx(0.05), 1),
        "reward/judge/not_judged_frac": (1, 2),
        "reward/judge/calls": (3, 1),
        "reward/judge/failed": (1, 1),
    }
    assert term_means(terms, [])["reward/cost/raw"].count == 0


def test_a_world_may_report_what_it_likes():
    """Legal facts end no run: another thing that is called `calls`, numbers that cannot be added up."""
    for calls in (3, [{"name": "search"}], {"search": "often"}, {1: 2}, None):
        means = episode_means([episode(success=True, calls=calls)])
        assert not [name for name in means if name.startswith("calls/")]
    odd = [math.inf, -math.inf, 1e308, 1e308, 2.0]
    mean = episode_means([episode(success=True, seconds=value) for value in odd])["episode/seconds"]
    assert (mean.total, mean.count) == (2.0, 1)


def test_calls_of_scored_episodes_are_counted_by_tool():
    calls = [{"search": 2, "answer": 1}, {"search": 1, "open": 0}]
    episodes = [episode(success=True, calls=own) for own in calls]
    means = episode_means([*episodes, episode(success=True), episode(Status.ENV_ERROR, calls={"search": 9})])
    got = {name: (mean.total, mean.count) for name, mean in means.items() if name.startswith("calls/")}
    assert got == {"calls/search_frac": (3, 4), "calls/answer_frac": (1, 4), "calls/open_frac": (0, 4)}


def test_episode_means():
    troubled, calm = (
        dict(empty_results=1, tool_errors=1, recovered=1),
        dict(empty_results=0, tool_errors=0, recovered=0),
    )
    episodes = [
        episode(task_id="x", success=True, searches=2, scores={"outcome": 1.0}, unsupported=0.0, **troubled),
        episode(Status.TURN_LIMIT, "y", {"outcome": 0.0}, success=False, searches=0, unsupported=math.nan, **calm),
        episode(Status.ENV_ERROR, "y", searches=50, success=False),
    ]
    failed = dict(task_id="y", success=False, searches=1, unsupported=1.0, mask=(0, 0, 0, 1))
    dropped = [episode(scores={"outcome": math.nan}, **failed)]
    means = episode_means([*episodes, *dropped], families={"x": "hop1", "y": "hop2"})
    got = {name: (mean.total, mean.count) for name, mean in means.items()}
    assert got["episode/success"] == (1, 3)  # the failed world is not in the count
    assert got["episode/reward"] == (1, 2)  # nor is what was not judged
    assert got["episode/searches"] == (3, 3)
    assert got["episode/turns"] == (5, 3) and got["episode/tokens"] == (5, 3)
    assert got["episode/recovery_frac"] == (1, 2)
    assert got["episode/env_error_frac"] == (1, 4)
    assert got["status/done"] == (2, 4) and got["status/turn_limit"] == (1, 4) and got["status/gave_up"] == (0, 4)
    assert got["reward_by_status/done"] == (1, 1) and got["reward_by_status/turn_limit"] == (0, 1)
    assert got["family/hop1/success"] == (1, 1) and got["family/hop2/success"] == (0, 2)
    assert got["family/hop2/searches"] == (1, 2)
    # what an answer is found in, of the two that answered: apart by how they end and by hops
    assert got["episode/unsupported"] == got["unsupported_by_status/done"] == (1, 2)
    assert got["unsupported_by_status/turn_limit"] == (0, 0) and got["tokens_by_status/turn_limit"] == (2, 1)
    assert got["family/hop1/unsupported"] == (0, 1) and got["family/hop2/unsupported"] == (1, 1)
    assert "searches_by_status/env_error" not in got, "not the policy's"
    # halves add up to the whole
    halves = episode_means(episodes[:2]), episode_means([*episodes[2:], *dropped])
    both = halves[0]["episode/success"] + halves[1]["episode/success"]
    assert (both.total, both.count) == got["episode/success"]
    assert episode_means([])["episode/env_error_frac"].count == 0
