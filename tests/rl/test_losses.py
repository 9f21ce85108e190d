"""Worked numbers of SPECS 14 and the faults of CASES B, then laws: masks, extremes, exact KL, splits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rl import masked
from rl.losses import recipes
from rl.losses.kl import kl_estimate
from rl.losses.reduce import reduce_loss
from rl.losses.supervised import cross_entropy
from rl.losses.surrogate import clipped, clipped_surrogate, decoupled_weight, sequence_log_ratio
from rl.types import TrajectoryBatch

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
    return float(loss_fn(logp, jnp.zeros_like(logp), batch_of(**fields))[0].value)


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
        return jax.grad(lambda x: f(x, 0 * x, batch_of(proximal_logp=OLD))[0].total)(NEW)

    assert_array_equal(gradient(plain), gradient(decoupled))


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
    # dual clip
    log_ratio = jnp.log(jnp.array([[0.5, 1, 10]]))
    loss = clipped_surrogate(log_ratio, jnp.array([[1.0, -1, -4]]), **clip, dual_clip=3.0)
    assert_allclose(loss, [[-0.5, 1, 12]], rtol=1e-6)
    # slime: c = 1.5
    loss = clipped_surrogate(jnp.log(jnp.array([2, 2, 0.5])), jnp.array([2.0, -2, 2]), **clip, dual_clip=1.5)
    assert_allclose(loss, [-2.4, 3, -1], rtol=1e-6)
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
        return recipes.grpo(kl_coef=1.0)(p[tokens], jnp.zeros((1, 5)), batch)[0].value

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
        return jax.value_and_grad(lambda x: f(x, 0 * x, batch_of(mask=mask))[0].total)(NEW)

    jax.tree.map(assert_array_equal, gradient(recipes.grpo()), gradient(recipes.grpo(level="sequence")))


# --- recipes under masks ----------------------------------------------------------------------------------------------

RECIPES = {
    "grpo": recipes.grpo(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0),
    "dapo": recipes.dapo(),
    "dr_grpo": recipes.dr_grpo(length=8),
    "gspo": recipes.gspo(clip_low=0.2, clip_high=0.2),
    "ppo_decoupled": recipes.ppo_decoupled(),
    "sft": recipes.sft(),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf, 1e30])
def test_garbage_off_the_mask_changes_no_bit(name, garbage):
    mask = jnp.array([[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]], bool)
    segment = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    rng = np.random.default_rng(1)
    names = ("behavior", "advantages", "proximal_logp", "ref_logp")
    fields = {n: jnp.asarray(rng.normal(size=(2, 6)), jnp.float32) for n in names}
    logp, entropy = jnp.asarray(rng.normal(size=(2, 2, 6)), jnp.float32)

    def run(fill):
        def total(logp, entropy):
            filled = {n: jnp.where(mask, x, fill) for n, x in fields.items()}
            loss, metrics = RECIPES[name](logp, entropy, batch_of(mask=mask, segment=segment, **filled))
            return loss.total, (loss.count, metrics)

        dirty = jnp.where(mask, logp, fill), jnp.where(mask, entropy, fill)
        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(*dirty)

    clean, dirty = run(0.0), run(garbage)
    jax.tree.map(assert_array_equal, clean, dirty)
    for grad in dirty[1]:
        assert not jnp.any(jnp.where(mask, 0, grad)), "gradient off the mask"
    assert jnp.any(dirty[1][0])


def test_metrics_of_a_policy_loss():
    stale = dataclasses.replace(batch_of(), staleness=jnp.array([[0, 1, 0], [2, 0, 0]]))
    metrics = recipes.grpo()(NEW, jnp.full((2, 3), 0.5), stale)[1]
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


def test_cross_entropy():
    assert_array_equal(cross_entropy(jnp.array([-1.0, 0.0])), [1.0, 0.0])
    assert float(masked.mean(cross_entropy(NEW), MASK).value) == pytest.approx(5.4 / 5)
