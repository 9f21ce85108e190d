"""A drawn token's log-probability is that of the full softmax at its lane's temperature; lanes draw independently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import Sampling, sample

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


def test_top_k_and_top_p_cut_the_draw_and_not_the_logp():
    logits = jnp.tile(jnp.log(jnp.array([0.1, 0.4, 0.3, 0.2])), (2000, 1))
    keys, temperature, greedy = lanes(2000)
    none, everything = jnp.zeros(2000, int), jnp.ones(2000)
    token, logp = sample(logits, keys, temperature, greedy, jnp.full(2000, 2), everything)
    assert set(token.tolist()) == {1, 2}
    np.testing.assert_allclose(logp, logits[0][token], atol=1e-6)
    token, _ = sample(logits, keys, temperature, greedy, none, jnp.full(2000, 0.65))  # .4 + .3 reach .65
    assert set(token.tolist()) == {1, 2}
    token, _ = sample(logits, keys, temperature, greedy, none, jnp.full(2000, 1e-6))  # at least one
    assert set(token.tolist()) == {1}
    same, _ = sample(logits, keys, temperature, greedy, none, everything)
    assert (same == sample(logits, keys, temperature, greedy)[0]).all()


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


def test_truncation_is_visible():
    assert Sampling(top_k=5).truncated and Sampling(top_p=0.9).truncated
    assert not Sampling().truncated and not Sampling(top_k=5, greedy=True).truncated
