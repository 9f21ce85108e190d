"""The one visible reduction of a per-token loss. It gives a Mean, so that every denominator is global."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl import masked
from rl.types import Mean


def reduce_loss(
    per_token: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment: Int[Array, "B T"],
    *,
    how: str,
    length: int | None = None,
) -> Mean:
    """Mean(total, count), to be added over micro-batches, devices and hosts before it is divided.

    - "token": Σ m·x / Σ m (DAPO, 2503.14476 eq. 8);
    - "sequence": mean over episodes of (Σ m·x / Σ m) of the episode (GRPO, 2402.03300 eq. 3);
    - "fixed": mean over episodes of (Σ m·x) / `length` (Dr. GRPO, 2503.20783), `length` the same for every batch.

    An episode is a segment of a row and is counted if it has at least one token on the mask. Values off the mask reach
    neither the result nor the gradient. Does not cover: an episode of several rows counts once for each of them.
    """
    if (how == "fixed") != (length is not None):
        raise ValueError(f"length: got {length} with how={how!r}, want a length with how='fixed' and only there")
    if how == "token":
        return masked.mean(per_token, mask)
    if how not in ("sequence", "fixed"):
        raise ValueError(f"how: got {how!r}, want 'token', 'sequence' or 'fixed'")
    size = masked.segment_sum(mask.astype(jnp.float32), segment)
    # Σ over an episode's tokens of 1/size is 1; rounding makes the count of episodes an integer again.
    share = jnp.where(mask, 1 / jnp.maximum(size, 1), 0.0)
    episodes = jnp.round(jnp.sum(share))
    weight = share if how == "sequence" else 1 / length
    return Mean(jnp.sum(masked.keep(per_token, mask) * weight, dtype=jnp.float32), episodes)
