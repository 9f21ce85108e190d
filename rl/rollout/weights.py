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

from models.config import ModelConfig
from models.lora import merge
from models.sharding import dispatching, param_shardings, replicated
from models.transformer import as_computed

Starts = tuple[tuple[int, ...], ...]  # where the pieces of an array begin, by axis


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Parameters that nobody donates, and the learner version they are."""

    params: Any
    version: int


def snapshot(params: Any, version: int, config: ModelConfig | None = None, mesh: Mesh | None = None) -> Snapshot:
    """Copy `params` into fresh buffers on the sampling device (theirs, or the first of this process), W + s A B in the
    place of W, A and B, in the dtypes that `config` computes with (None: as they are).

    Merged once for each publish, an adapter costs nothing at the thousands of decode steps that follow.
    The copy is enqueued before this returns, so a donation of `params` by a later program cannot reach it. Shards on
    several devices of this process are moved to the sampling device and joined there. What lies in several processes
    comes by one compiled reshard, whole on each of their devices, which all of them must enter.
    With a `mesh` of this process the policy is split over its devices by the model's rules, and never whole on one.
    """
    if mesh is not None:
        return Snapshot(_split(params, config, mesh), version)
    leaves, tree = jax.tree.flatten(params)
    spread = [x.sharding for x in leaves if len(x.sharding.device_set) > 1]
    if not spread:
        return Snapshot(_copy(params, config), version)
    here = jax.local_devices()[0]
    if all(x.is_fully_addressable for x in leaves):
        pieces, starts = zip(*(_pieces(x, here) for x in leaves), strict=True)
        return Snapshot(_joined(tree.unflatten(pieces), starts, config), version)
    with dispatching(spread[0].device_set):
        whole = _gather(spread[0].mesh, config)(params)
    return Snapshot(jax.tree.map(lambda x: _on(x, here), whole), version)


def _fresh(params: Any, config: ModelConfig | None) -> Any:
    # jnp.copy, because jit may hand an untouched input through as its output: the very buffer that the learner donates
    params = merge(jax.tree.map(jnp.copy, params))
    return params if config is None else as_computed(params, config)


_copy = jax.jit(_fresh, static_argnums=1)


@functools.cache
def _gather(mesh: Mesh, config: ModelConfig | None) -> Callable[[Any], Any]:
    """Whole on every device of the mesh: what each process keeps of it lies on its own sampling device."""
    return jax.jit(functools.partial(_fresh, config=config), out_shardings=replicated(mesh))


def _split(params: Any, config: ModelConfig, mesh: Mesh) -> Any:
    where = param_shardings(config, mesh)
    places = dict(jax.tree_util.tree_leaves_with_path(where))
    # What an adapter adds is thin, and whole on each device until it is merged.
    own = jax.tree_util.tree_map_with_path(lambda path, _: places.get(path, replicated(mesh)), params)
    with dispatching({*mesh.devices.flat, *(d for x in jax.tree.leaves(params) for d in x.sharding.device_set)}):
        return _placer(config, mesh)(jax.device_put(params, own))


@functools.cache
def _placer(config: ModelConfig, mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(functools.partial(_fresh, config=config), out_shardings=param_shardings(config, mesh))


def _on(x: jax.Array, device: jax.Device) -> jax.Array:
    return next(shard.data for shard in x.addressable_shards if shard.device == device)


def _pieces(x: jax.Array, here: jax.Device) -> tuple[tuple[jax.Array, ...], Starts]:
    """The shards of `x`, each once, on `here`, in the order of where they begin."""
    own = {tuple(part.start or 0 for part in shard.index): shard.data for shard in reversed(x.addressable_shards)}
    starts = tuple(sorted(own))
    return tuple(jax.device_put(own[at], here) for at in starts), starts


@functools.partial(jax.jit, static_argnums=(1, 2))
def _joined(pieces: Any, starts: tuple[Starts, ...], config: ModelConfig | None) -> Any:
    leaves, tree = jax.tree.flatten(pieces, is_leaf=lambda x: isinstance(x, tuple))
    return _fresh(tree.unflatten([_join(x, at) for x, at in zip(leaves, starts, strict=True)]), config)


def _join(pieces: tuple[jax.Array, ...], starts: Starts) -> jax.Array:
    """One array of pieces that begin at `starts`."""
    for axis in reversed(range(pieces[0].ndim)):
        rows: dict[tuple[int, ...], list[jax.Array]] = {}
        for at, piece in zip(starts, pieces, strict=True):
            rows.setdefault(at[:axis], []).append(piece)
        starts, pieces = tuple(rows), tuple(jnp.concatenate(row, axis) if row[1:] else row[0] for row in rows.values())
    return pieces[0]
