"""LoRA (Hu et al. 2021): low-rank adapters, kept as further leaves beside the matrices that they adapt.

    params["blocks"]["attention"]["wq"]             [L D N H]  frozen
                                  "wq_lora_a"       [L D r]    trained, random at the start
                                  "wq_lora_b"       [L r N H]  trained, zero at the start: the policy begins as the base
                                  "wq_lora_scale"   [L]        frozen: s = alpha / rank

    W' = W + s · A B

The tree alone says what is computed, so whatever takes parameters takes them with adapters, merged, or without.
Adapted can be the matrices of the layers (`LORA_TARGETS`), never the embedding, the head or the norms.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from models.attention import exact
from models.config import HEADS, LORA_TARGETS, Lora, ModelConfig

Params = dict[str, Any]
Sizes = dict[str, int]  # of some axes, by their logical names

_A, _B, _SCALE = "_lora_a", "_lora_b", "_lora_scale"
_APART = 2**31 - 1  # folded into the key: far from the counts that `transformer.init` folds in


def add(params: Params, config: ModelConfig, lora: Lora, key: PRNGKeyArray) -> Params:
    """`params` with fresh adapters: A ~ N(0, 1/fan-in), B = 0, both f32. The other leaves are the same arrays.

    A's numbers depend on the key and on the matrix's name, not on which others are adapted; the key may be the one that
    `params` were drawn from. Errors (ValueError): a rank over a matrix's smaller side, parameters of another config, a
    matrix that has an adapter already.
    """
    check(config, lora)
    key = jax.random.fold_in(key, _APART)
    blocks = {name: dict(leaf) if isinstance(leaf, dict) else leaf for name, leaf in params["blocks"].items()}
    for name in lora.targets:
        part, rows, columns = _sides(config)[name]
        leaves, layers = blocks[part], config.n_layers
        a, b = (layers, *rows.values(), lora.rank), (layers, lora.rank, *columns.values())
        wanted = (layers, *rows.values(), *columns.values())
        if leaves[name].shape != wanted:
            raise ValueError(f"blocks.{part}.{name}: got {leaves[name].shape}, want {wanted} as the config says")
        if has_adapter(leaves, name):
            raise ValueError(f"blocks.{part}.{name}: has an adapter already; merge it first")
        own = jax.random.fold_in(key, LORA_TARGETS.index(name))
        leaves[name + _A] = jax.random.normal(own, a, jnp.float32) * math.prod(rows.values()) ** -0.5
        leaves[name + _B] = jnp.zeros(b, jnp.float32)
        leaves[name + _SCALE] = jnp.full((layers,), lora.scale, jnp.float32)
    return params | {"blocks": blocks}


def check(config: ModelConfig, lora: Lora) -> None:
    """Errors (ValueError): a rank over the smaller side of a target, where an adapter is larger than what it adapts."""
    for name in lora.targets:
        _, rows, columns = _sides(config)[name]
        most = min(math.prod(rows.values()), math.prod(columns.values()))
        if lora.rank > most:
            raise ValueError(f"lora.rank: got {lora.rank}, want at most {most}, the smaller side of {name}")


def with_axes(axes: Params, config: ModelConfig, lora: Lora) -> Params:
    """`transformer.logical_axes` with those of the adapters that `add` makes."""
    blocks = {name: dict(leaf) if isinstance(leaf, dict) else leaf for name, leaf in axes["blocks"].items()}
    for name in lora.targets:
        part, rows, columns = _sides(config)[name]
        blocks[part][name + _A] = ("layers", *rows, "rank")
        blocks[part][name + _B] = ("layers", "rank", *columns)
        blocks[part][name + _SCALE] = ("layers",)
    return axes | {"blocks": blocks}


def adapted(params: Params) -> bool:
    """Whether any matrix of the tree has an adapter."""
    return any(_is_adapter(name) or isinstance(leaf, dict) and adapted(leaf) for name, leaf in params.items())


def has_adapter(leaves: Params, name: str) -> bool:
    """Whether the matrix `name` among these leaves has an adapter beside it."""
    return name + _A in leaves


def adapted_name(name: str) -> str:
    """The matrix that the leaf `name` adapts, or else `name`."""
    return name.rpartition("_lora_")[0] if _is_adapter(name) else name


def delta(leaves: Params, name: str, x: Float[Array, "M a"]) -> Float[Array, "M b"]:
    """s · (x A) B of one layer, in x's dtype: 2 M r (a + b) multiplications and additions, against 2 M a b of x W."""
    a = leaves[name + _A].reshape(x.shape[-1], -1).astype(x.dtype)
    thin = jnp.matmul(x, a, precision=exact(x.dtype)) * leaves[name + _SCALE].astype(x.dtype)
    b = leaves[name + _B].reshape(a.shape[-1], -1).astype(x.dtype)
    return jnp.matmul(thin, b, precision=exact(x.dtype))


def merge(params: Params, lora: Lora | None = None) -> Params:
    """W + s · A B in the place of W, A, B and s, in float32: the tree of a model that was never adapted.

    Parameters without adapters come back as they are. Given `lora`, the adapters must be those that it describes.
    """
    if lora is not None:
        _want(params, lora)
    return {
        name: _merged(params, name) if has_adapter(params, name) else merge(leaf) if isinstance(leaf, dict) else leaf
        for name, leaf in params.items()
        if not _is_adapter(name)
    }


def base(params: Params) -> Params:
    """The model without its adapters: the same arrays, no copy."""
    return {
        name: base(leaf) if isinstance(leaf, dict) else leaf for name, leaf in params.items() if not _is_adapter(name)
    }


def trainable(path: tuple[str, ...]) -> bool:
    """Whether a leaf of adapted parameters is trained: A and B of an adapter, and all of a head, which is new."""
    return path[-1].endswith((_A, _B)) or path[0] in HEADS


def partition(params: Params) -> tuple[Params, Params]:
    """(trainable, frozen): two trees that hold each leaf once. Without an adapter everything is trainable."""
    if not adapted(params):
        return params, {}
    return _only(params, True), _only(params, False)


def combine(trainable: Params, frozen: Params) -> Params:
    """The inverse of `partition`."""
    joined = dict(frozen)
    for name, leaf in trainable.items():
        joined[name] = combine(leaf, frozen[name]) if name in frozen else leaf
    return joined


def _sides(config: ModelConfig) -> dict[str, tuple[str, Sizes, Sizes]]:
    """Of every target: the part of a layer that it is in, its input axes, its output axes."""
    embed, mlp = {"embed": config.d_model}, {"mlp": config.d_ff}
    heads = {"heads": config.n_heads, "head_dim": config.head_dim}
    kv_heads = {"kv_heads": config.n_kv_heads, "head_dim": config.head_dim}
    return {
        "wq": ("attention", embed, heads),
        "wk": ("attention", embed, kv_heads),
        "wv": ("attention", embed, kv_heads),
        "wo": ("attention", heads, embed),
        "gate": ("mlp", embed, mlp),
        "up": ("mlp", embed, mlp),
        "down": ("mlp", mlp, embed),
    }


def _is_adapter(name: str) -> bool:
    return name.endswith((_A, _B, _SCALE))


def _only(params: Params, wanted: bool, path: tuple[str, ...] = ()) -> Params:
    """The leaves whose `trainable` is `wanted`; no empty dicts."""
    kept = {}
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            leaf = _only(leaf, wanted, (*path, name))
            if leaf:
                kept[name] = leaf
        elif trainable((*path, name)) == wanted:
            kept[name] = leaf
    return kept


def _merged(leaves: Params, name: str) -> Float[Array, "L ..."]:
    w, a, b = leaves[name], leaves[name + _A], leaves[name + _B]
    layers, rank = b.shape[:2]
    ab = jnp.matmul(a.reshape(layers, -1, rank), b.reshape(layers, rank, -1), precision=exact(jnp.float32))
    return w + leaves[name + _SCALE].reshape(-1, *[1] * (w.ndim - 1)) * ab.reshape(w.shape)


def _want(params: Params, lora: Lora) -> None:
    """Errors (ValueError): adapters on other matrices than `lora` says, or of another rank."""
    parts = [leaf for leaf in params["blocks"].values() if isinstance(leaf, dict)]
    ranks = {name: part[name + _A].shape[-1] for part in parts for name in part if has_adapter(part, name)}
    if ranks != dict.fromkeys(lora.targets, lora.rank):
        raise ValueError(f"merge: got adapters of rank {ranks}, want rank {lora.rank} on {lora.targets}")
