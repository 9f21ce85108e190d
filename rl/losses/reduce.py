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
    share: Float[Array, "B T"] | None = None,
) -> Mean:
    """Mean(total, count), to be added over micro-batches, devices and hosts before it is divided.

    - "token": Σ m·x / Σ m (DAPO, 2503.14476 eq. 8);
    - "sequence": mean over episodes of (Σ m·x / Σ m) of the episode (GRPO, 2402.03300 eq. 3);
    - "fixed": mean over episodes of (Σ m·x) / `length` (Dr. GRPO, 2503.20783), `length` the same for every batch.

    An episode is a segment of a row; where some are several segments, `share` holds 1 / the tokens that the whole
    episode has on the mask (TrajectoryBatch.episode_share). An episode is counted once if it has a token on the mask;
    its segments, which may be cut into different micro-batches, each count for their part. Values off the mask reach
    neither the result nor the gradient.
    """
    if (how == "fixed") != (length is not None):
        raise ValueError(f"length: got {length} with how={how!r}, want a length with how='fixed' and only there")
    if how == "token":
        return masked.mean(per_token, mask)
    if how not in ("sequence", "fixed"):
        raise ValueError(f"how: got {how!r}, want 'token', 'sequence' or 'fixed'")
    if share is None:
        size = masked.segment_sum(mask.astype(jnp.float32), segment)
        # Σ over an episode's tokens of 1/size is 1; rounding makes the count of episodes an integer again.
        share = jnp.where(mask, 1 / jnp.maximum(size, 1), 0.0)
        episodes = jnp.round(jnp.sum(share))
    else:  # not rounded: one micro-batch may hold a part of an episode
        share = masked.keep(share, mask)
        episodes = jnp.sum(share)
    weight = share if how == "sequence" else 1 / length
    return Mean(jnp.sum(masked.keep(per_token, mask) * weight, dtype=jnp.float32), episodes)
