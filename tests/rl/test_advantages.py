"""Advantages: worked numbers of SPECS 14, the faults of CASES A, and their laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from rl import masked
from rl.advantages import (
    bi_level_gae,
    gae,
    gigpo,
    group_relative,
    leave_one_out,
    process_relative,
    relative_on_device,
    turn_level_gae,
)

ONE = np.zeros(8, int)


def one_group(rewards, valid=None, **options):
    return group_relative(np.asarray(rewards), np.zeros(len(rewards), int), valid, **{"scale": "std"} | options)


def test_tunix_groups():
    rewards = np.array([0.57450044, 0.09968603, 0.7419659, 0.8941783, 0.59656656, 0.45325184])
    groups = np.array([0, 0, 0, 1, 1, 1])
    want = [0.307498, -1.117636, 0.810138, 1.094526, -0.228671, -0.865855]
    assert_allclose(group_relative(rewards, groups, scale="std"), want, atol=1e-5)
    want = [0.10245, -0.372365, 0.269915, 0.246179, -0.051432, -0.194747]
    assert_allclose(group_relative(rewards, groups, scale="none"), want, atol=1e-6)


def test_d6_group_norm():
    assert_allclose(one_group([1, 0, 0, 0]), [1.499997] + [-0.499999] * 3, atol=1e-6)
    assert_allclose(one_group([1, 0, 0, 0], ddof=0), [1.732051] + [-0.577350] * 3, atol=1e-5)
    assert_allclose(one_group([1, 0, 0, 0], scale="none"), [0.75] + [-0.25] * 3)
    assert_allclose(one_group([1, 0, -1, -1]), [1.305581, 0.261116, -0.783349, -0.783349], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a1_equal_rewards_are_exactly_nothing(dtype):
    for value in (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 0.9, 0.0, 1.0, -1e6):
        for size in (1, 2, 3, 6, 8, 16):
            rewards, groups = np.full(size, value, dtype), np.zeros(size, int)
            for eps in (0.0, 1e-8, 1e-6):
                assert (group_relative(rewards, groups, scale="std", eps=eps) == 0).all()
            assert (group_relative(rewards, groups, scale="none") == 0).all()
            assert (leave_one_out(rewards, groups) == 0).all()


def test_a3_ddof_and_the_singleton():
    r = [1, 1, 0, 0, 0]
    assert_allclose(one_group(r, ddof=0), [1.2247] * 2 + [-0.8165] * 3, atol=1e-4)
    assert_allclose(one_group(r), [1.0954] * 2 + [-0.7303] * 3, atol=1e-4)  # the default: ddof 1
    assert_allclose(one_group(r, scale="none"), [0.6] * 2 + [-0.4] * 3)
    assert one_group([5.0]) == 0 and leave_one_out(np.array([5.0]), np.zeros(1, int)) == 0


def test_a4_groups_are_by_number_not_by_place():
    assert_allclose(group_relative([1, 9, 0, 7], ["p", "q", "p", "q"], scale="std", ddof=0), [1, 1, -1, -1], rtol=1e-5)


def test_a5_a_failed_member_is_absent():
    valid = np.array([True, True, False, True])
    for failed in (0.0, np.nan, 1e9):
        got = group_relative(np.array([2, 5, failed, 5]), ONE[:4], valid, scale="none")
        assert_array_equal(got, [-2, 1, 0, 1])
        assert got.sum() == 0
    assert_array_equal(leave_one_out([2, 5, 0, 5], ONE[:4], valid), [-3, 1.5, 0, 1.5])
    assert_array_equal(one_group([1.0, np.nan], valid=[True, False]), [0, 0])  # what is left is a group of one


def test_leave_one_out():
    assert_array_equal(leave_one_out(np.arange(1, 7), [0, 0, 0, 1, 1, 1]), [-1.5, 0, 1.5, -1.5, 0, 1.5])
    assert_array_equal(leave_one_out([6, 3, 9, 12, 1], [0, 0, 1, 1, 2]), [3, -3, -3, 3, 0])
    for size in (2, 3, 8):  # G / (G - 1) of Dr. GRPO's
        r = np.random.default_rng(size).normal(size=size)
        assert_allclose(leave_one_out(r, ONE[:size]), size / (size - 1) * one_group(r, scale="none"), rtol=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]), st.booleans()), min_size=1),
    st.randoms(use_true_random=False),
)
def test_order_and_other_groups_do_not_matter(members, random):
    groups, rewards, valid = (np.array(x) for x in zip(*members, strict=True))
    order = np.array(random.sample(range(len(members)), len(members)))
    for f in (lambda r, g, v: group_relative(r, g, v, scale="std"), leave_one_out):
        before = f(rewards, groups, valid)
        assert_array_equal(f(rewards[order], groups[order], valid[order]), before[order])
        assert np.isfinite(before).all() and (before[~valid] == 0).all()
        lifted = f(rewards + 1000 * (groups == 0), groups, valid)
        assert_array_equal(lifted[groups != 0], before[groups != 0])


def test_what_cannot_be_judged_must_be_said():
    with pytest.raises(
        ValueError, match=r"rewards at \[1\]: got \[nan\], want finite; mark what was not judged invalid"
    ):
        one_group([1.0, np.nan])
    with pytest.raises(ValueError, match="scale: got 'mean', want 'std' or 'none'"):
        one_group([1.0], scale="mean")
    with pytest.raises(ValueError, match=r"got rewards \(2,\), groups \(1,\)"):
        group_relative([1, 2], [0], scale="std")


# --- GAE --------------------------------------------------------------------------------------------------------------

X = np.nan  # off the mask: must not be read
D3_MASK = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], bool)
D3_REWARDS = np.array([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0], np.float32)


@pytest.mark.parametrize("x", [X, np.inf, 50.0])
@pytest.mark.parametrize(
    ("discount", "lambda_", "want"),
    [
        (1.0, 1.0, [-2.6, -3.7, -4.8, -5.9, -8]),
        (0.9, 0.8, [-0.534651, -1.575904, -2.8832, -4.56, -8]),
        (1.0, 0.95, [-1.577813, -2.81875, -4.125, -5.5, -8]),
    ],
)
def test_d3_observation_gaps(x, discount, lambda_, want):
    values = np.array([x, x, 4, 5, 6, x, x, 7, 9, x, x], np.float32)
    rewards = np.where(D3_MASK, D3_REWARDS, np.float32(x))
    advantages, returns = jax.jit(lambda *a: gae(*a, discount=discount, lambda_=lambda_))(rewards, values, D3_MASK)
    assert_allclose(advantages[D3_MASK], want, rtol=1e-5)
    assert_allclose(returns[D3_MASK], np.array(want) + values[D3_MASK], atol=1e-5)
    assert not np.any(advantages[~D3_MASK]) and not np.any(returns[~D3_MASK])
    if discount == lambda_ == 1:
        assert_allclose(returns[D3_MASK], [1.4, 1.3, 1.2, 1.1, 1], atol=1e-5)


def test_a9_a10_tool_output_takes_no_part():
    returns = gae(np.array([0, 0, 0, 8.0]), np.zeros(4), np.array([1, 0, 0, 1], bool), discount=0.5, lambda_=1.0)[1]
    assert_allclose(returns, [4, 0, 0, 8])
    values = np.array([0.3, 50, 0.6], np.float32)
    got = gae(np.array([0, 0, 2.0]), values, np.array([1, 0, 1], bool), discount=1.0, lambda_=0.5)[0]
    assert_allclose(got, [1.0, 0, 1.4], rtol=1e-6)  # .6 - .3 + .5 · 1.4, not 25.35
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 5)).astype(np.float32)
    plain = gae(rewards, values, np.ones(5, bool), discount=0.9, lambda_=0.7)
    for k in (0, 1, 50):
        mask = np.r_[np.ones(2, bool), np.zeros(k, bool), np.ones(3, bool)]
        spread = [np.insert(x, [2] * k, 7.0) for x in (rewards, values)]
        for got, want in zip(gae(*spread, mask, discount=0.9, lambda_=0.7), plain, strict=True):
            assert_array_equal(got[mask], want)


def test_skyrl_gae_and_vmap():
    r, v, m = np.array([1.0, 2, 3]), np.array([0.5, 1, 1.5]), np.ones(3, bool)
    for discount, lambda_, want in ((1, 1, [6, 5, 3]), (0.5, 1, [2.75, 3.5, 3]), (1, 0.5, [3.625, 4.25, 3])):
        f = jax.vmap(lambda r, v, m, d=discount, k=lambda_: gae(r, v, m, discount=d, lambda_=k))
        for row in f(*(np.stack([x, x]) for x in (r, v, m)))[1]:
            assert_allclose(row, want, rtol=1e-6)


def test_a_chain_longer_than_a_block_and_several_episodes_after_one_another():
    """Against the plain recursion, of each episode alone; discounts bite, so that a lost carry would show."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 700)).astype(np.float32)
    mask, episode = rng.random(700) < 0.6, np.repeat([4, 9, 2], [300, 150, 250])
    want = np.zeros(700)
    for number in (4, 9, 2):
        after, value = 0.0, 0.0
        for t in np.flatnonzero(mask & (episode == number))[::-1]:
            want[t] = after = rewards[t] + 0.99 * value - values[t] + 0.99 * 0.97 * after
            value = values[t]
    got, returns = gae(rewards, values, mask, discount=0.99, lambda_=0.97, episode=episode)
    assert_allclose(got, want, atol=1e-4)
    assert_allclose(returns, want + np.where(mask, values, 0), atol=1e-4)


TURNS = np.array([-1, 0, 0, 0, 1, 1, 2, 2, 2])
TURN_MASK = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], bool)


@pytest.mark.parametrize("x", [X, np.inf])
def test_turn_level_gae(x):
    """Turns of 2, 1 and 2 tokens begin at values 1, 2 and 4; rewards .5, 0 and 3.

    γ λ = .9 .5: δ = .5 + .9·2 - 1 = 1.3, 0 + .9·4 - 2 = 1.6, 3 - 4 = -1; A_2 = -1, A_1 = 1.6 - .45 = 1.15,
    A_0 = 1.3 + .45·1.15 = 1.8175.
    """
    rewards = np.array([x, 0.2, 0.3, x, 0, x, x, 0, 3], np.float32)
    values = np.array([x, 1, 50, x, 2, x, x, 4, 60], np.float32)
    got, returns = turn_level_gae(rewards, values, TURNS, TURN_MASK, discount=0.9, lambda_=0.5)
    assert_allclose(got, [0, 1.8175, 1.8175, 0, 1.15, 0, 0, -1, -1], rtol=1e-6)
    assert_allclose(returns, [0, 2.8175, 2.8175, 0, 3.15, 0, 0, 3, 3], rtol=1e-6)


def test_d4_bi_level_gae():
    rewards, values = np.zeros(10, np.float32), np.arange(1, 11, dtype=np.float32) / 10
    rewards[[4, 9]] = 1
    turn, every = np.repeat([0, 1], 5), np.ones(10, bool)
    how = dict(discount=1.0, lambda_=1.0, turn_discount=0.95)
    got, returns = bi_level_gae(rewards, values, turn, every, **how)
    assert_allclose(got, [1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0], atol=1e-6)
    assert_allclose(returns, [1.95] * 5 + [1] * 5, rtol=1e-6)
    ends = masked.whiten(got, every)[jnp.array([0, -1])]
    assert_allclose(ends * np.sqrt(9 / 10), [1.187998, -1.187998], rtol=1e-5)  # theirs, by the unbiased variance


def test_a_turn_that_earns_nothing_is_a_turn():
    """By turn index: a reward of 0 in the first turn must not merge it with the second, whose end is then p_0."""
    rewards, values = np.array([0, 0, 0, 1.0], np.float32), np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    got, _ = bi_level_gae(
        rewards, values, np.array([0, 0, 1, 1]), np.ones(4, bool), discount=1.0, lambda_=0.0, turn_discount=0.5
    )
    # ends .2 and .4: A^H_0 = .5 · .4 - .2 = 0, goal .2; A^H_1 = 1 - .4, goal 1; one-step differences within a turn
    assert_allclose(got, [0.1, 0.0, 0.1, 0.6], atol=1e-6)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 1000),
)
def test_observations_and_neighbours_change_no_estimate(tokens, seed):
    """Each estimator: tokens off the mask are not there, and an episode is what it is alone, whatever comes after."""
    tokens = (tokens + [(False, False)] * 20)[:20]  # one shape: each estimator is compiled twice
    turn, mask = np.cumsum([new for new, _ in tokens]), np.array([acted for _, acted in tokens])
    rewards, values = np.random.default_rng(seed).normal(size=(2, 20)).astype(np.float32)
    for estimate in (_token, _turn, _bi):
        want = [np.asarray(x)[mask] for x in estimate(rewards, values, turn, mask, None)]
        wide = lambda x, fill: np.concatenate([np.full(3, fill, x.dtype), x, x])  # noqa: E731
        episode = np.repeat([7, 8, 9], [3, 20, 20])
        both = wide(mask, False)
        got = estimate(wide(rewards, 5), wide(values, np.nan), wide(turn, -1), both, episode)
        for x, y in zip(got, want, strict=True):
            assert_allclose(np.asarray(x)[both], np.tile(y, 2), rtol=1e-5, atol=1e-5)
            assert not np.any(np.asarray(x)[~both])


@jax.jit
def _token(rewards, values, turn, mask, episode):
    return gae(rewards, values, mask, discount=0.9, lambda_=0.8, episode=episode)


@jax.jit
def _turn(rewards, values, turn, mask, episode):
    return turn_level_gae(rewards, values, turn, mask, discount=0.9, lambda_=0.8, episode=episode)


@jax.jit
def _bi(rewards, values, turn, mask, episode):
    return bi_level_gae(rewards, values, turn, mask, discount=0.9, lambda_=0.8, turn_discount=0.7, episode=episode)


def test_one_token_a_turn_is_where_all_three_agree():
    rewards, values = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    every, how = np.ones(6, bool), dict(discount=0.9, lambda_=0.8)
    want = gae(rewards, values, every, **how)
    assert_allclose(turn_level_gae(rewards, values, np.arange(6), every, **how), want, rtol=1e-5)
    assert_allclose(bi_level_gae(rewards, values, np.arange(6), every, **how, turn_discount=0.9), want, rtol=1e-5)


def test_reinforce_pp_returns_skip_what_the_policy_did_not_say():
    mask = np.array([1, 1, 0, 0, 1], bool)
    returns = gae(np.array([0, 0, 0, 0, 2.0]), np.zeros(5), mask, discount=0.5, lambda_=1.0)[0]
    assert_array_equal(returns, [0.5, 1, 0, 0, 2])


# --- step by step, without a critic -----------------------------------------------------------------------------------

ONE_HOT = dict(discount=0.95, weight=1.0, scale="none")


def test_d5_gigpo():
    outcomes = np.array([1, 1, 0, 0, 0, 0, 0, 0.0])
    steps = [np.array([0, r]) for r in outcomes]
    got = np.stack(gigpo(outcomes, [("A", "B")] * 8, steps, ONE, **ONE_HOT))
    assert_allclose(got, [[1.4625, 1.5]] * 2 + [[-0.4875, -0.5]] * 6)
    # a step that nobody shares has the episode's part alone
    own = [("A", "B")] * 7 + [("A", "C")]
    assert_allclose(gigpo(outcomes, own, steps, ONE, **ONE_HOT)[7], [-0.4875, -0.25])
    alone = np.stack(gigpo(outcomes, [(i, -i - 1) for i in range(8)], steps, ONE, **ONE_HOT))
    assert_allclose(alone, np.repeat(group_relative(outcomes, ONE, scale="none")[:, None], 2, axis=1))


def test_gigpo_s_anchors_are_of_one_group_and_of_any_step():
    """The same state in two tasks is two; come to again by one episode, it is compared with that step too."""
    outcomes, groups = np.array([1.0, 0, 1, 0]), np.array([0, 0, 1, 1])
    steps = [np.array([0, 1.0]), np.array([0.0]), np.array([1.0]), np.array([0, 0.0])]
    anchors = [("s", "s"), ("s",), ("s",), ("t", "s")]
    got = gigpo(outcomes, anchors, steps, groups, discount=0.5, weight=2.0, scale="none")
    # group 0: returns .5, 1 and 0 in s, mean .5; group 1: 1 and 0 in s, 0 in t, which is seen once
    assert_allclose(got[0], [0.5 + 2 * 0.0, 0.5 + 2 * 0.5])
    assert_allclose(got[1], [-0.5 - 2 * 0.5])
    assert_allclose(got[2], [0.5 + 2 * 0.5])
    assert_allclose(got[3], [-0.5, -0.5 - 2 * 0.5])
    assert gigpo(np.zeros(0), [], [], np.zeros(0, int), **ONE_HOT) == []
    with pytest.raises(ValueError, match=r"got anchors and rewards of \[1\] and \[2\] steps, want one of each"):
        gigpo(np.zeros(1), [("s",)], [np.zeros(2)], np.zeros(1, int), **ONE_HOT)


def test_gigpo_is_group_relative_where_everything_is_equal():
    steps = [np.array([0.1, 0.2])] * 3
    for scale in ("std", "none"):
        for own in gigpo(np.full(3, 0.3), [("a", "b")] * 3, steps, ONE[:3], discount=1.0, weight=1.0, scale=scale):
            assert (own == 0).all()


def test_process_relative():
    """Steps 1, 0 | 1, 1, 0 of one group, mean .6: what is left of each, from the step on."""
    got = process_relative([np.array([1.0, 0]), np.array([1.0, 1, 0])], ONE[:2], scale="none")
    assert_allclose(got[0], [-0.2, -0.6])
    assert_allclose(got[1], [0.2, -0.2, -0.6])
    std = np.std([1, 0, 1, 1, 0], ddof=1)
    scaled = process_relative([np.array([1.0, 0]), np.array([1.0, 1, 0])], ONE[:2], scale="std")
    assert_allclose(scaled[1], np.array([0.2, -0.2, -0.6]) / std, rtol=1e-5)
    with pytest.raises(ValueError, match="got steps of 1 episodes and groups of 2, want one each"):
        process_relative([np.zeros(1)], ONE[:2], scale="std")


# --- a group's, on the device -----------------------------------------------------------------------------------------


@given(st.integers(0, 1000))
def test_on_the_device_a_group_is_compared_as_on_the_host(seed):
    """Episodes of action tokens among observations, in groups of several sizes, one of equal rewards (exactly 0); an
    episode without any is not there.
    """
    rng = np.random.default_rng(seed)
    groups = np.sort(rng.integers(0, 3, 8))
    acted = rng.random((8, 5)) < 0.4
    acted[1:, 2] = True
    there = acted.any(1)
    rewards = np.where(groups == 1, 0.1, rng.choice([0.0, 0.1, 0.3, 1.0], 8))
    # one part on the last action token, another on the first
    parts = np.where(groups == 1, 0.0, rng.normal(size=8))
    given, every = np.full((8, 5), np.nan), np.arange(8)
    given[acted] = 0
    given[every, 4 - acted[:, ::-1].argmax(1)] += rewards
    given[every, acted.argmax(1)] += parts
    mask, episode, rewards = acted.ravel(), np.repeat(every, 5), rewards + parts
    for baseline, want in {
        "std": group_relative(rewards, groups, there, scale="std"),
        "none": group_relative(rewards, groups, there, scale="none"),
        "others": leave_one_out(rewards, groups, there),
    }.items():
        got = _on_device(given.ravel().astype(np.float32), mask, episode, np.repeat(groups, 5), baseline)
        assert_allclose(got, np.where(mask, np.repeat(want, 5), 0), rtol=1e-4, atol=1e-5)


@partial(jax.jit, static_argnums=4)
def _on_device(rewards, mask, episode, group, baseline):
    return relative_on_device(rewards, mask, episode, group, baseline=baseline)


def test_on_the_device_equal_scores_are_exactly_nothing():
    """Scores of one token each: no rounding of a sum, but one of their mean."""
    rewards, every = np.full(6, 0.1, np.float32), np.ones(6, bool)
    for baseline in ("std", "none", "others"):
        assert not np.any(_on_device(rewards, every, np.arange(6), np.zeros(6, int), baseline))
    with pytest.raises(ValueError, match="baseline: got 'mean', want 'std', 'none' or 'others'"):
        relative_on_device(rewards, every, np.arange(6), np.zeros(6, int), baseline="mean")
