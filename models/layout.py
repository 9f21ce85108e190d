"""Where each parameter stands in a file of somebody else's, and how it is laid out there.

Hugging Face's matrices (and GGUF's) are [out in] with the heads one after another; ours are [in out] with heads apart.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from models.config import ModelConfig
from models.sharding import RULES, param_shardings
from models.transformer import Params, init


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one of their tensors stands among our parameters."""

    path: tuple[str, ...]  # of the leaf
    layer: int | None  # of a stacked leaf
    shape: tuple[int, ...]  # ours, without the axis of layers

    @property
    def kind(self) -> str:
        return self.path[-1]


@functools.cache
def shapes_of(config: ModelConfig) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    """The shape of every parameter by its path, in the order of `init`'s leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(_abstract(config))
    return {tuple(entry.key for entry in path): leaf.shape for path, leaf in leaves}


def named_places(
    config: ModelConfig, top: Mapping[str, str], layer: Mapping[tuple[str, ...], str], prefix: str
) -> dict[str, Place]:
    """Their name of every tensor of such a model, and where it stands; in the order of a forward pass.

    `top` and `layer` name our paths outside and within a layer; `prefix` has a place for the layer's number.
    """
    shapes = shapes_of(config)
    found = {top["embed"]: Place(("embed",), None, shapes[("embed",)])}
    for i in range(config.n_layers):
        for path, shape in shapes.items():
            if path[0] == "blocks":
                found[prefix.format(i) + layer[path[1:]]] = Place(path, i, shape[1:])
    for name in ("final_norm", "lm_head"):
        if (name,) in shapes:
            found[top[name]] = Place((name,), None, shapes[(name,)])
    return found


@functools.cache
def _abstract(config: ModelConfig) -> Params:
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def to_theirs(kind: str, ours: np.ndarray) -> np.ndarray:
    """One tensor in their layout; `kind` is the last name of its path ("wq")."""
    if kind in ("wq", "wk", "wv"):
        ours = ours.reshape(ours.shape[0], -1).T
    elif kind == "wo":
        ours = ours.reshape(-1, ours.shape[-1]).T
    elif kind in ("bq", "bk", "bv"):
        ours = ours.reshape(-1)
    elif kind in ("gate", "up", "down", "lm_head"):
        ours = ours.T
    return np.ascontiguousarray(ours)


def their_shape(place: Place) -> tuple[int, ...]:
    """The shape of a tensor in their layout."""
    shape = place.shape
    if place.kind in ("wq", "wk", "wv"):
        return shape[1] * shape[2], shape[0]
    if place.kind == "wo":
        return shape[2], shape[0] * shape[1]
    if place.kind in ("bq", "bk", "bv"):
        return (shape[0] * shape[1],)
    return shape[::-1] if place.kind in ("gate", "up", "down", "lm_head") else shape


def to_ours(place: Place, index: tuple[slice, ...], stored: Any) -> np.ndarray:
    """The part `index` of our tensor, from `stored`, which is theirs and need only know slicing: no more is read.

    A part of a head's channels costs the whole head.
    """
    at = [slice(*part.indices(size)) for part, size in zip(index, place.shape, strict=True)]
    kind = place.kind
    if kind in ("wq", "wk", "wv"):  # theirs [(n H) D] -> ours [D n H]
        embed, heads, channels = at
        block = stored[_rows(heads, place.shape[2]), embed]
        return block.reshape(-1, place.shape[2], block.shape[-1]).transpose(2, 0, 1)[..., channels]
    if kind == "wo":  # theirs [D (n H)] -> ours [n H D]
        heads, channels, embed = at
        block = stored[embed, _rows(heads, place.shape[1])]
        return block.reshape(block.shape[0], -1, place.shape[1]).transpose(1, 2, 0)[:, channels]
    if kind in ("bq", "bk", "bv"):
        heads, channels = at
        return stored[_rows(heads, place.shape[1])].reshape(-1, place.shape[1])[:, channels]
    if kind in ("gate", "up", "down", "lm_head"):
        return stored[at[1], at[0]].T
    return stored[tuple(at)] if len(at) > 1 else stored[at[0]]


def _rows(heads: slice, dim: int) -> slice:
    return slice(heads.start * dim, heads.stop * dim)


def assemble(
    config: ModelConfig,
    read: Callable[[Place, tuple[slice, ...]], np.ndarray],
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, str | None] = RULES,
) -> Params:
    """Float32 parameters from `read(place, index)`, which gives one layer's part of a leaf.

    With a mesh each device gets its shard and nothing else is read; a host holds its shards of one leaf at a time.
    """
    shapes = shapes_of(config)
    shardings = None if mesh is None else param_shardings(config, mesh, rules)

    def whole(path: tuple[str, ...], index: tuple[slice, ...]) -> np.ndarray:
        shape = shapes[path]
        if path[0] != "blocks":
            return np.ascontiguousarray(read(Place(path, None, shape), index), np.float32)
        layers = range(*index[0].indices(shape[0]))
        parts = (read(Place(path, layer, shape[1:]), index[1:]) for layer in layers)
        first = next(parts)
        out = np.empty((len(layers), *first.shape), np.float32)
        out[0] = first
        for i, part in enumerate(parts, start=1):
            out[i] = part
        return out

    def leaf(path: tuple, sharding: NamedSharding | None) -> jax.Array:
        names = tuple(entry.key for entry in path)
        if sharding is None:
            return jnp.asarray(whole(names, (slice(None),) * len(shapes[names])))
        done: dict[str, np.ndarray] = {}  # devices that hold the same part share one reading of it

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            if str(index) not in done:
                done[str(index)] = whole(names, index)
            return done[str(index)]

        return jax.make_array_from_callback(shapes[names], sharding, shard)

    if shardings is None:
        return jax.tree_util.tree_map_with_path(lambda path, _: leaf(path, None), _abstract(config))
    return jax.tree_util.tree_map_with_path(leaf, shardings)
