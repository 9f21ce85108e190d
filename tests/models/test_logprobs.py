"""logp[b, t] scores targets[b, t] from hidden[b, t-1] under the full softmax at the temperature, in any chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.logprobs import token_logp

IDENTITY = {"embed": jnp.eye(3)}  # tied head: logits = hidden


def test_worked_number_temperature_before_the_softmax():
    hidden = jnp.array([[[3.0, 1.0, 0.0], [9.0, 9.0, 9.0]]])
    logp, entropy = token_logp(IDENTITY, hidden, jnp.array([[2, 0]]), temperature=0.5)
    # z / T = 6, 2, 0: log Z = 6 + log(1 + e^-4 + e^-6) = 6.0206, so logp of token 0 is -.0206; the first position is 0.
    np.testing.assert_allclose(logp, [[0.0, -0.0206]], atol=5e-5)
    probs = np.exp(np.array([6.0, 2.0, 0.0]) - 6.0206)
    np.testing.assert_allclose(entropy, [[0.0, -(probs * np.log(probs)).sum()]], atol=1e-4)


def test_successor_model_scores_its_sequence_with_zero():
    tokens = jnp.array([[3, 4, 5, 6]])
    hidden = 1e4 * jax.nn.one_hot((tokens + 1) % 8, 8)  # all mass on x + 1
    logp, entropy = token_logp({"embed": jnp.eye(8)}, hidden, tokens)
    assert (logp == 0).all() and (entropy == 0).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 5, 10])
def test_chunks_change_neither_values_nor_gradients(tied, chunk):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (2, 11, 6))
    head = {} if tied else {"lm_head": jax.random.normal(keys[3], (6, 20))}
    params = {"embed": jax.random.normal(keys[1], (20, 6))} | head
    targets = jax.random.randint(keys[2], (2, 11), 0, 20)

    def loss(params, hidden, chunk):
        logp, entropy = token_logp(params, hidden, targets, temperature=1.5, chunk=chunk)
        return jnp.sum(jnp.sin(logp) + entropy**2), (logp, entropy)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    got, want = grad(params, hidden, chunk), grad(params, hidden, 100)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_no_array_of_all_logits_exists():
    jaxpr = str(
        jax.make_jaxpr(
            jax.grad(lambda h: token_logp({"embed": jnp.ones((17, 4))}, h, jnp.zeros((2, 33), int), chunk=8)[0].sum())
        )(jnp.ones((2, 33, 4)))
    )
    assert "2,8,17]" in jaxpr
    assert "2,32,17]" not in jaxpr and "4,2,8,17]" not in jaxpr


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="want \\(1, 2\\)"):
        token_logp(IDENTITY, jnp.ones((1, 2, 3)), jnp.zeros((1, 3), int))
    with pytest.raises(ValueError, match="chunk: got 0"):
        token_logp(IDENTITY, jnp.ones((1, 2, 3)), jnp.zeros((1, 2), int), chunk=0)
