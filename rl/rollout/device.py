"""What the engine's thread runs on its device: three compiled programs over one KV cache. Everything crosses here,
explicitly.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, UInt32

from models import generate, kv_cache
from models.config import ModelConfig
from models.constraint import Constraint
from models.sampling import Cut
from models.sharding import RULES, dispatching, replicated

END_IDS = 16  # ids watched for on the device; further ones are found on the host, after the round


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What is compiled for: R residents of `capacity` ids, S lanes of `round_tokens` tokens, prefill batches of
    `prefill_rows` rows of `prefill_chunk` tokens, attention over `contexts` columns.
    """

    lanes: int
    residents: int
    capacity: int
    round_tokens: int
    prefill_rows: int
    prefill_chunk: int
    contexts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= self.residents or min(dataclasses.astuple(self)[3:6]) < 1 or self.capacity < 2:
            raise ValueError(f"Engine: got {self}, want 1 <= lanes <= residents, capacity >= 2 and positive shapes")
        rising = list(self.contexts) == sorted(set(self.contexts))
        if not rising or self.contexts[-1] != self.capacity or self.contexts[0] < 1:
            raise ValueError(
                f"Engine: got contexts={self.contexts}, want rising widths that end at capacity={self.capacity}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lanes:
    """What each lane of one decode round does, as NumPy arrays."""

    rows: Int[np.ndarray, "S"]  # cache row; one beyond the last for an idle lane
    last: Int[np.ndarray, "S"]  # the last id, whose KV is not in the cache yet
    lengths: Int[np.ndarray, "S"]  # ids in the cache
    remaining: Int[np.ndarray, "S"]  # tokens to sample at most; 0 for an idle lane
    keys: UInt32[np.ndarray, "S 2"]
    temperature: Float[np.ndarray, "S"]
    greedy: Bool[np.ndarray, "S"]
    top_k: Int[np.ndarray, "S"]
    top_p: Float[np.ndarray, "S"]
    min_p: Float[np.ndarray, "S"]
    end_ids: Int[np.ndarray, "S E"]  # sampling one of its own ends a lane; the places beyond them are -1
    state: Int[np.ndarray, "S"]  # in the round's constraint; unread without one
    # Lane of the round before, not read yet, whose last id and state this lane goes on from (it does nothing where that
    # one is at its end); -1 where `last`, `remaining` and `state` are known here.
    after: Int[np.ndarray, "S"]

    @staticmethod
    def idle(lanes: int, *, no_row: int) -> "Lanes":
        """All lanes idle."""
        return Lanes(
            rows=np.full(lanes, no_row, np.int32),
            last=np.zeros(lanes, np.int32),
            lengths=np.zeros(lanes, np.int32),
            remaining=np.zeros(lanes, np.int32),
            keys=np.zeros((lanes, 2), np.uint32),
            temperature=np.ones(lanes, np.float32),
            greedy=np.zeros(lanes, np.bool_),
            top_k=np.zeros(lanes, np.int32),
            top_p=np.ones(lanes, np.float32),
            min_p=np.zeros(lanes, np.float32),
            end_ids=np.full((lanes, END_IDS), -1, np.int32),
            state=np.zeros(lanes, np.int32),
            after=np.full(lanes, -1, np.int32),
        )


class Device:
    """One KV cache and the programs over it; used by the engine's thread alone."""

    def __init__(self, config: ModelConfig, residents: int, capacity: int, mesh: Mesh | None = None):
        self._config, self._mesh = config, mesh
        self._devices = () if mesh is None else tuple(mesh.devices.flat)
        with dispatching(self._devices):
            self._cache: Any = _alloc(config, residents, capacity, mesh)
        self._tables: weakref.WeakKeyDictionary[Constraint, jax.Array] = weakref.WeakKeyDictionary()
        self._before: generate.Round | None = None
        self._compiled_before = _cache_sizes()

    def prefill(self, params, rows, tokens, start, n_new, *, context: int) -> None:
        """Write the KV of tokens[i, :n_new[i]] at positions start[i].. of rows[i]; DONATES the cache."""
        arrays = self._put((rows, tokens, start, n_new))
        with dispatching(self._devices):
            self._cache = _prefill(params, self._config, self._cache, *arrays, context=context, mesh=self._mesh)

    def decode(
        self,
        params,
        lanes: Lanes,
        *,
        context: int,
        n: int,
        truncated: bool,
        constraint: Constraint | None = None,
    ) -> generate.Round:
        """Sample up to `n` tokens a lane, all under one constraint or none; DONATES the cache. Returns at once: `read`
        the round when the next one has begun.

        `truncated` is the program that knows top-k, top-p and min-p (it sorts the vocabulary).
        """
        table = None if constraint is None else self._table(constraint)
        before = self._before
        if before is None or before.tokens.shape != (len(lanes.rows), n):
            before = self._put(generate.empty_round(len(lanes.rows), n))
        before = before._replace(logp=None, forced=None)
        if table is not None and before.state is None:
            before = before._replace(state=before.n_done)  # unread: no lane goes on from a round without one
        if table is None:
            before = before._replace(state=None)
        lanes = self._put(lanes)
        with dispatching(self._devices):
            self._cache, self._before = _decode(
                params, self._config, self._cache, before, lanes, table,
                context=context, n=n, truncated=truncated, mesh=self._mesh,
            )  # fmt: skip
        return self._before

    def read(self, out: generate.Round) -> generate.Round:
        """The round in NumPy arrays; waits for it."""
        return jax.device_get(out)  # D2H, once a round

    def _table(self, constraint: Constraint) -> jax.Array:
        """Its table on the device, as wide as the logits and padded to a power of two of states: few programs."""
        if constraint not in self._tables:
            states, ids = constraint.next_state.shape
            padding = ((0, max(8, 1 << (states - 1).bit_length()) - states), (0, self._config.vocab_size - ids))
            self._tables[constraint] = self._put(np.pad(constraint.next_state, padding, constant_values=-1))
        return self._tables[constraint]

    def copy(self, source: int | None, targets: Sequence[int], *, width: int, context: int) -> None:
        """Copy the first `context` columns of one row onto at most `width` others; DONATES the cache."""
        rows = np.full(width, self._cache.rows, np.int32)  # beyond the last row: nothing is written
        rows[: len(targets)] = targets
        arrays = self._put((np.int32(source or 0), rows))
        with dispatching(self._devices):
            self._cache = _copy(self._cache, *arrays, context=context, mesh=self._mesh)

    def _put(self, arrays: Any) -> Any:
        """Host arrays on every device of the mesh, or on the first device of the process."""
        return jax.device_put(arrays) if self._mesh is None else jax.device_put(arrays, replicated(self._mesh))  # H2D

    def free(self) -> None:
        """Let go of what is on the device; nothing can run any more."""
        self._cache = self._before = None
        self._tables.clear()

    def compiles(self) -> int:
        """Programs compiled in this process since this was made; engines of equal shapes share them."""
        return _cache_sizes() - self._compiled_before


def _cache_sizes() -> int:
    return sum(f._cache_size() for f in (_prefill, _decode, _copy))


@partial(jax.jit, static_argnames=("config", "residents", "capacity", "mesh"))
def _alloc(config, residents, capacity, mesh):
    return _placed(kv_cache.alloc(config, residents, capacity), mesh)


def _placed(cache: kv_cache.KVCache, mesh: Mesh | None) -> kv_cache.KVCache:
    """The cache as it lies on a mesh: its heads where the heads that read them are."""
    if mesh is None:
        return cache
    heads = RULES["kv_heads"]

    def place(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    k, v = (place(x, None, None, heads, None, None) for x in (cache.k, cache.v))
    return kv_cache.KVCache(k, v, None if cache.last_key is None else place(cache.last_key, None, None, heads, None))


@partial(jax.jit, static_argnames=("config", "context", "mesh"), donate_argnames="cache")
def _prefill(params, config, cache, rows, tokens, start, n_new, *, context, mesh):
    return _placed(generate.prefill(params, config, cache, rows, tokens, start, n_new, context=context)[0], mesh)


@partial(jax.jit, static_argnames=("config", "context", "n", "truncated", "mesh"), donate_argnames="cache")
def _decode(params, config, cache, before, lanes, table, *, context, n, truncated, mesh):
    goes_on, place = lanes.after >= 0, jnp.maximum(lanes.after, 0)
    last = jnp.where(goes_on, before.tokens[place, n - 1], lanes.last)
    remaining = jnp.where(goes_on & ~before.alive[place], 0, lanes.remaining)
    cut = Cut(lanes.top_k, lanes.top_p, lanes.min_p) if truncated else None
    rules = None
    if table is not None:
        rules = generate.Rules(table, jnp.where(goes_on, before.state[place], lanes.state))
    cache, out = generate.decode_round(
        params, config, cache, lanes.rows, last, lanes.lengths,
        jax.random.wrap_key_data(lanes.keys, impl="threefry2x32"), lanes.temperature, lanes.greedy, remaining,
        end_ids=lanes.end_ids, n=n, context=context, cut=cut, rules=rules,
    )  # fmt: skip
    if mesh is not None:  # the next round goes on from it
        out = jax.lax.with_sharding_constraint(out, replicated(mesh))
    return _placed(cache, mesh), out


@partial(jax.jit, static_argnames=("context", "mesh"), donate_argnames="cache")
def _copy(cache, source, targets, *, context, mesh):
    return _placed(kv_cache.copy_row(cache, source, targets, context=context), mesh)
