"""A packed row computes what its segments compute alone, on every path of the decoder; padding is harmless."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from models.attention import attend
from models.config import ModelConfig
from models.logprobs import token_logp
from tests.models.weights import drawn

TINY = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
VARIANTS = {
    "llama": TINY,
    "qwen2": dataclasses.replace(TINY, attention_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(TINY, qk_norm=True, n_heads=2, head_dim=16),
    "quickstart": dataclasses.replace(TINY, qk_norm=True, key_shift=True, init="mimetic", n_kv_heads=4),
    "scanned": dataclasses.replace(TINY, n_layers=5, key_shift=True),
}


apply = jax.jit(transformer.apply, static_argnums=1)


def packed_row(lengths: tuple[int, ...], total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 40, (1, total))
    segment, position = np.zeros((1, total), int), np.zeros((1, total), int)
    begin = 0
    for i, length in enumerate(lengths, start=1):
        segment[0, begin : begin + length], position[0, begin : begin + length] = i, np.arange(length)
        begin += length
    return tokens, segment, position


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_and_its_gradient_equal_the_plain_formula(groups):
    length, segment = 150, jnp.array([[1] * 70 + [2] * 71 + [0] * 9, [0] * 150])
    keys = jax.random.split(jax.random.key(3), 4)
    q, weight = (jax.random.normal(k, (2, length, 2 * groups, 4)) for k in keys[:2])
    k, v = (jax.random.normal(key, (2, length, 2, 4)) for key in keys[2:])

    def plain(q, k, v):
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 2.0
        seen = jnp.tril(jnp.ones((length, length), bool)) & (segment[:, :, None] == segment[:, None])
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30)), v)

    got = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(weight * attend(*x, segment)), argnums=(0, 1, 2)))(q, k, v)
    want = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(weight * plain(*x)), argnums=(0, 1, 2)))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("name", VARIANTS)
def test_three_segments_a_row_equal_three_rows(name):
    config, params = VARIANTS[name], drawn(VARIANTS[name])
    lengths = (5, 1, 9)
    tokens, segment, position = packed_row(lengths, 18)
    packed = apply(params, config, tokens, segment, position)
    # Alone, in rows of the same length: right padding only.
    rows, begin = np.zeros((3, 18), int), 0
    alone = np.zeros((3, 18), int)
    for i, length in enumerate(lengths):
        rows[i, :length], alone[i, :length] = tokens[0, begin : begin + length], 1
        begin += length
    single = apply(params, config, rows, alone, np.tile(np.arange(18), (3, 1)))
    begin = 0
    for i, length in enumerate(lengths):
        np.testing.assert_allclose(packed[0, begin : begin + length], single[i, :length], rtol=1e-5, atol=1e-5)
        begin += length


@pytest.mark.parametrize("name", ["qwen2", "quickstart"])
def test_a_padded_row_is_finite_and_changes_no_gradient(name):
    config, params = VARIANTS[name], drawn(VARIANTS[name])
    tokens, segment, position = packed_row((5, 8), 16)

    def loss(params, tokens, segment, position):
        logp, entropy = token_logp(params, transformer.apply(params, config, tokens, segment, position), tokens)
        return jnp.sum(jnp.where(segment > 0, logp + entropy, 0.0))

    grad = jax.jit(jax.value_and_grad(loss))
    want = grad(params, tokens, segment, position)
    two = [
        np.concatenate([x, filler])
        for x, filler in zip(
            (tokens, segment, position),
            (np.full((1, 16), 7), np.zeros((1, 16), int), np.zeros((1, 16), int)),
            strict=True,
        )
    ]
    got = grad(params, *two)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_key_shift_stays_inside_its_segment_and_matters():
    config, params = VARIANTS["quickstart"], drawn(VARIANTS["quickstart"])
    tokens, segment, position = packed_row((4, 4), 8)
    hidden = apply(params, config, tokens, segment, position)
    changed = tokens.copy()
    changed[0, 3] = (changed[0, 3] + 1) % 40
    other = apply(params, config, changed, segment, position)
    assert (hidden[0, 4:] == other[0, 4:]).all()
    plain = apply(params, dataclasses.replace(config, key_shift=False), tokens, segment, position)
    assert not np.allclose(hidden[0, 1:4], plain[0, 1:4], atol=1e-2)


@pytest.mark.parametrize(("remat", "layers"), [("full", 2), ("dots", 5)])
def test_rematerialisation_changes_no_number(remat, layers):
    config = dataclasses.replace(VARIANTS["quickstart"], n_layers=layers)
    params = drawn(config)
    inputs = packed_row((5, 8), 16)

    def grad(config):
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(transformer.apply(p, config, *inputs)))))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        grad(config),
        grad(dataclasses.replace(config, remat=remat)),
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_names_every_axis(name):
    config = VARIANTS[name]
    shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    axes = transformer.logical_axes(config)
    counts = jax.tree.map(lambda leaf, names: len(names) == leaf.ndim, shapes, axes)
    assert all(jax.tree.leaves(counts)), axes


def test_mimetic_layers_copy_what_they_attend_to_and_key_shift_starts_split():
    config = dataclasses.replace(VARIANTS["quickstart"], n_heads=4, n_kv_heads=4, head_dim=8)
    attention = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))["blocks"]["attention"]
    values_out = np.einsum("ldkh,lkhe->lde", attention["wv"], attention["wo"])
    np.testing.assert_allclose(values_out, np.tile(0.7 * np.eye(32), (2, 1, 1)), atol=1e-5)
    np.testing.assert_allclose(jax.nn.sigmoid(attention["key_shift"])[0, :, 0], [0.92, 0.92, 0.08, 0.08], rtol=1e-5)
    assert (attention["q_norm"] == 2).all() and (attention["k_norm"] == 1).all()


def test_bfloat16_computes_near_float32_from_the_same_masters():
    config, params = TINY, drawn(TINY)
    inputs = packed_row((5, 8), 16)
    exact = apply(params, config, *inputs)
    short = apply(params, dataclasses.replace(config, dtype="bfloat16"), *inputs)
    assert short.dtype == jnp.bfloat16
    np.testing.assert_allclose(short.astype(jnp.float32)[0, :13], exact[0, :13], atol=0.15)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="n_kv_heads to divide n_heads"):
        dataclasses.replace(TINY, n_kv_heads=3)
    with pytest.raises(ValueError, match="remat: got 'some', want one of"):
        dataclasses.replace(TINY, remat="some")
