"""Decoding with the cache computes what one uncached pass computes, whatever the chunks, rounds and neighbours."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import generate, transformer
from models.config import LayerSpec, ModelConfig, RopeScaling
from models.kv_cache import alloc
from models.logprobs import token_logp
from tests.models.weights import drawn

PLAIN = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
SHIFTED = dataclasses.replace(PLAIN, key_shift=True, qk_norm=True, init="mimetic")
SCANNED = dataclasses.replace(SHIFTED, n_layers=5)
WINDOWED = dataclasses.replace(
    SCANNED,
    layers=tuple(LayerSpec(window) for window in (3, None, 9, None, 1)),
    rope_scaling=RopeScaling("yarn", 4.0, original_length=16),
)
CAPACITY = 32
CONFIGS = pytest.mark.parametrize(
    "config", [PLAIN, SHIFTED, SCANNED, WINDOWED], ids=["plain", "shifted", "scanned", "windowed"]
)

prefill = jax.jit(generate.prefill, static_argnames=("config", "context"))
decode_round = jax.jit(generate.decode_round, static_argnames=("config", "end_ids", "n", "context"))


@partial(jax.jit, static_argnums=1)
def uncached(params, config, tokens):
    """Scores of a row of up to CAPACITY ids at temperatures .5, 1, 1.5, and the hidden states."""
    segment = jnp.ones_like(tokens)
    hidden = transformer.apply(params, config, tokens, segment, jnp.arange(tokens.shape[1])[None])
    return hidden, [token_logp(params, hidden, tokens, temperature=t)[0] for t in (0.5, 1.0, 1.5)]


def score(params, config, ids):
    padded = jnp.array([list(ids) + [0] * (CAPACITY - len(ids))])  # right padding is invisible to a causal model
    hidden, logp = uncached(params, config, padded)
    return np.asarray(hidden)[0], [np.asarray(x)[0] for x in logp]


def lanes(count: int, /, **changes) -> dict:
    return {
        "keys": jax.random.split(jax.random.key(5), count),
        "temperature": jnp.ones(count),
        "greedy": jnp.zeros(count, bool),
        "remaining": jnp.full(count, 100),
        "end_ids": (),
        "n": 4,
        "context": CAPACITY,
    } | changes


def fill(params, config, cache, rows, prompts, context=CAPACITY, width=8):
    """Prefill prompts of up to `width` tokens into empty rows."""
    tokens = np.zeros((len(rows), width), int)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    n_new = jnp.array([len(p) for p in prompts])
    return prefill(params, config, cache, jnp.array(rows), tokens, jnp.zeros(len(rows), int), n_new, context=context)


@CONFIGS
def test_chunked_prefill_equals_one_uncached_pass(config):
    params = drawn(config)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 40, (2, 24))
    want = [score(params, config, row)[0] for row in ids]
    for _ in range(4):
        cache, starts, rows = alloc(config, 4, CAPACITY), np.zeros(3, int), jnp.array([3, 1, 4])  # 4: no lane
        while starts[:2].min() < 24:
            n_new = np.minimum(rng.integers(0, 9, 3), [24, 24, 8] - starts)
            tokens = np.zeros((3, 8), int)
            for lane in range(2):
                tokens[lane, : n_new[lane]] = ids[lane, starts[lane] : starts[lane] + n_new[lane]]
            cache, hidden = prefill(params, config, cache, rows, tokens, starts, n_new, context=CAPACITY)
            starts[:2] += n_new[:2]
            for lane in range(2):
                if n_new[lane]:
                    np.testing.assert_allclose(hidden[lane], want[lane][starts[lane] - 1], rtol=1e-4, atol=2e-5)
        assert float(abs(cache.k[:, [0, 2]]).max()) == 0  # rows of nobody stay empty


@CONFIGS
def test_sampled_logp_equals_the_learners_at_each_temperature(config):
    """CASES D1: rounds with a forced continuation between them, as a turn and an observation are."""
    params = drawn(config)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    ids = [list(p) for p in prompts]
    cache, _ = fill(params, config, alloc(config, 5, CAPACITY), [4, 0, 2], [p[:-1] for p in prompts])
    rows, temperature, got = jnp.array([4, 0, 2]), jnp.array([0.5, 1.0, 1.5]), [{}, {}, {}]
    for _ in range(2):
        cache, out = decode_round(
            params,
            config,
            cache,
            rows,
            jnp.array([x[-1] for x in ids]),
            jnp.array([len(x) - 1 for x in ids]),
            **lanes(3, temperature=temperature),
        )
        for lane in range(3):
            assert out.n_done[lane] == 4
            got[lane] |= {len(ids[lane]) + i: out.logp[lane, i] for i in range(4)}
            ids[lane] += out.tokens[lane].tolist()
        # The world answers 3 ids: a turn prefills the unread sampled id and all but the last new one.
        answer = [[20, 21, 22], [23, 24, 25], [26, 27, 28]]
        chunk = np.array([[x[-1], *a[:-1]] for x, a in zip(ids, answer, strict=True)])
        cache, _ = prefill(
            params,
            config,
            cache,
            rows,
            np.pad(chunk, ((0, 0), (0, 5))),
            jnp.array([len(x) - 1 for x in ids]),
            jnp.full(3, 3),
            context=CAPACITY,
        )
        ids = [x + a for x, a in zip(ids, answer, strict=True)]
    for lane in range(3):
        want = score(params, config, ids[lane])[1][lane]
        np.testing.assert_allclose(list(got[lane].values()), want[list(got[lane])], atol=1e-4)


def test_tokens_depend_on_neither_neighbours_nor_rounds_nor_lane():
    params = drawn(SHIFTED)
    keys = jax.random.split(jax.random.key(5), 3)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 1]]

    def run(order, n, rounds):
        chosen = [prompts[i] for i in order]
        cache, _ = fill(params, SHIFTED, alloc(SHIFTED, 5, CAPACITY), [1, 0, 3], [p[:-1] for p in chosen])
        ids = [list(p) for p in chosen]
        logp = [[] for _ in order]
        for _ in range(rounds):
            last, lengths = jnp.array([x[-1] for x in ids]), jnp.array([len(x) - 1 for x in ids])
            settings = lanes(3, keys=keys[jnp.array(order)], n=n)
            cache, out = decode_round(params, SHIFTED, cache, jnp.array([1, 0, 3]), last, lengths, **settings)
            for i, x in enumerate(ids):
                x += out.tokens[i].tolist()
                logp[i] += out.logp[i].tolist()
        return {i: (ids[lane], logp[lane]) for lane, i in enumerate(order)}

    base, moved = run([0, 1, 2], 4, 2), run([2, 1, 0], 4, 2)
    assert base == moved  # bit for bit: the same shapes
    assert run([0, 0, 0], 4, 2)[0] == base[0]
    longer = run([0, 1, 2], 8, 1)
    for i in range(3):
        assert longer[i][0] == base[i][0]
        np.testing.assert_allclose(longer[i][1], base[i][1], atol=1e-5)


def test_a_group_draws_different_tokens_from_flat_logits():
    """CASES D3: eight members, one prompt, a uniform policy. 20 tokens of 40: two equal members have chance 40^-20."""
    params = jax.tree.map(jnp.zeros_like, drawn(PLAIN))
    _, out = decode_round(
        params,
        PLAIN,
        alloc(PLAIN, 8, CAPACITY),
        jnp.arange(8),
        jnp.ones(8, int),
        jnp.zeros(8, int),
        **lanes(8, n=20, context=0),
    )
    assert len({tuple(row) for row in out.tokens.tolist()}) == 8
    np.testing.assert_allclose(out.logp, -np.log(40), rtol=1e-5)


def test_greedy_lanes_follow_the_uncached_argmax_and_stop_where_told():
    config = dataclasses.replace(PLAIN, tie_embeddings=False)
    # Small random layers repeat one token for ever; large ones wander.
    params = jax.tree.map(lambda x: 4 * x, drawn(config))
    ids = [3, 1, 4]
    for _ in range(6):
        hidden = score(params, config, ids)[0][len(ids) - 1]
        ids.append(int(np.argmax(hidden @ params["lm_head"])))
    want = ids[3:]
    assert want[2] not in want[:2]
    cache, _ = fill(params, config, alloc(config, 4, CAPACITY), [0, 1, 2], [[3, 1]] * 3)
    _, out = decode_round(
        params,
        config,
        cache,
        jnp.array([0, 1, 4]),
        jnp.array([4, 4, 4]),
        jnp.array([2, 2, 2]),
        **lanes(3, greedy=jnp.ones(3, bool), remaining=jnp.array([100, 1, 0]), n=6, end_ids=(want[2], 99)),
    )
    assert out.n_done.tolist() == [3, 1, 0]
    assert out.tokens.tolist() == [want[:3] + [0] * 3, want[:1] + [0] * 5, [0] * 6]
    assert not out.logp[0, 3:].any() and not out.logp[2].any()


@pytest.mark.parametrize("prompt", [27, 28, 29])
def test_a_full_cache_ends_the_lane_and_overwrites_nothing(prompt):
    """CASES D7: prompt + 4 = capacity - 1, capacity, capacity + 1."""
    params = drawn(SHIFTED)
    ids = np.random.default_rng(2).integers(0, 40, prompt).tolist()
    cache = alloc(SHIFTED, 2, CAPACITY)
    cache, _ = fill(params, SHIFTED, cache, [1], [ids[:-1]], width=28)
    before = cache
    cache, out = decode_round(
        params, SHIFTED, cache, jnp.array([1]), jnp.array([ids[-1]]), jnp.array([prompt - 1]), **lanes(1)
    )
    done = int(out.n_done[0])
    assert done == min(4, CAPACITY - prompt)
    assert (cache.k[..., : prompt - 1, :] == before.k[..., : prompt - 1, :]).all()
    ids += out.tokens[0, :done].tolist()
    np.testing.assert_allclose(out.logp[0, :done], score(params, SHIFTED, ids)[1][1][prompt : prompt + done], atol=1e-4)
    if len(ids) == CAPACITY:
        full, again = decode_round(
            params, SHIFTED, cache, jnp.array([1]), jnp.array([ids[-1]]), jnp.array([len(ids) - 1]), **lanes(1)
        )
        assert again.n_done[0] == 0 and (full.k == cache.k).all()


def test_a_broken_precondition_gives_nan_and_writes_nothing():
    params = drawn(PLAIN)
    cache = alloc(PLAIN, 2, 8)
    # Lane 0 would write columns 6..8 of 8; lane 1 has more cached columns than are read.
    tokens, start, n_new = jnp.ones((2, 4), int), jnp.array([6, 7]), jnp.array([3, 1])
    after, hidden = prefill(params, PLAIN, cache, jnp.array([0, 1]), tokens, start, n_new, context=6)
    assert np.isnan(hidden).all() and not after.k.any()
    after, out = decode_round(
        params, PLAIN, cache, jnp.array([0, 1]), jnp.array([1, 1]), jnp.array([5, 3]), **lanes(2, context=4)
    )
    assert out.n_done.tolist() == [0, 4] and np.isnan(out.logp[0]).all() and np.isfinite(out.logp[1]).all()
    assert not after.k[:, 0].any()
