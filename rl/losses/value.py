"""What a critic learns from: the error of its values, per token, unreduced; and what they explain of the returns."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl import masked
from rl.types import Explained


def clipped_value_loss(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    *,
    clip: float | None,
) -> Float[Array, "B T"]:
    """½ max((v - R)², (clip(v, V - clip, V + clip) - R)²), V the value when the batch was prepared, v the one now.

    The larger of the two: a value that moved farther than `clip` (in units of the reward) has no gradient on the side
    where it had come too far (the critic's side of 1707.06347, as in OpenAI's baselines). None: ½(v - R)². The caller
    masks the arguments.
    """
    error = jnp.square(values - returns)
    if clip is None:
        return error / 2
    bounded = old_values + jnp.clip(values - old_values, -clip, clip)
    return jnp.maximum(error, jnp.square(bounded - returns)) / 2


def explained_variance(
    values: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Explained:
    """1 - Var(R - V) / Var(R) on the mask, unreduced."""
    errors = masked.keep(returns - values, mask)
    returns = masked.keep(returns, mask)
    sums = (jnp.sum(x, dtype=jnp.float32) for x in (mask, returns, returns**2, errors, errors**2))
    return Explained(*sums)
