"""Versioned snapshots of the policy's parameters.

The learner donates its own state at every step, so the arrays it holds now are gone after the next step. Whoever serves
weights serves a copy in buffers of its own.
"""

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Parameters that nobody donates, and the learner version they are."""

    params: Any
    version: int


def snapshot(params: Any, version: int, *, dtype: str | None = None, shardings: Any = None) -> Snapshot:
    """Copy `params` into fresh buffers, through one jitted cast (`dtype`, of the floating leaves) and reshard
    (`shardings`).

    The copy is enqueued before this returns, so a donation of `params` by a later program cannot reach it.
    Does not cover: meshes that share no device with the learner's (a transfer between processes).
    """
    copy = _copier(None if dtype is None else jnp.dtype(dtype).name, _Same(shardings))
    return Snapshot(copy(params), version)


class _Same:
    """A pytree of shardings as a key: equal by structure and leaves (a pytree may hold unhashable containers)."""

    def __init__(self, tree: Any):
        self.tree = tree
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = tuple(leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (self._leaves, self._structure) == (other._leaves, other._structure)

    def __hash__(self) -> int:
        return hash((self._leaves, self._structure))


@lru_cache(maxsize=16)
def _copier(dtype: str | None, shardings: _Same):
    cast = partial(_cast, dtype=dtype)
    return jax.jit(cast) if shardings.tree is None else jax.jit(cast, out_shardings=shardings.tree)


def _cast(params: Any, dtype: str | None) -> Any:
    def leaf(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        # jnp.copy, because jit may hand an untouched input through as its output: the very buffer that the
        # learner donates
        return x.astype(dtype) if dtype is not None and floating and x.dtype != jnp.dtype(dtype) else jnp.copy(x)

    return jax.tree.map(leaf, params)
