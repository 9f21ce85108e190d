"""From rewards to advantages. Over a group on the host (NumPy), over time on the device (jax)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def group_relative(
    rewards: Float[np.ndarray, " N"],
    groups: Int[np.ndarray, " N"],
    valid: Bool[np.ndarray, " N"] | None = None,
    *,
    scale: str,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[np.ndarray, " N"]:
    """A_i = (R_i - mean_g) / (std_g + eps) with scale "std" (2402.03300 §4.1.2), R_i - mean_g with "none" (2503.20783).

    Mean and std over the valid members of i's group, by its number in `groups`, whatever the order. Invalid members
    (ENV_ERROR, CANCELLED, not judged) are absent from the group and get 0. Exactly 0 for equal rewards or a group of
    one. Raises ValueError for a valid reward that is not finite.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale: got {scale!r}, want 'std' or 'none'")

    def one_group(r):
        mean = math.fsum(r) / len(r)
        centred = r - mean
        if scale == "none":
            return centred
        return centred / (math.sqrt(math.fsum(centred**2) / (len(r) - ddof)) + eps)

    return _by_group(rewards, groups, valid, one_group)


def leave_one_out(
    rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"], valid: Bool[np.ndarray, " N"] | None = None
) -> Float[np.ndarray, " N"]:
    """A_i = R_i - mean of the *other* valid members of i's group (RLOO, 2402.14740). Otherwise as `group_relative`."""
    return _by_group(rewards, groups, valid, lambda r: (r - math.fsum(r) / len(r)) * len(r) / (len(r) - 1))


def _by_group(rewards, groups, valid, one_group: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid, bool)
    if rewards.ndim != 1 or groups.shape != rewards.shape or valid.shape != rewards.shape:
        raise ValueError(
            f"got rewards {rewards.shape}, groups {groups.shape}, valid {valid.shape}; want one length each"
        )
    bad = valid & ~np.isfinite(rewards)
    if bad.any():
        where = np.flatnonzero(bad).tolist()
        raise ValueError(
            f"rewards at {where}: got {rewards[bad].tolist()}, want finite; mark what was not judged invalid"
        )
    out = np.zeros_like(rewards)
    for group in np.unique(groups[valid]):
        members = np.flatnonzero(valid & (groups == group))
        r = rewards[members]
        # By comparison, not by eps: the mean of equal floats is off by an ulp, and an ulp over a std of an ulp is O(1).
        if r.max() > r.min():
            out[members] = one_group(r)
    return out


def gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    mask: Bool[Array, " T"],
    *,
    discount: float,
    lambda_: float,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """A_t = δ_t + γλ A_{t'}, δ_t = r_t + γ V_{t'} - V_t, t' the next *masked* token (0 after the last); returns A + V.

    GAE (1506.02438 eq. 16) over the policy's own tokens: those with mask 0 take no part, so that neither discount nor
    critic sees an observation; both outputs are 0 there. A reward belongs on a masked token: off the mask it is not
    read. One episode; vmap for more.
    """
    mask = mask.astype(bool)
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)

    def backward(carry, now):
        next_advantage, next_value = carry
        reward, value, is_action = now
        advantage = reward + discount * next_value - value + discount * lambda_ * next_advantage
        carry = jax.tree.map(lambda new, old: jnp.where(is_action, new, old), (advantage, value), carry)
        return carry, jnp.where(is_action, advantage, 0.0)

    zero = jnp.zeros((), jnp.result_type(rewards, values))
    _, advantages = jax.lax.scan(backward, (zero, zero), (rewards, values, mask), reverse=True)
    return advantages, advantages + values
