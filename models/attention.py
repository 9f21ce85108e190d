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
    rows, length, heads, dim = q.shape
    kv_heads, groups = k.shape[2], heads // k.shape[2]
    q = q.reshape(rows, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4) * dim**-0.5
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    blocks = min(MAX_BLOCKS, -(-length // CAUSAL_BLOCK))
    size = -(-length // blocks)
    out = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        causal = jnp.arange(begin, end)[:, None] >= jnp.arange(end)[None, :]
        seen = causal & (segment[:, begin:end, None] == segment[:, None, :end])
        # The query heads of one kv head stand one after another, as more queries: every product is one plain matmul.
        queries = q[..., begin:end, :].reshape(rows, kv_heads, groups * (end - begin), dim)
        mixed = _mix(queries, k[:, :, :end], v[:, :, :end], jnp.tile(seen, (1, groups, 1)))
        out.append(mixed.reshape(rows, heads, end - begin, dim))
    mixed = out[0] if len(out) == 1 else jnp.concatenate(out, axis=2)
    return mixed.transpose(0, 2, 1, 3)


Queries = Float[Array, "B K m H"]  # m = query heads of one kv head times their tokens
Keys = Float[Array, "B K s H"]


@jax.custom_vjp
def _mix(q: Queries, k: Keys, v: Keys, seen: Bool[Array, "B m s"]) -> Queries:
    """softmax(q kᵀ) v with a hand-written gradient.

    On a CPU it halves the cost of attention: dS = P ∘ (dP - rowsum(dO ∘ O)) needs one pass over the scores where the
    derivative of a masked softmax needs several (Dao et al. 2022, FlashAttention, appendix B.2).
    """
    return _mix_forward(q, k, v, seen)[0]


def _mix_forward(q: Queries, k: Keys, v: Keys, seen: Bool[Array, "B m s"]) -> tuple[Queries, tuple[Array, ...]]:
    score = jnp.einsum("bkmh,bksh->bkms", q, k, precision=exact(q.dtype), preferred_element_type=jnp.float32)
    score = jnp.where(seen[:, None], score, MASKED)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight.astype(q.dtype)
    mixed = jnp.einsum("bkms,bksh->bkmh", weight, v, precision=exact(q.dtype), preferred_element_type=jnp.float32)
    mixed = (mixed / total).astype(q.dtype)
    return mixed, (q, k, v, weight, total, mixed)


def _mix_backward(saved: tuple[Array, ...], grad: Queries) -> tuple[Queries, Keys, Keys, None]:
    q, k, v, weight, total, mixed = saved
    precision = exact(q.dtype)
    grad32 = grad.astype(jnp.float32) / total
    inner = jnp.sum(grad32 * mixed.astype(jnp.float32), axis=-1, keepdims=True)
    grad = grad32.astype(q.dtype)
    dv = jnp.einsum("bkms,bkmh->bksh", weight, grad, precision=precision)
    dp = jnp.einsum("bkmh,bksh->bkms", grad, v, precision=precision, preferred_element_type=jnp.float32)
    ds = (weight * (dp - inner)).astype(q.dtype)
    dq = jnp.einsum("bkms,bksh->bkmh", ds, k, precision=precision)
    dk = jnp.einsum("bkms,bkmh->bksh", ds, q, precision=precision)
    return dq, dk, dv, None


_mix.defvjp(_mix_forward, _mix_backward)


class Part(NamedTuple):
    """A run of keys that queries may see: columns of the cache, or the tokens being fed."""

    k: Float[Array, "B K s H"]
    v: Float[Array, "B K s H"]
    seen: Bool[Array, "B t s"]


def attend_parts(q: Float[Array, "B t N H"], parts: Sequence[Part]) -> Float[Array, "B t N H"]:
    """softmax(q kᵀ / √H) v over the keys of all parts together, without joining the parts in memory.

    One maximum over all parts; then sums and mixes add up.
    """
    rows, length, heads, dim = q.shape
    kv_heads = parts[0].k.shape[1]
    groups = heads // kv_heads
    q = q.reshape(rows, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4) * dim**-0.5
    q = q.reshape(rows, kv_heads, groups * length, dim)
    scores = []
    for part in parts:
        score = jnp.einsum("bkmh,bksh->bkms", q, part.k, precision=exact(q.dtype), preferred_element_type=jnp.float32)
        scores.append(jnp.where(jnp.tile(part.seen, (1, groups, 1))[:, None], score, MASKED))
    top = jnp.max(jnp.stack([jnp.max(score, axis=-1) for score in scores]), axis=0)[..., None]
    total, mixed = 0.0, 0.0
    for score, part in zip(scores, parts, strict=True):
        weight = jnp.exp(score - top)
        total = total + jnp.sum(weight, axis=-1, keepdims=True)
        mixed = mixed + jnp.einsum(
            "bkms,bksh->bkmh",
            weight.astype(q.dtype),
            part.v,
            precision=exact(q.dtype),
            preferred_element_type=jnp.float32,
        )
    mixed = (mixed / total).astype(q.dtype)
    return mixed.reshape(rows, heads, length, dim).transpose(0, 2, 1, 3)
