"""Attention over packed rows and over cached keys; everything about positions lives here too.

Scores and softmax are float32. Masked scores are a large finite number, never -inf: with -inf a row that sees nothing
gives NaN in dV even if its output is thrown away. A padded token (segment 0) sees the padding before it, itself
included, so no row is ever empty.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30
# Queries are taken in blocks of this many tokens, each against its own prefix only: the upper triangle is not computed.
CAUSAL_BLOCK = 64
MAX_BLOCKS = 8


def exact(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Matrix precision of a compute dtype: float32 means float32, not TF32 or bf16 passes."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def rope_angles(
    position: Int[Array, "B T"], head_dim: int, theta: float
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Cosine and sine of position · θ^(-2i/H) for i < H/2, in float32 (Su et al. 2021, RoFormer, eq. 15).

    Called once per forward pass, outside the layers: no table, so no length after which positions are clamped.
    """
    inv_freq = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = position.astype(jnp.float32)[..., None] * inv_freq
    return jnp.cos(angle), jnp.sin(angle)


def rope(x: Float[Array, "B T n H"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]) -> Float[Array, "B T n H"]:
    """Turn channel pairs (i, i + H/2) by the position's angle: the half-split layout of Hugging Face."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], segment: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """softmax(q kᵀ / √H) v, where a token sees the tokens of its own segment up to itself (packed rows)."""
    length = q.shape[1]
    blocks = min(MAX_BLOCKS, -(-length // CAUSAL_BLOCK))
    size = -(-length // blocks)
    out = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        causal = jnp.arange(begin, end)[:, None] >= jnp.arange(end)[None, :]
        seen = causal & (segment[:, begin:end, None] == segment[:, None, :end])
        out.append(_softmax_mix(q[:, begin:end], [Part(k[:, :end], v[:, :end], seen)]))
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


class Part(NamedTuple):
    """A run of keys that queries may see: columns of the cache, or the tokens being fed."""

    k: Float[Array, "B s K H"]
    v: Float[Array, "B s K H"]
    seen: Bool[Array, "B t s"]


def attend_parts(q: Float[Array, "B t N H"], parts: Sequence[Part]) -> Float[Array, "B t N H"]:
    """softmax(q kᵀ / √H) v over the keys of all parts together, without joining the parts in memory."""
    return _softmax_mix(q, parts)


def _softmax_mix(q: Float[Array, "B t N H"], parts: Sequence[Part]) -> Float[Array, "B t N H"]:
    rows, length, heads, dim = q.shape
    kv_heads = parts[0].k.shape[2]
    q = q.reshape(rows, length, kv_heads, heads // kv_heads, dim) * dim**-0.5
    scores = []
    for part in parts:
        score = jnp.einsum(
            "btkgh,bskh->bkgts", q, part.k, precision=exact(q.dtype), preferred_element_type=jnp.float32
        )
        scores.append(jnp.where(part.seen[:, None, None], score, MASKED))
    probs = jax.nn.softmax(scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1), axis=-1)
    probs = probs.astype(q.dtype)
    out, begin = 0.0, 0
    for part in parts:
        width = part.k.shape[1]
        piece = probs[..., begin : begin + width]
        out = out + jnp.einsum("bkgts,bskh->btkgh", piece, part.v, precision=exact(q.dtype))
        begin += width
    return out.reshape(rows, length, heads, dim)
