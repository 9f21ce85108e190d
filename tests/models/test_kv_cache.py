"""A write lands where it was addressed or nowhere: never clamped onto another column, never on an unused lane's row."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from models.kv_cache import NewKeys, alloc, append, copy_row, gather

CONFIG = ModelConfig(vocab_size=9, d_model=4, n_layers=2, n_heads=1, n_kv_heads=1, head_dim=2, d_ff=4, key_shift=True)


def new_keys(lanes: int, width: int) -> NewKeys:
    """Value 10 · lane + column + 1, the same in every layer and channel; values negated; raw keys + 100."""
    value = 10.0 * jnp.arange(lanes)[:, None] + jnp.arange(width) + 1
    k = jnp.broadcast_to(value[None, :, None, :, None], (2, lanes, 1, width, 2))
    return NewKeys(k, -k, k + 100)


def test_append_writes_valid_columns_only():
    cache = append(alloc(CONFIG, 3, 5), new_keys(2, 3), jnp.array([2, 0]), jnp.array([0, 1]), jnp.array([2, 3]))
    want = [[0, 11, 12, 13, 0], [0, 0, 0, 0, 0], [1, 2, 0, 0, 0]]
    np.testing.assert_array_equal(cache.k[1, :, 0, :, 1], want)
    np.testing.assert_array_equal(cache.v[0, :, 0, :, 0], -np.array(want))
    np.testing.assert_array_equal(cache.last_key[0, :, 0, 0], [113, 0, 102])


def test_nothing_is_written_past_capacity_or_for_unused_lanes():
    # Seven writes into five slots: the clamping write of JAX would put the seventh on the fifth.
    cache = append(alloc(CONFIG, 2, 5), new_keys(1, 7), jnp.array([1]), jnp.array([0]), jnp.array([7]))
    np.testing.assert_array_equal(cache.k[0, 1, 0, :, 0], [1, 2, 3, 4, 5])
    after = append(cache, new_keys(2, 3), jnp.array([2, 2]), jnp.array([0, 0]), jnp.array([3, 0]))
    np.testing.assert_array_equal(after.k, cache.k)
    # A lane with nothing new keeps its last key.
    after = append(cache, new_keys(1, 3), jnp.array([1]), jnp.array([2]), jnp.array([0]))
    np.testing.assert_array_equal(after.last_key, cache.last_key)


def test_gather_and_fork():
    cache = append(alloc(CONFIG, 3, 5), new_keys(1, 3), jnp.array([0]), jnp.array([0]), jnp.array([3]))
    forked = copy_row(cache, jnp.array(0), jnp.array([2, 3]), context=3)
    near = gather(forked, jnp.array([2, 1, 3]), 4)
    assert near.k.shape == (2, 3, 1, 4, 2)
    one = gather(forked, jnp.array([2, 1, 3]), 4, 1)
    for all_layers, own in zip(near, one, strict=True):
        np.testing.assert_array_equal(all_layers[1], own)
    np.testing.assert_array_equal(near.k[0, :, 0, :, 0], [[1, 2, 3, 0], [0] * 4, [0] * 4])
    np.testing.assert_array_equal(near.last_key[1, :, 0, 0], [103, 0, 0])
    part = copy_row(cache, jnp.array(0), jnp.array([2]), context=2)
    np.testing.assert_array_equal(part.k[0, 2, 0, :, 0], [1, 2, 0, 0, 0])


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="context: got 6, want at most the capacity 5"):
        gather(alloc(CONFIG, 3, 5), jnp.array([0]), 6)
    with pytest.raises(ValueError, match="context: got 6, want at most the capacity 5"):
        copy_row(alloc(CONFIG, 3, 5), jnp.array(0), jnp.array([1]), context=6)
    with pytest.raises(ValueError, match="rows=0"):
        alloc(CONFIG, 0, 5)
    assert alloc(dataclasses.replace(CONFIG, key_shift=False), 1, 1).last_key is None
