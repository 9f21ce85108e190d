"""A drawn token's log-probability is that of the distribution that it was drawn from; lanes draw independently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from models.sampling import Cut, Sampling, sample

LOGITS = jnp.tile(jnp.array([3.0, 1.0, 0.0]), (4000, 1))


def lanes(n: int, temperature: float = 1.0, greedy: bool = False) -> tuple:
    return jax.random.split(jax.random.key(0), n), jnp.full(n, temperature), jnp.full(n, greedy)


@pytest.mark.parametrize("temperature", [0.3, 0.5, 0.7, 1.0, 1.5])
def test_frequencies_and_logp_follow_the_temperature(temperature):
    token, logp = sample(LOGITS, *lanes(4000, temperature))
    want = jax.nn.log_softmax(LOGITS[0] / temperature)
    np.testing.assert_allclose(logp, want[token], atol=1e-6)
    # 4 standard errors of a share of 4000 draws are at most 4 · √(.25/4000) = .032.
    np.testing.assert_allclose(np.bincount(token, minlength=3) / 4000, jnp.exp(want), atol=0.032)


def test_greedy_takes_the_likeliest_with_logp_at_the_temperature_given():
    token, logp = sample(LOGITS[:2], *lanes(2, 0.5, greedy=True))
    assert token.tolist() == [0, 0]
    np.testing.assert_allclose(logp, -0.0206, atol=5e-5)


def reference(logits, temperature, top_k, top_p, min_p):
    """log-probabilities of the truncated distribution in float64, and the least margin of a token's top-p or min-p."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))[: top_k or len(p)]
    ranked, kept, margins, before = p[order] / p[order].sum(), [], [1.0], 0.0
    for token, share in zip(order, ranked, strict=True):
        ratio = p[token] / p.max()
        if top_p == 1.0 or before < top_p:
            margins.append(abs(ratio - min_p) if token != order[0] else 1.0)
            kept += [token] if ratio >= min_p else []
        margins.append(abs(before - top_p) if top_p < 1.0 else 1.0)
        before += share
    logp = np.full(len(p), -np.inf)
    logp[kept] = np.log(p[kept] / p[kept].sum())
    return logp, min(margins)


def cut(n, top_k=0, top_p=1.0, min_p=0.0):
    return Cut(jnp.full(n, top_k), jnp.full(n, top_p), jnp.full(n, min_p))


truncations = given(
    # A grid of few values: ties are common.
    logits=st.lists(st.integers(-6, 6), min_size=2, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 12, 1000]),
    top_p=st.one_of(st.just(1.0), st.just(1e-9), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.01, 0.9)),
)
draw = jax.jit(sample)


@truncations
def test_truncated_lanes_draw_from_the_reference_with_its_logp(logits, temperature, top_k, top_p, min_p):
    n, size = 2000, 12
    # Padded to one shape with tokens that cannot be drawn.
    z = np.pad(np.array(logits, np.float32) / 2, (0, size - len(logits)), constant_values=-np.inf)
    want, margin = reference(z[: len(logits)].astype(np.float64), temperature, top_k, top_p, min_p)
    assume(margin > 1e-5)  # a boundary that rounding decides has no right side
    token, logp = draw(jnp.tile(z, (n, 1)), *lanes(n, temperature), cut(n, top_k, top_p, min_p))
    assert set(token.tolist()) <= set(np.flatnonzero(np.isfinite(want)).tolist())
    np.testing.assert_allclose(logp, want[token], atol=2e-6)
    # 5 standard errors of a share of 2000 draws are at most 5 · √(.25/2000) = .056.
    np.testing.assert_allclose(np.bincount(token, minlength=len(want)) / n, np.exp(want), atol=0.056)


@truncations
def test_a_truncated_neighbour_changes_no_lane(logits, temperature, top_k, top_p, min_p):
    z = jnp.tile(jnp.pad(jnp.array(logits, jnp.float32), (0, 12 - len(logits)), constant_values=-9.0), (64, 1))
    every_other = jnp.arange(64) % 2 == 0
    mixed = jax.tree.map(lambda on, off: jnp.where(every_other, on, off), cut(64, top_k, top_p, min_p), cut(64))
    token, logp = draw(z, *lanes(64, temperature), mixed)
    free, free_logp = draw(z, *lanes(64, temperature))
    assert (token == free)[~every_other].all()
    np.testing.assert_allclose(logp[~every_other], free_logp[~every_other], atol=1e-6)


def test_worked_truncations():
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.4, 0.3, 0.2])), (2000, 1))

    def drawn(**how):
        token, logp = sample(logits, *lanes(2000), cut(2000, **how))
        return {int(t): round(float(jnp.exp(x)), 4) for t, x in zip(token, logp, strict=True)}

    assert drawn(top_k=2) == drawn(top_p=0.65) == {1: 0.5714, 2: 0.4286}  # .4 + .3 reach .65; .4/.7, .3/.7
    assert drawn(top_p=1e-6) == {1: 1.0}  # at least one
    assert drawn(min_p=0.45) == {1: 0.4444, 2: 0.3333, 3: 0.2222}  # .45 · .4 = .18 <= .2; .4/.9, .3/.9, .2/.9
    assert drawn(min_p=0.45, top_k=2) == {1: 0.5714, 2: 0.4286}
    assert drawn(min_p=1.0) == {1: 1.0}
    # top-p counts shares of what top-k left: .4/.7 = .571 reach .55, while .4 alone would not.
    assert drawn(top_k=2, top_p=0.55) == {1: 1.0}
    assert drawn() == drawn(top_k=99) == {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}


def test_a_greedy_lane_is_greedy_whatever_is_cut():
    token, logp = sample(LOGITS[:2], *lanes(2, 0.5, greedy=True), cut(2, top_k=1, min_p=0.5))
    assert token.tolist() == [0, 0]
    np.testing.assert_allclose(logp, -0.0206, atol=5e-5)


@pytest.mark.parametrize(
    "bad", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}]
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


def test_truncation_is_visible():
    assert Sampling(top_k=5).truncated and Sampling(top_p=0.9).truncated and Sampling(min_p=0.1).truncated
    assert not Sampling().truncated and not Sampling(top_k=5, greedy=True).truncated
