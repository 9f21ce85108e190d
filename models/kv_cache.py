"""The engine's memory: contiguous rows of keys and values, one row per resident session.

Convention: a session's last id is *not* in the cache. A turn prefills all new ids but the last; decoding starts by
feeding that one. So a session is its ids, its row, and `length`, the number of its ids whose keys and values are here.
Nothing is ever overwritten silently: writes outside [0, rows) × [0, capacity) are dropped, and the readers in
`generate` refuse lanes that would need one.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values by layer, row, head and position; with a key shift each row's last unshifted key.

    Positions stand next to each other within a head: attention reads them so, and a row's are copied in long runs.
    """

    k: Float[Array, "L R K C H"]
    v: Float[Array, "L R K C H"]
    last_key: Float[Array, "L R K H"] | None

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Most ids a row can hold; no session has more, the one outside the cache included."""
        return self.k.shape[3]


class NewKeys(NamedTuple):
    """What one forward pass adds to the cache: keys and values of the tokens it was fed, heads before tokens."""

    k: Float[Array, "L B K t H"]
    v: Float[Array, "L B K t H"]
    raw_key: Float[Array, "L B K t H"] | None  # before the key shift; None without one


def alloc(config: ModelConfig, rows: int, capacity: int) -> KVCache:
    """An empty cache in the compute dtype: 2 · L · rows · capacity · K · H values."""
    if rows < 1 or capacity < 1:
        raise ValueError(f"cache: got rows={rows}, capacity={capacity}, want at least 1 of each")
    shape = (config.n_layers, rows, config.n_kv_heads, capacity, config.head_dim)
    k, v = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
    last = jnp.zeros((*shape[:3], shape[4]), config.dtype) if config.key_shift else None
    return KVCache(k, v, last)


class Columns(NamedTuple):
    """Some rows' first columns, of one layer or of all."""

    k: Float[Array, "*L S K c H"]
    v: Float[Array, "*L S K c H"]
    last_key: Float[Array, "*L S K H"] | None


def gather(cache: KVCache, rows: Int[Array, "S"], context: int, layer: int | None = None) -> Columns:
    """A compact copy of columns [0, context) of some rows, of one layer or of all; a row index outside the cache reads
    zeros.
    """
    if context > cache.capacity:
        raise ValueError(f"context: got {context}, want at most the capacity {cache.capacity}")
    which = slice(None) if layer is None else layer
    k, v = (x.at[which, rows, :, :context].get(mode="fill", fill_value=0) for x in (cache.k, cache.v))
    last = cache.last_key
    return Columns(k, v, None if last is None else last.at[which, rows].get(mode="fill", fill_value=0))


def append(
    cache: KVCache, new: NewKeys, rows: Int[Array, "B"], start: Int[Array, "B"], n_new: Int[Array, "B"]
) -> KVCache:
    """Write the first n_new[b] of the new columns of lane b to row rows[b] at start[b], ...; the others are dropped.

    Rows of different lanes must differ. A lane with row index `cache.rows` (an unused lane) writes nothing.
    """
    width = new.k.shape[3]
    offset = jnp.arange(width)
    column = jnp.where(offset < n_new[:, None], start[:, None] + offset, cache.capacity)
    # `drop` covers unused lanes and dropped columns alike, but wraps negative indices: none can occur here.
    k = cache.k.at[:, rows[:, None], :, column].set(new.k.transpose(1, 3, 0, 2, 4), mode="drop")
    v = cache.v.at[:, rows[:, None], :, column].set(new.v.transpose(1, 3, 0, 2, 4), mode="drop")
    if cache.last_key is None:
        return KVCache(k, v, None)
    last = jnp.take_along_axis(new.raw_key, jnp.maximum(n_new - 1, 0)[None, :, None, None, None], axis=3)[:, :, :, 0]
    target = jnp.where(n_new > 0, rows, cache.rows)
    return KVCache(k, v, cache.last_key.at[:, target].set(last, mode="drop"))


def copy_row(cache: KVCache, source: Int[Array, ""], targets: Int[Array, "S"], *, context: int) -> KVCache:
    """Fork: the first `context` columns of one row, copied to others. A target index of `cache.rows` is dropped."""
    if context > cache.capacity:
        raise ValueError(f"context: got {context}, want at most the capacity {cache.capacity}")

    def spread(x: Float[Array, "L R K C H"]) -> Float[Array, "L R K C H"]:
        row = x[:, source, :, :context][:, None]
        row = jnp.broadcast_to(row, (row.shape[0], len(targets), *row.shape[2:]))
        return x.at[:, targets, :, :context].set(row, mode="drop")

    last = cache.last_key
    if last is not None:
        row = jnp.broadcast_to(last[:, source][:, None], (last.shape[0], len(targets), *last.shape[2:]))
        last = last.at[:, targets].set(row, mode="drop")
    return KVCache(spread(cache.k), spread(cache.v), last)
