"""Reductions that look at `mask` first: what stands off it (NaN, inf, garbage) reaches neither value nor gradient."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl.types import Max, Mean


def keep(x: Float[Array, "*B"], mask: Bool[Array, "*B"]) -> Float[Array, "*B"]:
    """x on the mask, exactly 0 off it. Apply it *before* a nonlinearity: exp(garbage) · 0 may be NaN."""
    return jnp.where(mask, x, jnp.zeros((), jnp.result_type(x)))


def mean(x: Float[Array, "*B"], mask: Bool[Array, "*B"]) -> Mean:
    """Σ m·x over Σ m, unreduced: Mean(total, count), f32."""
    return Mean(jnp.sum(keep(x, mask), dtype=jnp.float32), jnp.sum(mask, dtype=jnp.float32))


def maximum(x: Float[Array, "*B"], mask: Bool[Array, "*B"]) -> Max:
    """max of x on the mask; -inf where the mask is empty."""
    return Max(jnp.max(x, initial=-jnp.inf, where=mask).astype(jnp.float32))


def mean_var(x: Float[Array, "*B"], mask: Bool[Array, "*B"], *, ddof: int = 0) -> tuple[Array, Array]:
    """Mean and variance on the mask, Σ m(x - x̄)² / (Σ m - ddof). Both 0 where fewer than ddof + 1 values stand."""
    n = jnp.sum(mask)
    centre = jnp.sum(keep(x, mask)) / jnp.maximum(n, 1)
    square = jnp.square(keep(x - centre, mask))
    return centre, jnp.where(n > ddof, jnp.sum(square) / jnp.maximum(n - ddof, 1), 0.0)


def whiten(x: Float[Array, "*B"], mask: Bool[Array, "*B"], *, eps: float = 1e-8) -> Float[Array, "*B"]:
    """(x - x̄) / √(var + eps) with the biased variance on the mask; 0 off it, and everywhere where all are equal (the
    mean of equal numbers is off by a rounding, which √eps would make large).
    """
    centre, variance = mean_var(x, mask)
    differ = jnp.max(x, initial=-jnp.inf, where=mask) > jnp.min(x, initial=jnp.inf, where=mask)
    return keep(x - centre, mask & differ) * jax.lax.rsqrt(variance + eps)


def segment_sum(x: Float[Array, "B T"], segment: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Each token gets the sum of x over its own segment of its own row.

    A segment is a run of equal ids within a row, so ids need be neither dense nor unique in the batch.
    """
    run = jnp.cumsum(jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 0))), axis=1)

    def one_row(values, ids):
        return jax.ops.segment_sum(values, ids, num_segments=values.shape[0], indices_are_sorted=True)[ids]

    return jax.vmap(one_row)(x, run)
