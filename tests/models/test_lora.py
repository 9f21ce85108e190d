"""Laws of adapters: merged equals unmerged on every path, B = 0 is the base bit for bit, and a partition loses nothing.
Worked numbers first. What the learner and the engine owe to them: tests/laws/test_lora.py.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models import generate, kv_cache, lora, transformer
from models.config import LORA_TARGETS, Lora, ModelConfig
from models.logprobs import token_logp

PLAIN = ModelConfig(vocab_size=48, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
CONFIGS = {
    "unrolled": dataclasses.replace(PLAIN, qk_norm=True, key_shift=True, init="mimetic"),
    "scanned": dataclasses.replace(PLAIN, n_layers=5, attention_bias=True, tie_embeddings=False, remat="dots"),
}
LORA = Lora(3, 12.0)


@cache
def trees(name, lora_=LORA):
    """Base, adapted with B away from 0 (so that the policy differs), merged: as `jit` makes them."""

    @jax.jit
    def make(key):
        base = transformer.init(CONFIGS[name], key)
        adapted = lora.add(base, CONFIGS[name], lora_, key)
        adapted = jax.tree_util.tree_map_with_path(
            lambda path, x: 0.2 * jax.random.normal(key, x.shape) if path[-1].key.endswith("_lora_b") else x, adapted
        )
        return base, adapted, lora.merge(adapted, lora_)

    return make(jax.random.key(0))


def row(seed=0, length=20):
    rng = np.random.default_rng(seed)
    segment = np.array([[1] * 7 + [2] * 9 + [0] * (length - 16)])
    position = np.array([[*range(7), *range(9), *[0] * (length - 16)]])
    return rng.integers(0, 48, (1, length)), segment, position


@cache
def compiled(name):
    config = CONFIGS[name]

    @jax.jit
    def score(params, tokens, segment, position):
        hidden = transformer.apply(params, config, tokens, segment, position)
        return hidden, token_logp(params, hidden, tokens, temperature=0.7)[0]

    return score


def test_worked_numbers():
    leaves = {
        "wq": jnp.array([[[1.0, 2.0], [3.0, 4.0]]]),
        "wq_lora_a": jnp.array([[[1.0], [2.0]]]),
        "wq_lora_b": jnp.array([[[3.0, 5.0]]]),
        "wq_lora_scale": jnp.array([2.0]),
    }
    # A B = [[3, 5], [6, 10]]; W' = W + 2 A B
    merged = lora.merge({"blocks": {"attention": leaves}})["blocks"]["attention"]
    assert merged.keys() == {"wq"}
    assert_array_equal(merged["wq"], [[[7.0, 12.0], [15.0, 24.0]]])
    # x A = 3, s x A = 6, s x A B = [18, 30]: with x W = [4, 6] that is x W' = [22, 36]
    layer = jax.tree.map(lambda x: x[0], leaves)
    x = jnp.array([[1.0, 1.0]])
    assert_array_equal(lora.delta(layer, "wq", x), [[18.0, 30.0]])
    assert_array_equal(x @ layer["wq"] + lora.delta(layer, "wq", x), x @ merged["wq"][0])
    assert Lora(8, 16.0).scale == 2.0


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_equals_unmerged_over_packed_rows(name):
    base, adapted, merged = trees(name)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    (_, want), (_, got), (_, other) = (compiled(name)(params, *row()) for params in (merged, adapted, base))
    assert_allclose(got, want, atol=1e-4, rtol=0)
    assert np.max(np.abs(got - other)) > 0.1  # the adapters do something


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_equals_unmerged_over_the_cache(name):
    """Greedy tokens equal and logp within 1e-4, through prefill and decode, with adapters and without."""
    config, n = CONFIGS[name], 12
    prompt = np.random.default_rng(1).integers(0, 48, (2, 6))

    @jax.jit
    def answer(params):
        lanes, six = jnp.arange(2), jnp.full(2, 5)
        cache_ = kv_cache.alloc(config, 2, 24)
        cache_, _ = generate.prefill(params, config, cache_, lanes, prompt[:, :-1], 0 * lanes, six, context=24)
        keys = jax.random.split(jax.random.key(0), 2)
        one, greedy = jnp.ones(2), jnp.ones(2, bool)
        how = {"end_ids": (), "n": n, "context": 24}
        return generate.decode_round(
            params, config, cache_, lanes, prompt[:, -1], six, keys, one, greedy, n + 0 * lanes, **how
        )[1]

    _, adapted, merged = trees(name)
    want, got = answer(merged), answer(adapted)
    assert_array_equal(got.tokens, want.tokens)
    assert_allclose(got.logp, want.logp, atol=1e-4, rtol=0)
    ids = np.concatenate([prompt, got.tokens], axis=1)
    position = np.tile(np.arange(ids.shape[1]), (2, 1))
    hidden = jax.jit(transformer.apply, static_argnums=1)(adapted, config, ids, np.ones_like(ids), position)
    assert_allclose(token_logp(adapted, hidden, jnp.asarray(ids))[0][:, 6:], got.logp, atol=1e-4, rtol=0)


def test_fresh_adapters_are_the_base_bit_for_bit():
    """What is served, and every product; a compiler may sum in another order where one more operand is fused in."""
    config, base = CONFIGS["unrolled"], trees("unrolled")[0]
    fresh = lora.add(base, config, LORA, jax.random.key(7))
    jax.tree.map(assert_array_equal, jax.jit(lora.merge)(fresh), base)
    jax.tree.map(assert_array_equal, lora.base(fresh), base)
    for part, names in (("attention", ("wq", "wk", "wv", "wo")), ("mlp", ("gate", "up", "down"))):
        for name in names:
            layer = {leaf: x[0] for leaf, x in fresh["blocks"][part].items()}
            x = jax.random.normal(jax.random.key(1), (5, np.prod(layer[f"{name}_lora_a"].shape[:-1])))
            plain = transformer._linear({name: layer[name]}, name, x)
            assert_array_equal(transformer._linear(layer, name, x), plain, err_msg=name)
    assert_allclose(compiled("unrolled")(fresh, *row())[1], compiled("unrolled")(base, *row())[1], atol=2e-6, rtol=0)


def test_a_matrix_draws_the_same_a_whatever_else_is_adapted():
    base = trees("unrolled")[0]
    key = jax.random.key(3)
    every = lora.add(base, CONFIGS["unrolled"], LORA, key)["blocks"]
    some = lora.add(base, CONFIGS["unrolled"], Lora(3, 1.0, ("down", "wv")), key)["blocks"]
    assert_array_equal(some["attention"]["wv_lora_a"], every["attention"]["wv_lora_a"])
    assert_array_equal(some["mlp"]["down_lora_a"], every["mlp"]["down_lora_a"])
    assert {n for part in some.values() if isinstance(part, dict) for n in part if "_lora_" in n} == {
        f"{name}_lora_{kind}" for name in ("wv", "down") for kind in ("a", "b", "scale")
    }
    wide = np.asarray(every["attention"]["wq_lora_a"])  # N(0, 1/32) over 2 · 32 · 3 numbers: the error of a std is 5 %
    assert np.std(wide) == pytest.approx(32**-0.5, rel=0.2)


def test_a_partition_holds_every_leaf_once():
    base, adapted, _ = trees("unrolled")
    trained, frozen = lora.partition(adapted)
    names = [path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(trained)]
    assert sorted(names) == sorted(f"{name}_lora_{kind}" for name in LORA_TARGETS for kind in "ab")
    joined = lora.combine(trained, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(adapted)
    assert all(a is b for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(adapted), strict=True))
    whole, nothing = lora.partition(base)
    assert whole is base and nothing == {} and lora.combine(whole, nothing).keys() == base.keys()
    assert lora.adapted(adapted) and not lora.adapted(base)
    assert lora.trainable(("blocks", "mlp", "up_lora_b")) and lora.trainable(("value_head", "weight"))
    assert not any(map(lora.trainable, [("blocks", "mlp", "up"), ("blocks", "mlp", "up_lora_scale"), ("lm_head",)]))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_axis_of_an_adapter_has_a_name(name):
    axes = lora.with_axes(transformer.logical_axes(CONFIGS[name]), CONFIGS[name], LORA)
    jax.tree.map(lambda x, names: np.testing.assert_equal(len(names), x.ndim), trees(name)[1], axes)
    assert axes["blocks"]["attention"]["wo_lora_a"] == ("layers", "heads", "head_dim", "rank")
    assert axes["blocks"]["attention"]["wk_lora_b"] == ("layers", "rank", "kv_heads", "head_dim")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Lora(0, 16.0), "lora.rank: got 0, want at least 1"),
        (lambda: Lora(4, 0.0), "lora.alpha: got 0.0, want a finite number above 0"),
        (lambda: Lora(4, float("inf")), "lora.alpha: got inf"),
        (lambda: Lora(4, 8.0, ()), "lora.targets: got (), want one or more of"),
        (lambda: Lora(4, 8.0, ("wq", "wq")), "each once"),
        (lambda: Lora(4, 8.0, ("q_proj",)), "lora.targets: got ('q_proj',)"),
        (lambda: lora.check(PLAIN, Lora(17, 8.0)), "lora.rank: got 17, want at most 16, the smaller side of wk"),
        (
            lambda: lora.add(trees("unrolled")[1], PLAIN, LORA, jax.random.key(0)),
            "blocks.attention.wq: has an adapter al",
        ),
        (
            lambda: lora.add(trees("unrolled")[0], dataclasses.replace(PLAIN, d_ff=40), LORA, jax.random.key(0)),
            "blocks.mlp.gate: got (2, 32, 48), want (2, 32, 40) as the config says",
        ),
        (lambda: lora.merge(trees("unrolled")[1], Lora(3, 12.0, ("wq",))), "want rank 3 on ('wq',)"),
        (lambda: lora.merge(trees("unrolled")[0], LORA), "merge: got adapters of rank {}"),
    ],
)
def test_what_cannot_be_is_named(wrong, message):
    with pytest.raises(ValueError) as err:
        wrong()
    assert message in str(err.value), err.value
