"""Worked numbers of SPECS 14 and the faults of CASES B, then laws: masks, extremes, exact KL, splits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rl import masked
from rl.losses import recipes
from rl.losses.kl import adapted, kl_estimate
from rl.losses.reduce import reduce_loss
from rl.losses.supervised import cross_entropy
from rl.losses.surrogate import (
    clipped,
    clipped_surrogate,
    clipped_weight_surrogate,
    decoupled_weight,
    loglinear_proximal,
    sequence_log_ratio,
    truncated_weight,
)
from rl.losses.value import clipped_value_loss, explained_variance
from rl.types import Scored, TrajectoryBatch

# SPECS D1: two sequences of three and two tokens, one a row.
MASK = jnp.array([[1, 1, 1], [1, 1, 0]], bool)
SEGMENT = jnp.array([[1, 1, 1], [1, 1, 0]])
OLD = jnp.array([[-1, -2, -0.5], [-0.7, -1.2, 0]])
NEW = jnp.array([[-0.8, -2.3, -0.5], [-0.3, -1.5, 0]])
ADVANTAGE = jnp.array([[1.0, 1, 1], [-1, -1, 0]])


def value(per_token, how="token", length=None):
    return float(reduce_loss(per_token, MASK, SEGMENT, how=how, length=length).value)


def batch_of(behavior=OLD, advantages=ADVANTAGE, mask=MASK, segment=SEGMENT, **fields):
    zero = jnp.zeros(mask.shape, jnp.int32)
    return TrajectoryBatch(zero, segment, zero, mask, behavior, zero, jnp.zeros(mask.shape), advantages, **fields)


def loss_of(loss_fn, logp=NEW, **fields):
    return float(loss_fn(Scored(logp, jnp.zeros_like(logp)), batch_of(**fields))[0].value)


# --- worked numbers ---------------------------------------------------------------------------------------------------


def test_d1_surrogate_and_reductions():
    per_token = clipped_surrogate(NEW - OLD, ADVANTAGE, clip_low=0.2, clip_high=0.2)
    assert_allclose(per_token, [[-1.2, -0.740818, -1], [1.491825, 0.8, 0]], rtol=1e-6)
    assert value(per_token, "sequence") == pytest.approx(0.0828198, abs=1e-6)
    assert value(per_token, "token") == pytest.approx(-0.1297987, abs=1e-6)
    assert value(per_token, "fixed", 8) == pytest.approx(-0.0405621, abs=1e-6)
    high = clipped_surrogate(NEW - OLD, ADVANTAGE, clip_low=0.2, clip_high=0.28)
    assert_allclose(high, [[-1.221403, -0.740818, -1], [1.491825, 0.8, 0]], rtol=1e-6)
    assert value(high, "sequence") == pytest.approx(0.0792527, abs=1e-6)
    assert value(high, "token") == pytest.approx(-0.1340793, abs=1e-6)


def test_d1_recipes():
    assert loss_of(recipes.grpo()) == pytest.approx(0.0828198, abs=1e-6)
    assert loss_of(recipes.dapo()) == pytest.approx(-0.1340793, abs=1e-6)
    assert loss_of(recipes.dr_grpo(length=8), advantages=ADVANTAGE / 2) == pytest.approx(-0.0202810, abs=1e-6)
    assert loss_of(recipes.grpo(kl_coef=0.04), ref_logp=OLD) == pytest.approx(0.0844789, abs=1e-6)
    assert loss_of(recipes.gspo()) == pytest.approx(0.0420275, abs=1e-3)  # its narrow clip is active: see D1b
    assert loss_of(recipes.gspo(clip_low=0.2, clip_high=0.2)) == pytest.approx(0.0420275, abs=1e-6)
    assert loss_of(recipes.sft()) == pytest.approx((0.8 + 2.3 + 0.5 + 0.3 + 1.5) / 5)


def test_d1_k3():
    k3 = kl_estimate(NEW, OLD, kind="k3")
    assert_allclose(k3, [[0.018731, 0.049859, 0], [0.070320, 0.049859, 0]], atol=1e-6)
    assert value(k3, "sequence") == pytest.approx(0.0414763, abs=1e-6)
    assert value(k3, "token") == pytest.approx(0.0377537, abs=1e-6)


def test_d1_sequence_ratio():
    s = jnp.exp(sequence_log_ratio(NEW - OLD, MASK, SEGMENT))
    assert_allclose(s[:, 0], [0.967216, 1.051271], rtol=1e-6)
    assert_allclose(s[0], s[0, 0] * jnp.ones(3), rtol=1e-6)
    assert float(s[1, 2]) == 1.0  # exp(0) off the mask


@pytest.mark.parametrize(
    ("low", "high", "per_sequence", "mean"),
    [(0.2, 0.2, [-1.051271, 0.941765], -0.0547533), (3e-4, 4e-4, [-1.0004, 0.9997], -0.00035)],
)
def test_d1b_gspo_clip_active(low, high, per_sequence, mean):
    log_ratio = jnp.array([[0.1, 0.0], [-0.12, 0.0]])  # means +.05 and -.06
    mask, segment, advantages = jnp.ones((2, 2), bool), jnp.ones((2, 2), jnp.int32), jnp.array([[1.0], [-1.0]])
    s = sequence_log_ratio(log_ratio, mask, segment)
    loss = clipped_surrogate(s, advantages, clip_low=low, clip_high=high)
    assert_allclose(loss[:, 0], per_sequence, rtol=1e-6)
    assert float(reduce_loss(loss, mask, segment, how="sequence").value) == pytest.approx(mean, abs=1e-6)


def test_d2_decoupled():
    behavior, proximal = jnp.array([[-1, -2, -0.5]]), jnp.array([[-0.9, -2.2, -0.4]])
    now, mask = jnp.array([[-0.8, -2.3, -0.7]]), jnp.ones((1, 3), bool)
    weight = decoupled_weight(proximal, behavior, mask, cap=5.0)
    assert_allclose(weight, [[1.105171, 0.818731, 1.105171]], rtol=1e-6)
    for sign, tokens, mean, naive in (
        (1.0, [-1.221403, -0.740818, -0.818731], -0.926984, -0.919850),
        (-1.0, [1.221403, 0.740818, 0.884137], 0.948786, 0.946711),
    ):
        advantages = jnp.full((1, 3), sign)
        loss = weight * clipped_surrogate(now - proximal, advantages, clip_low=0.2, clip_high=0.2)
        assert_allclose(loss, [tokens], rtol=1e-6)
        fields = dict(behavior=behavior, advantages=advantages, mask=mask, segment=mask.astype(jnp.int32))
        decoupled = loss_of(recipes.ppo_decoupled(), now, proximal_logp=proximal, **fields)
        assert decoupled == pytest.approx(mean, abs=1e-6)
        assert loss_of(recipes.dapo(clip_high=0.2), now, **fields) == pytest.approx(naive, abs=1e-6)
    # over the cap: weight 0, denominator unchanged; off the mask: 0 whatever stands there
    out = decoupled_weight(jnp.array([2.0, 0.0, jnp.nan]), jnp.zeros(3), jnp.array([1, 1, 0], bool), cap=5.0)
    assert_array_equal(out, [0, 1, 0])


def test_decoupled_is_plain_where_proximal_is_behavior():
    plain, decoupled = recipes.dapo(clip_high=0.2), recipes.ppo_decoupled()

    def gradient(f):
        return jax.grad(lambda x: f(Scored(x, 0 * x), batch_of(proximal_logp=OLD))[0].total)(NEW)

    assert_array_equal(gradient(plain), gradient(decoupled))


def test_loglinear_proximal_of_areal():
    """Its own table: tokens of version v, under a policy that becomes `current`, are current - 1 - v versions old."""
    for old, new, v, current, want in (
        ([-1.0, -2, -3], [-1.5, -2.5, -3.5], [0, 0, 0], 2, [-1.25, -2.25, -3.25]),
        ([-1.0, -2], [-1.5, -2.2], [0, 2], 4, [-1.375, -2.1]),
        ([-1.0, -2], [-1.5, -2.2], [4, 4], 5, [-1.0, -2.0]),
    ):
        got = loglinear_proximal(jnp.array(new), jnp.array(old), current - 1 - jnp.array(v))
        assert_allclose(got, want, rtol=1e-6)


def test_a_loglinear_proximal_needs_no_forward_pass_and_carries_no_gradient():
    """At staleness 1 it is half-way: u = w = (π/π_behavior)^½ each. The slope of -w·u·A is that of u alone."""
    recipe, staleness = recipes.ppo_decoupled(proximal="loglinear", clip_high=9.0, clip_low=1.0), jnp.ones_like(SEGMENT)

    def total(logp):
        batch = dataclasses.replace(batch_of(), staleness=staleness)
        return recipe(Scored(logp, 0 * logp), batch)[0].total

    loss, slope = jax.value_and_grad(total)(NEW)
    want = jnp.where(MASK, -jnp.exp(NEW - OLD) * ADVANTAGE, 0)
    assert_allclose(loss, want.sum(), rtol=1e-6)
    assert_allclose(slope, want, rtol=1e-5)


def test_nemo_rl_rows():
    advantages = jnp.array([[1.0, -1, 2]])
    log_ratio = jnp.log(jnp.array([[0.5, 1, 1.5]]))
    ones, clip = jnp.ones((1, 3), bool), dict(clip_low=0.2, clip_high=0.2)
    loss = clipped_surrogate(log_ratio, advantages, **clip)
    assert_allclose(loss, [[-0.5, 1, -2.4]], rtol=1e-6)
    # GSPO: s = (.5 · 1 · 1.5)^(1/3) = .9086
    s = sequence_log_ratio(log_ratio, ones, ones)
    assert_allclose(clipped_surrogate(s, advantages, **clip), [[-0.9086, 0.9086, -1.8171]], atol=1e-4)
    # engine's log-probs [-.5, -1.5, -.8] beside the trainer's -1
    weight = decoupled_weight(jnp.full((1, 3), -1.0), jnp.array([[-0.5, -1.5, -0.8]]), ones, cap=5.0)
    assert_allclose(weight, [[0.6065, 1.6487, 0.8187]], atol=1e-4)
    assert float(jnp.mean(weight * loss)) == pytest.approx(-0.2065, abs=1e-4)
    # cut to .8, not rejected: (-.5 · .6065 + 1 · .8 - 2.4 · .8) / 3
    gen = jnp.array([[-0.5, -1.5, -0.8]])
    weight = truncated_weight(jnp.full((1, 3), -1.0), gen, ones, cap=0.8)
    assert_allclose(weight, [[0.6065, 0.8, 0.8]], atol=1e-4)
    assert float(jnp.mean(weight * loss)) == pytest.approx(-0.4744, abs=1e-4)
    # the same by a recipe, the trainer's own policy of before the update in between
    between = dict(behavior=gen, proximal_logp=jnp.full((1, 3), -1.0), advantages=advantages)
    recipe = recipes.dapo(clip_high=0.2, decoupled_cap=0.8, weigh=truncated_weight)
    corrected, metrics = recipe(Scored(-1 + log_ratio, 0 * gen), batch_of(mask=ones, segment=1 * ones, **between))
    assert float(corrected.value) == pytest.approx(-0.4744, abs=1e-4)
    assert float(metrics["policy/is_capped_frac"].value) == pytest.approx(2 / 3)
    assert float(metrics["policy/is_weight"].value) == pytest.approx((0.6065 + 0.8 + 0.8) / 3, abs=1e-4)
    # + .1 k3 to a reference
    k3 = kl_estimate(jnp.array([0.0, -1, -2]), jnp.full(3, -1.0), kind="k3")
    assert float(0.1 * jnp.mean(k3)) == pytest.approx(0.0362, abs=1e-4)
    # REINFORCE: -(1 · -.5 - 1 · -1 + 2 · -1.5) / 3, as CISPO whose bounds hold nothing
    fields = dict(mask=ones, segment=ones.astype(jnp.int32), advantages=advantages)
    now = jnp.array([[-0.5, -1, -1.5]])
    assert loss_of(recipes.cispo(clip_high=0.2), now, behavior=now, **fields) == pytest.approx(0.8333, abs=1e-4)
    # dual clip
    log_ratio = jnp.log(jnp.array([[0.5, 1, 10]]))
    loss = clipped_surrogate(log_ratio, jnp.array([[1.0, -1, -4]]), **clip, dual_clip=3.0)
    assert_allclose(loss, [[-0.5, 1, 12]], rtol=1e-6)
    fields = dict(behavior=now, mask=ones, segment=1 * ones, advantages=jnp.array([[1.0, -1, -4]]))
    assert loss_of(recipes.dapo(dual_clip=3.0), now + log_ratio, **fields) == pytest.approx(4.1667, abs=1e-4)
    # slime: c = 1.5
    loss = clipped_surrogate(jnp.log(jnp.array([2, 2, 0.5])), jnp.array([2.0, -2, 2]), **clip, dual_clip=1.5)
    assert_allclose(loss, [-2.4, 3, -1], rtol=1e-6)
    # SkyRL: CISPO on the data of the dual clip, weights .8, 1 and 1.2
    old = jnp.array([-1.0, -1, -3])
    ratio = jnp.log(jnp.array([0.5, 1, 10]))
    loss = clipped_weight_surrogate(ratio, old + ratio, jnp.array([1.0, -1, -4]), **clip)
    assert_allclose(loss, [0.8 * 1.693147, -1, 1.2 * -4 * 0.697415], rtol=1e-5)
    assert float(jnp.sum(loss)) == pytest.approx(-2.9930, abs=1e-4)
    with pytest.raises(ValueError, match="dual_clip: got 1.0, want a bound above 1"):
        clipped_surrogate(log_ratio, log_ratio, **clip, dual_clip=1.0)


def test_kl_zoo():
    d = jnp.array([0.38486, 0.74692, 0.34952, -0.44747, -0.13096])
    zero = jnp.zeros(5)
    assert_allclose(kl_estimate(d, zero, kind="k1"), d)
    assert_allclose(kl_estimate(d, zero, kind="k2"), [0.07406, 0.27895, 0.06108, 0.10011, 0.00857], atol=1e-5)
    assert_allclose(kl_estimate(d, zero, kind="k3"), [0.06541, 0.22074, 0.05455, 0.11688, 0.00896], atol=1e-5)
    # NeMo-RL: logp -1, ref 0, -15, -30; k3 .7183, then cut at 10
    logp, ref = jnp.full(3, -1.0), jnp.array([0.0, -15, -30])
    assert_allclose(kl_estimate(logp, ref, kind="k1"), [-1, 14, 29])
    assert_allclose(kl_estimate(logp, ref, kind="k2"), [0.5, 98, 420.5])
    assert_allclose(kl_estimate(logp, ref, kind="k3"), [0.718282, 10, 10], rtol=1e-6)
    assert_allclose(kl_estimate(jnp.array([0.0, -1, -2]), logp, kind="k3"), [0.367879, 0, 0.718282], atol=1e-6)
    with pytest.raises(ValueError, match="kind: got 'k4', want 'k1', 'k2' or 'k3'"):
        kl_estimate(d, zero, kind="k4")


def test_reductions():
    x, m = jnp.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), jnp.array([[1, 1, 0], [1, 1, 1]], bool)
    one = jnp.ones((2, 3), jnp.int32)
    assert float(reduce_loss(x, m, one, how="token").value) == pytest.approx(0.36)  # 1.8 / 5
    assert float(reduce_loss(x, m, one, how="sequence").value) == pytest.approx(0.325)  # (.15 + .5) / 2
    assert float(reduce_loss(x, m, one, how="fixed", length=3).value) == pytest.approx(0.3)  # (.1 + .5) / 2
    # on-policy, A = 1.5 on three tokens and 3 on one: -2.25, one a row or packed in one row
    packed = jnp.array([[-1.5, -1.5, -1.5, -3.0]]), jnp.ones((1, 4), bool), jnp.array([[1, 1, 1, 2]])
    assert float(reduce_loss(*packed, how="sequence").value) == -2.25
    # a fully masked row leaves the count: OpenRLHF's 2.0
    rows = jnp.full((3, 2), 2.0), jnp.array([[1, 1], [1, 0], [0, 0]], bool), jnp.ones((3, 2), jnp.int32)
    for how, length in (("token", None), ("sequence", None)):
        assert float(reduce_loss(*rows, how=how, length=length).value) == 2.0
    with pytest.raises(ValueError, match="how: got 'mean', want 'token', 'sequence' or 'fixed'"):
        reduce_loss(x, m, one, how="mean")
    with pytest.raises(ValueError, match="length: got None with how='fixed'"):
        reduce_loss(x, m, one, how="fixed")


def test_weights_of_stale_tokens_are_data():
    proximal, mask = jnp.array([2.0, 0.0, jnp.nan]), jnp.array([1, 1, 0], bool)
    assert_array_equal(truncated_weight(proximal, jnp.zeros(3), mask, cap=5.0), [5, 1, 0])  # decoupled: [0, 1, 0]

    def total(x):
        return jnp.sum(truncated_weight(x, jnp.zeros(3), mask, cap=5.0))

    assert not jnp.any(jax.grad(total)(proximal))


def test_cispo_silences_no_token():
    """d/d log π of -sg[clip(r)]·A·log π is -clip(r)·A where PPO's clip gives 0: r 1.5 with A > 0, r .5 with A < 0."""
    ratio, a = jnp.log(jnp.array([1.5, 0.5, 1.0])), jnp.array([2.0, -2, 2])

    def total(logp, f):
        return jnp.sum(f(logp - OLD[0], logp))

    def cispo(log_ratio, logp):
        return clipped_weight_surrogate(log_ratio, logp, a, clip_low=0.2, clip_high=0.2)

    def ppo(log_ratio, logp):
        return clipped_surrogate(log_ratio, a, clip_low=0.2, clip_high=0.2)

    assert_allclose(jax.grad(total)(OLD[0] + ratio, cispo), [-1.2 * 2, 0.8 * 2, -2], rtol=1e-6)
    assert_allclose(jax.grad(total)(OLD[0] + ratio, ppo), [0, 0, -2], rtol=1e-6)
    batch = batch_of(behavior=NEW - jnp.pad(ratio[None], ((0, 1), (0, 0))), mask=MASK & jnp.array([[True], [False]]))
    metrics = recipes.cispo(clip_high=0.28)(Scored(NEW, 0 * NEW), batch)[1]
    assert float(metrics["policy/clip_frac"].value) == pytest.approx(1 / 3)  # 1.5 is over; nothing is under 1 - 1


def test_gspo_token_pushes_each_turn_by_its_own_advantage():
    """One ratio s for the sequence; d loss / d log π_t = -s·A_t / |y|. Where all A are equal it is GSPO."""
    s = np.exp((0.2 - 0.3 + 0.0) / 3)
    first = MASK & jnp.array([[True], [False]])
    each = jnp.array([[1.0, -2, 0.5], [0, 0, 0]])

    def gradient(recipe, advantages):
        batch = batch_of(mask=first, advantages=advantages)
        return jax.grad(lambda x: recipe(clip_low=0.2, clip_high=0.2)(Scored(x, 0 * x), batch)[0].total)(NEW)

    assert_allclose(gradient(recipes.gspo_token, each)[0], -s * each[0] / 3, rtol=1e-5)
    assert_array_equal(gradient(recipes.gspo_token, ADVANTAGE), gradient(recipes.gspo, ADVANTAGE))


def test_recipes_that_are_another_at_another_rate():
    """Leave-one-out is G/(G - 1) times the centred reward: RLOO is Dr. GRPO, D1's -.0202810 at A ±.5, twice at ±1."""
    assert loss_of(recipes.rloo(length=8)) == pytest.approx(2 * -0.0202810, abs=1e-6)
    assert loss_of(recipes.gigpo()) == pytest.approx(0.0828198, abs=1e-6)
    assert loss_of(recipes.reinforce_pp()) == pytest.approx(-0.1297987, abs=1e-6)


@pytest.mark.parametrize(("kind", "mean"), [("k1", (0.2 - 0.3 + 0.4 - 0.3) / 5), ("k2", 0.038), ("k3", 0.0377537)])
def test_the_kl_in_the_loss_is_the_one_asked_for(kind, mean):
    """k2: (.04 + .09 + 0 + .16 + .09) / 2 / 5. The metric is k3 whichever trains."""
    loss_fn = recipes.dapo(clip_high=0.2, kl_coef=0.5, kl_kind=kind)
    assert loss_of(loss_fn, ref_logp=OLD) == pytest.approx(-0.1297987 + 0.5 * mean, abs=1e-6)
    scored, batch = Scored(NEW, 0 * NEW), batch_of(ref_logp=OLD)
    assert float(loss_fn(scored, batch)[1]["policy/ref_kl"].value) == pytest.approx(0.0377537, abs=1e-6)
    # another β at a call; without a term the KL is measured alone, and β of no effect
    assert float(loss_fn(scored, batch, kl_coef=2.0)[0].value) == pytest.approx(-0.1297987 + 2 * mean, abs=1e-6)
    loss, metrics = recipes.dapo(clip_high=0.2)(scored, batch, kl_coef=2.0)
    assert float(loss.value) == pytest.approx(-0.1297987, abs=1e-6)
    assert float(metrics["policy/ref_kl"].value) == pytest.approx(0.0377537, abs=1e-6)


def test_the_coefficient_follows_the_kl():
    """SkyRL: .2 -> .204, the error cut at .2, an n of a tenth of the horizon; and by less where less is wrong."""
    for kl, want in ((9.0, 0.204), (0.11, 0.202), (0.1, 0.2), (0.0, 0.196)):
        assert float(adapted(jnp.float32(0.2), jnp.float32(kl), target=0.1, gain=0.1)) == pytest.approx(want)


def test_clipped_value_loss():
    """V = 1, clip .2: v 1.5 is seen as 1.2 too, and the larger error counts."""
    v, old = jnp.array([1.5, 1.5, 1.1, 0.5]), jnp.ones(4)
    returns = jnp.array([2.0, 1.0, 2.0, 2.0])
    # max(.5², .8²)/2, max(.5², .2²)/2, max(.9², .9²)/2, max(1.5², 1.2²)/2
    assert_allclose(clipped_value_loss(v, old, returns, clip=0.2), [0.32, 0.125, 0.405, 1.125], rtol=1e-6)
    assert_allclose(clipped_value_loss(v, old, returns, clip=None), [0.125, 0.125, 0.405, 1.125], rtol=1e-6)
    grad = jax.grad(lambda v: jnp.sum(clipped_value_loss(v, old, returns, clip=0.2)))(v)
    assert_allclose(grad, [0, 0.5, -0.9, -1.5], rtol=1e-5)  # the first had come too far already


def test_explained_variance():
    """R = 0, 1, 2, V = .5, 1, 1.5: errors -.5, 0, .5, variances 1/6 of 2/3: 1 - 1/4. Adds over any split."""
    returns, values = jnp.array([[0.0, 1, 2, 99]]), jnp.array([[0.5, 1, 1.5, jnp.nan]])
    mask = jnp.array([[1, 1, 1, 0]], bool)
    whole = explained_variance(values, returns, mask)
    assert float(whole.value) == pytest.approx(0.75)
    parts = [explained_variance(values[:, i : i + 2], returns[:, i : i + 2], mask[:, i : i + 2]) for i in (0, 2)]
    assert float((parts[0] + parts[1] + whole.identity()).value) == pytest.approx(0.75)
    assert float(explained_variance(returns, returns, mask).value) == 1
    assert float(explained_variance(0 * returns + 7, returns, mask).value) == pytest.approx(0, abs=1e-5)  # a bias
    assert float(explained_variance(-returns, returns, mask).value) == pytest.approx(-3)
    for equal in (0.0, 0.3):
        assert np.isnan(float(explained_variance(values, jnp.full((1, 4), equal), mask).value))
    assert np.isnan(jax.device_get(whole.identity()).value) and jax.device_get(whole).value == pytest.approx(0.75)


def test_ppo_adds_the_value_loss_over_the_same_tokens():
    """D1 by the token mean, -.1297987, + .5 · mean of ½(v - R)²: errors 1 on three tokens, 2 on two: (1.5 + 4) / 5."""
    returns = jnp.array([[1.0, 1, 1], [2, 2, 0]])
    scored, batch = Scored(NEW, 0 * NEW, jnp.zeros((2, 3))), batch_of(values=jnp.zeros((2, 3)), returns=returns)
    loss, metrics = recipes.ppo()(scored, batch)
    assert float(loss.value) == pytest.approx(-0.1297987 + 0.5 * 1.1, abs=1e-6) and float(loss.count) == 5
    assert float(metrics["value/loss"].value) == pytest.approx(1.1)
    assert float(metrics["value/return"].value) == pytest.approx(1.4) and float(metrics["value/mean"].value) == 0
    assert float(metrics["value/explained"].value) == pytest.approx(0) and float(metrics["value/clip_frac"].value) == 0
    assert float(recipes.critic()(scored, batch)[0].value) == pytest.approx(1.1)
    by_episode = recipes.critic(reduce="sequence")(scored, batch)[0]
    assert float(by_episode.value) == pytest.approx((0.5 + 2) / 2)
    far = dataclasses.replace(scored, values=jnp.full((2, 3), 0.3))
    assert float(recipes.ppo()(far, batch)[1]["value/clip_frac"].value) == 1
    with pytest.raises(ValueError, match=r'needs values, got none; make_learner\(heads=\("value_head",\)\) gives them'):
        recipes.ppo()(Scored(NEW, 0 * NEW), batch)
    with pytest.raises(ValueError, match="needs batch.returns, got None"):
        recipes.ppo()(scored, dataclasses.replace(batch, returns=None))


# --- CASES B ----------------------------------------------------------------------------------------------------------


def test_b1_split_into_micro_batches_changes_no_gradient():
    # five tokens of loss 2 and one of loss 12: 22/6, not (2 + 12)/2
    first = reduce_loss(jnp.full((1, 5), 2.0), jnp.ones((1, 5), bool), jnp.ones((1, 5), jnp.int32), how="token")
    second = reduce_loss(jnp.full((1, 1), 12.0), jnp.ones((1, 1), bool), jnp.ones((1, 1), jnp.int32), how="token")
    assert float((first + second).value) == pytest.approx(22 / 6)
    rng = np.random.default_rng(0)
    x, size = jnp.asarray(rng.normal(size=(6, 9)), jnp.float32), rng.permutation(6) + 2
    mask, segment = jnp.arange(9)[None] < size[:, None], jnp.ones((6, 9), jnp.int32)
    for how, length in (("token", None), ("sequence", None), ("fixed", 7)):

        def gradient(parts, how=how, length=length):
            def pieces(x):
                cut = zip(*(jnp.split(a, parts) for a in (x, mask, segment)), strict=True)
                return [reduce_loss(*piece, how=how, length=length) for piece in cut]

            count = sum(float(piece.count) for piece in pieces(x))
            return jax.grad(lambda x: sum(piece.total for piece in pieces(jnp.square(x))))(x) / count

        for parts in (2, 3, 6):
            assert_allclose(gradient(parts), gradient(1), rtol=1e-6)


@pytest.mark.parametrize(("how", "length"), [("token", None), ("sequence", None), ("fixed", 4)])
def test_b2_dropped_tokens_leave_the_denominator(how, length):
    x, mask, segment = jnp.full((4, 5), 2.0), jnp.zeros((4, 5), bool).at[0].set(True), jnp.ones((4, 5), jnp.int32)
    alone = reduce_loss(x[:1], mask[:1], segment[:1], how=how, length=length)
    assert float(reduce_loss(x, mask, segment, how=how, length=length).value) == float(alone.value)

    def total(x):
        return reduce_loss(x, mask & False, segment, how=how, length=length).total

    assert float(total(x)) == 0 and not jnp.any(jax.grad(total)(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("d", [-200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0])
def test_b5_kl_is_finite_with_its_gradient(d, dtype):
    for kind in ("k1", "k2", "k3"):
        for mask in (0.0, 1.0):

            def f(x, kind=kind, mask=mask):
                return mask * kl_estimate(x, jnp.zeros((), dtype), kind=kind)

            assert jnp.isfinite(f(jnp.asarray(d, dtype))) and jnp.isfinite(jax.grad(f)(jnp.asarray(d, dtype)))
    if d == -90.0:  # the reference's log-ratio is +90
        assert float(kl_estimate(jnp.asarray(d), jnp.zeros(()), kind="k3")) == 10.0
        assert float(jax.grad(lambda x: kl_estimate(x, jnp.zeros(()), kind="k3"))(jnp.asarray(d))) == 0.0


def test_b6_direction_and_choice_of_estimator():
    p, q = jnp.log(jnp.array([0.8, 0.2])), jnp.log(jnp.array([0.5, 0.5]))
    exact = float(jnp.sum(jnp.exp(p) * (p - q)))
    assert exact == pytest.approx(0.19274, abs=1e-5)
    for kind in ("k1", "k3"):
        assert float(jnp.sum(jnp.exp(p) * kl_estimate(p, q, kind=kind))) == pytest.approx(exact, abs=1e-6)
    one, other = jnp.array([-1.5, -0.5]), jnp.array([-0.5, -1.5])
    assert_allclose(kl_estimate(one, other, kind="k1"), [-1, 1])
    assert_allclose(kl_estimate(one, other, kind="k2"), [0.5, 0.5])
    assert_allclose(kl_estimate(one, other, kind="k3"), [0.71828, 0.36788], atol=1e-5)


def test_b6_a_step_on_the_kl_term_lowers_the_exact_kl():
    ref = jnp.log(jnp.array([0.5, 0.5]))

    def exact(logits):
        p = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(p) * (p - ref))

    def term(logits):  # both symbols sampled as often as the policy does, A = 0
        p = jax.nn.log_softmax(logits)
        fields = dict(mask=jnp.ones((1, 5), bool), segment=jnp.ones((1, 5), jnp.int32), advantages=jnp.zeros((1, 5)))
        tokens = jnp.array([[0, 0, 0, 0, 1]])
        batch = batch_of(behavior=jax.lax.stop_gradient(p)[tokens], ref_logp=ref[tokens], **fields)
        return recipes.grpo(kl_coef=1.0)(Scored(p[tokens], jnp.zeros((1, 5))), batch)[0].value

    start = jnp.log(jnp.array([0.8, 0.2]))
    assert exact(start - 0.1 * jax.grad(term)(start)) < exact(start)


def test_b7_ratios_at_the_extremes():
    def loss(x, a):
        return clipped_surrogate(x, a, clip_low=0.2, clip_high=0.2)

    for ratio, a, want in ((1.5, 1, -1.2), (1.5, -1, 1.5), (0.6, 1, -0.6), (0.6, -1, 0.8)):
        assert float(loss(jnp.log(ratio), jnp.float32(a))) == pytest.approx(want)
        silenced = clipped(jnp.log(ratio), jnp.float32(a), clip_low=0.2, clip_high=0.2)
        assert bool(silenced) == (jax.grad(loss)(jnp.log(ratio), jnp.float32(a)) == 0)
    assert float(loss(jnp.float32(89), jnp.float32(0))) == 0.0
    for x in (-100.0, -89.0, 89.0, 100.0):
        for a in (-1.0, 0.0, 1.0):
            assert jnp.isfinite(loss(jnp.float32(x), jnp.float32(a)))
            assert jnp.isfinite(jax.grad(loss)(jnp.float32(x), jnp.float32(a)))
    # masked slot: neither value nor gradient, whatever it holds. exp((.2 - .6) / 2) = .8187
    mask, segment = jnp.array([[1, 1, 0]], bool), jnp.ones((1, 3), jnp.int32)
    for garbage in (5.0, jnp.nan, jnp.inf):
        x = jnp.array([[0.2, -0.6, garbage]])
        assert float(jnp.exp(sequence_log_ratio(x, mask, segment))[0, 0]) == pytest.approx(0.8187, abs=1e-4)
        grad = jax.grad(lambda x: jnp.sum(jnp.exp(sequence_log_ratio(x, mask, segment)) * mask))(x)
        # token form: d s_it / d log r_it = s_i, by the token itself alone
        assert_allclose(grad, [[np.exp(-0.2), np.exp(-0.2), 0]], rtol=1e-6)


def test_gspo_equals_grpo_for_one_token_actions():
    mask = jnp.array([[1, 0, 0], [0, 1, 0]], bool)

    def gradient(f):
        return jax.value_and_grad(lambda x: f(Scored(x, 0 * x), batch_of(mask=mask))[0].total)(NEW)

    jax.tree.map(assert_array_equal, gradient(recipes.grpo()), gradient(recipes.grpo(level="sequence")))


# --- recipes under masks ----------------------------------------------------------------------------------------------

RECIPES = {
    "grpo": recipes.grpo(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0),
    "dapo": recipes.dapo(),
    "dr_grpo": recipes.dr_grpo(length=8),
    "gspo": recipes.gspo(clip_low=0.2, clip_high=0.2),
    "rloo": recipes.rloo(length=8, kl_coef=0.1, kl_kind="k1"),
    "reinforce_pp": recipes.reinforce_pp(kl_coef=0.1),
    "cispo": recipes.cispo(clip_high=0.28),
    "gigpo": recipes.gigpo(),
    "gspo_token": recipes.gspo_token(clip_low=0.2, clip_high=0.2),
    "ppo": recipes.ppo(),
    "critic": recipes.critic(),
    "ppo_decoupled": recipes.ppo_decoupled(),
    "ppo_loglinear": recipes.ppo_decoupled(proximal="loglinear"),
    "ppo_truncated": recipes.ppo_decoupled(decoupled_cap=1.1, weigh=truncated_weight),
    "sft": recipes.sft(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_garbage_off_the_mask_changes_no_bit(name):
    mask = jnp.array([[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]], bool)
    segment = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    rng = np.random.default_rng(1)
    names = ("behavior", "advantages", "proximal_logp", "ref_logp", "values", "returns")
    fields = {n: jnp.asarray(rng.normal(size=(2, 6)), jnp.float32) for n in names}
    scored = Scored(*jnp.asarray(rng.normal(size=(3, 2, 6)), jnp.float32))

    @jax.jit
    def run(fill):
        def total(scored):
            filled = {n: jnp.where(mask, x, fill) for n, x in fields.items()}
            loss, metrics = RECIPES[name](scored, batch_of(mask=mask, segment=segment, **filled))
            return loss.total, (loss.count, metrics)

        return jax.value_and_grad(total, has_aux=True)(jax.tree.map(lambda x: jnp.where(mask, x, fill), scored))

    clean = run(0.0)
    for garbage in (jnp.nan, jnp.inf, 1e30):
        dirty = run(garbage)
        jax.tree.map(assert_array_equal, clean, dirty)
        for grad in jax.tree.leaves(dirty[1]):
            assert not jnp.any(jnp.where(mask, 0, grad)), "gradient off the mask"
    assert jnp.any(clean[1].values if name == "critic" else clean[1].logp)
    assert bool(jnp.any(clean[1].values)) == (name in ("critic", "ppo"))


def test_metrics_of_a_policy_loss():
    stale = dataclasses.replace(batch_of(), staleness=jnp.array([[0, 1, 0], [2, 0, 0]]))
    metrics = recipes.grpo()(Scored(NEW, jnp.full((2, 3), 0.5)), stale)[1]
    got = {name: float(metric.value) for name, metric in metrics.items()}
    r = np.exp([0.2, -0.3, 0, 0.4, -0.3])
    assert got["policy/entropy"] == pytest.approx(0.5)
    assert got["policy/kl"] == pytest.approx(np.mean(r - 1 - np.log(r)), rel=1e-5)  # KL(behavior ‖ π), k3
    assert got["policy/clip_frac"] == pytest.approx(2 / 5)  # 1.22 where A > 0 and .74 where A < 0
    assert got["policy/ratio_max"] == pytest.approx(1.491825)
    assert got["policy/engine_gap_max"] == pytest.approx(0.3)  # |.2|, |0|, |-.3| are fresh; .4 is stale
    assert got["policy/staleness"] == pytest.approx(3 / 5) and got["policy/staleness_max"] == 2


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="this loss needs batch.ref_logp, got None; let learner.prepare fill it"):
        loss_of(recipes.grpo(kl_coef=0.1))
    with pytest.raises(ValueError, match="this loss needs batch.proximal_logp"):
        loss_of(recipes.ppo_decoupled())
    with pytest.raises(ValueError, match="proximal: got 'none', want 'forward' or 'loglinear'"):
        recipes.ppo_decoupled(proximal="none")


def test_cross_entropy():
    assert_array_equal(cross_entropy(jnp.array([-1.0, 0.0])), [1.0, 0.0])
    assert float(masked.mean(cross_entropy(NEW), MASK).value) == pytest.approx(5.4 / 5)
