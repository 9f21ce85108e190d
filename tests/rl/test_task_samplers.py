"""Which tasks a sampler prefers, by worked numbers; a task of no weight is never chosen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.task_samplers import (
    Outcome,
    adarft,
    adarft_target,
    beta_update,
    easy_to_hard,
    expected_success,
    learnability,
    plr,
    plr_probabilities,
    success_band,
)

ADARFT = {"step": 50.0, "sensitivity": 2.0, "wanted": 0.5}


def told(index, success, *, ticket=0, judged=4, spread=0.0):
    return Outcome(ticket, index, judged, success, success, spread)


def after(sampler, *batches):
    state = sampler.start()
    for i, batch in enumerate(batches, 1):
        state = sampler.update(state, batch, 10 * i, 10 * i)
    return state


def chances(choose, n, draws=4000):
    """Share of each task over an even grid of random numbers."""
    chosen = [choose(0, (i + 0.5) / draws) for i in range(draws)]
    return np.bincount(chosen, minlength=n) / draws


@pytest.mark.parametrize(("reward", "want"), [(0.5, 20), (0.8, 46.852478), (0.2, 0), (1.0, 58.079708)])
def test_adarft_moves_its_target(reward, want):
    assert adarft_target(20, reward, **ADARFT) == pytest.approx(want, abs=1e-6)


def test_adarft_plays_what_is_next_to_its_target_each_once():
    sampler = adarft(np.array([1, 2, 3, 4, 5.0]), target=0, seed=3, **ADARFT)  # 0, 25, 50, 75, 100
    first = sampler.choose(sampler.start())
    assert [first(t, 0.9) for t in range(5)] == [0, 1, 2, 3, 4]
    state = after(sampler, [told(0, 1.0), told(1, 0.6)])  # mean .8: 26.852478
    assert state["target"] == pytest.approx(26.852478, abs=1e-6) and state["first"] == 10
    then = sampler.choose(state)
    assert [then(t, 0.1) for t in range(10, 15)] == [1, 2, 0, 3, 4]
    assert after(sampler, [])["target"] == 0  # nobody was judged


def test_adarft_counts_from_the_first_ticket_that_is_drawn_after_an_update():
    """Those before it were drawn under the target before: as many as were under way, not a number of batches."""
    sampler = adarft(np.arange(41.0), target=50, seed=3, **ADARFT)
    # as often as is wanted: the target stays; settled below 10, drawn below 26
    state = sampler.update(sampler.start(), [told(0, 0.5)], 10, 26)
    then = sampler.choose(state)
    assert abs(then(26, 0.0) - 20) == 0 and {abs(then(t, 0.0) - 20) for t in (27, 28)} == {1}
    assert then(20, 0.0) == then(26, 0.0)  # a straggler is given the nearest, not the farthest


def test_adarft_orders_equal_tasks_anew_after_each_update():
    sampler = adarft(np.array([1.0] * 40 + [2.0]), target=0, seed=3, **ADARFT)
    orders = []
    for state in (sampler.start(), after(sampler, [told(0, 0.0)]), after(sampler, [told(0, 0.0)], [told(0, 0.0)])):
        orders.append([sampler.choose(state)(state["first"] + t, 0.0) for t in range(40)])
    assert [sorted(order) for order in orders] == [list(range(40))] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_easy_to_hard_lets_in_no_task_more_by_rounding():
    sampler = easy_to_hard(np.arange(100.0), start_frac=0.07, tickets=100)
    assert sampler.choose(sampler.start())(0, 0.999) == 6


def test_easy_to_hard_lets_in_a_growing_share():
    sampler = easy_to_hard(np.array([3, 1, 4, 2.0]), start_frac=0.25, tickets=100)
    choose = sampler.choose(sampler.start())
    allowed = [{choose(ticket, u) for u in np.linspace(0, 0.999, 50)} for ticket in (0, 1, 33, 66, 100, 1000)]
    assert allowed == [{1}, {1, 3}, {1, 3}, {0, 1, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]


def test_counts_decay_at_each_group_of_the_task():
    counts = (0.0, 0.0)
    seen = []
    for successes, failures in ((3, 1), (3, 1), (0, 4)):
        counts = beta_update(counts, successes, failures, decay=0.5)
        seen.append(counts)
    assert seen == [(3, 1), (4.5, 1.5), (2.25, 4.75)]
    a, b = np.array([[0.0, *(c[i] for c in seen)] for i in (0, 1)])
    np.testing.assert_allclose(expected_success(a, b), [1 / 2, 4 / 6, 5.5 / 8, 3.25 / 9])


def test_the_band_is_uniform_over_what_is_inside():
    sampler = success_band(4, low=0.2, high=0.8, decay=1.0)
    state = after(sampler, [told(0, 1.0, judged=8), told(1, 0.5, judged=8), told(2, 0.0, judged=8)])
    np.testing.assert_allclose(chances(sampler.choose(state), 4), [0, 0.5, 0, 0.5])  # .9, .5, .1, never played .5
    for _ in range(2):
        state = sampler.update(state, [told(1, 1.0, judged=40), told(3, 1.0, judged=40)], 0, 0)
    np.testing.assert_allclose(chances(sampler.choose(state), 4), [0.25] * 4)  # none inside: all


def test_learnability_is_the_variance_of_the_outcome():
    sampler = learnability(3, decay=1.0)
    state = after(sampler, [told(0, 1.0, judged=8), told(1, 0.25, judged=2)])
    p = np.array([0.9, 1.5 / 4, 0.5])
    np.testing.assert_allclose(chances(sampler.choose(state), 3), p * (1 - p) / (p * (1 - p)).sum(), atol=1e-3)


@pytest.mark.parametrize(
    ("temperature", "staleness", "unplayed", "want"),
    [
        (1.0, 0.0, [1, 1, 1, 1], [0.12, 0.48, 0.16, 0.24]),
        (0.1, 0.0, [1, 1, 1, 1], [1e-6, 0.999007, 1.7e-5, 0.000976]),
        (1.0, 0.1, [5, 0, 2, 1], [0.1705, 0.432, 0.169, 0.2285]),
        (1.0, 1.0, [0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_plr_probabilities(temperature, staleness, unplayed, want):
    got = plr_probabilities(np.array([0.1, 0.4, 0.2, 0.3]), unplayed, temperature=temperature, staleness=staleness)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_equal_scores_have_equal_chances_in_plr():
    """Each that of the mean of their ranks' weights: an order among them would be that of the data set."""
    got = plr_probabilities(np.array([0.0, 0.5, 0.0, 0.0]), np.zeros(4), temperature=1.0, staleness=0.0)
    low = (1 / 2 + 1 / 3 + 1 / 4) / 3
    np.testing.assert_allclose(got, np.array([low, 1.0, low, low]) / (1 + 3 * low))
    same = plr_probabilities(np.zeros(50), np.zeros(50), temperature=0.1, staleness=0.1)
    np.testing.assert_allclose(same, 1 / 50)


def test_plr_replays_a_fixed_share_until_all_were_played():
    sampler = plr(4, temperature=1.0, staleness=0.1, replay=0.5)
    np.testing.assert_allclose(chances(sampler.choose(sampler.start()), 4), [0.25] * 4)  # nothing to replay
    state = after(sampler, [told(2, 0.5, ticket=1, spread=0.1), told(0, 0.5, ticket=3, spread=0.4)])
    replayed = 0.9 * np.array([2 / 3, 1 / 3]) + 0.1 * np.array([7, 9]) / 16  # ages at ticket 10
    np.testing.assert_allclose(
        chances(sampler.choose(state), 4), [replayed[0] / 2, 0.25, replayed[1] / 2, 0.25], atol=1e-3
    )
    state = sampler.update(state, [told(i, 0.5, ticket=10 + i, spread=0.1) for i in (1, 3)], 20, 20)
    ages = np.array([17, 9, 19, 7])
    shared = (1 / 2 + 1 / 3 + 1 / 4) / 3  # three have the same score
    want = 0.9 * np.array([1, shared, shared, shared]) * 12 / 25 + 0.1 * ages / ages.sum()
    np.testing.assert_allclose(chances(sampler.choose(state), 4), want, atol=1e-3)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.0]))), st.floats(0, 1, exclude_max=True))
def test_every_choice_is_a_task_that_is_preferred(history, u):
    sampler = success_band(6, low=0.3, high=0.7, decay=0.9)
    state = after(sampler, *[[told(index, success)] for index, success in history])
    p = expected_success(state["successes"], state["failures"])
    inside = (p >= 0.3) & (p <= 0.7)
    chosen = sampler.choose(state)(0, u)
    assert 0 <= chosen < 6 and (inside[chosen] or not inside.any())


def test_errors():
    with pytest.raises(ValueError, match="got 3 tasks, all of difficulty 1; want several"):
        adarft(np.ones(3), target=0, seed=0, **ADARFT)
    with pytest.raises(ValueError, match=r"start_frac=0 tickets=5, want a share in \(0, 1\]"):
        easy_to_hard(np.ones(3), start_frac=0, tickets=5)
    with pytest.raises(ValueError, match="got decay 0, want more than 0"):
        learnability(3, decay=0)
    with pytest.raises(ValueError, match="temperature=0 staleness=0.1 replay=0.5; want temperature > 0"):
        plr(3, temperature=0, staleness=0.1, replay=0.5)
