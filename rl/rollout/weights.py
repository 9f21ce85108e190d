"""Versioned snapshots of the policy's parameters, adapters merged.

The learner donates its own state at every step, so the arrays it holds now are gone after the next step. Whoever serves
weights serves a copy in buffers of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.lora import merge
from models.sharding import replicated


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Parameters that nobody donates, and the learner version they are."""

    params: Any
    version: int


def snapshot(params: Any, version: int) -> Snapshot:
    """Copy `params` into fresh buffers on the sampling device (theirs, or the first of this process), W + s A B in the
    place of W, A and B.

    Merged once for each publish, an adapter costs nothing at the thousands of decode steps that follow.
    The copy is enqueued before this returns, so a donation of `params` by a later program cannot reach it. Parameters
    of several devices come by one compiled reshard, which all processes of their mesh must enter.
    Does not cover: another dtype than the learner's.
    """
    spread = [x.sharding for x in jax.tree.leaves(params) if len(x.sharding.device_set) > 1]
    if not spread:
        return Snapshot(_copy(params), version)
    here = jax.local_devices()[0]
    whole = _gather(spread[0].mesh)(params)
    return Snapshot(jax.tree.map(lambda x: _on(x, here), whole), version)


@jax.jit
def _copy(params: Any) -> Any:
    # jnp.copy, because jit may hand an untouched input through as its output: the very buffer that the learner donates
    return merge(jax.tree.map(jnp.copy, params))


@functools.cache
def _gather(mesh: Mesh) -> Callable[[Any], Any]:
    """Whole on every device of the mesh: what each process keeps of it lies on its own sampling device."""
    return jax.jit(lambda params: merge(jax.tree.map(jnp.copy, params)), out_shardings=replicated(mesh))


def _on(x: jax.Array, device: jax.Device) -> jax.Array:
    return next(shard.data for shard in x.addressable_shards if shard.device == device)
