"""Policy-gradient surrogates per token, to minimise, unreduced. The caller masks the log-ratios (`masked.keep`)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl import masked

# exp(20) = 4.9e8: no useful ratio lies beyond, and exp never overflows, so that a zero advantage stays a zero loss.
MAX_LOG_RATIO_NATS = 20.0


def clipped_surrogate(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Array, "B T"]:
    """max(-r·A, -clip(r, 1 - clip_low, 1 + clip_high)·A), r = exp(log_ratio).

    PPO (1707.06347 eq. 7) with the two clips of DAPO (2503.14476 eq. 8).
    With `dual_clip` c > 1 (1912.09729 eq. 5) the loss where A < 0 is at most c·|A|. Log-ratios are cut at ±20.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip: got {dual_clip}, want a bound above 1 on the ratio, or None for no bound")
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(-ratio * advantages, -bounded * advantages)
    if dual_clip is None:
        return loss
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def clipped(
    log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], *, clip_low: float, clip_high: float
) -> Bool[Array, "B T"]:
    """Tokens that the clip silences: r > 1 + clip_high where A > 0, r < 1 - clip_low where A < 0."""
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))
    return jnp.where(advantages > 0, ratio > 1 + clip_high, (advantages < 0) & (ratio < 1 - clip_low))


def clipped_weight_surrogate(
    log_ratio: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)]·A·log π (CISPO, MiniMax-M1, 2506.13585 eqs. 4-5).

    The clip bounds a token's weight and silences none: the gradient is that of REINFORCE, times at most 1 + clip_high.
    """
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))
    return -jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high)) * advantages * logp


def cut(log_ratio: Float[Array, "B T"], *, clip_low: float, clip_high: float) -> Bool[Array, "B T"]:
    """Tokens whose ratio is outside [1 - clip_low, 1 + clip_high], whatever their advantage."""
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))
    return (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


def sequence_log_ratio(
    log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"], segment: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """log s_i = (1/|y_i|) Σ_t log r_t over a segment's masked tokens, at each of them; 0 elsewhere (GSPO, 2507.18071).

    A segment is one host row: where an episode has several, each has its own ratio, given its own context. Token form
    (eqs. 13-14): the value is that of the sequence, the gradient that of the token itself.
    """
    log_ratio = masked.keep(log_ratio, mask)
    count = masked.segment_sum(mask.astype(log_ratio.dtype), segment)
    sequence = masked.segment_sum(log_ratio, segment) / jnp.maximum(count, 1)
    return masked.keep(log_ratio - jax.lax.stop_gradient(log_ratio) + jax.lax.stop_gradient(sequence), mask)


def loglinear_proximal(
    logp: Float[Array, "B T"], behavior_logp: Float[Array, "B T"], staleness: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """(1 - α) log π_behavior + α log π, α = s / (s + 1), s = staleness: log π_proximal without a forward pass.

    π is taken to have moved at an even pace: the behavior policy is s versions older than the proximal one, and that
    one older than what the update makes, so α = (v_proximal - v_behavior) / (v - v_behavior) with v = v_proximal + 1
    (AReaL's prox_approx; A-3PO). Constant to the gradient; where s is 0 it is π_behavior. At a batch's first update π
    has not moved yet, and the ratio to what this gives is not 1 where s > 0: an approximation of the proximal policy.
    """
    alpha = staleness / (staleness + 1.0)
    return jax.lax.stop_gradient((1 - alpha) * behavior_logp + alpha * logp)


def decoupled_weight(
    proximal_logp: Float[Array, "B T"], behavior_logp: Float[Array, "B T"], mask: Bool[Array, "B T"], *, cap: float
) -> Float[Array, "B T"]:
    """w = π_proximal / π_behavior, constant to the gradient; 0 where w > cap (rejected) and off the mask.

    Multiplies the surrogate; the reduction's denominator stays the full mask (AReaL, 2505.24298 eq. 5 and its code).
    """
    weight = _weight(proximal_logp, behavior_logp, mask)
    return jax.lax.stop_gradient(jnp.where(mask & (weight <= cap), weight, 0.0))


def truncated_weight(
    proximal_logp: Float[Array, "B T"], behavior_logp: Float[Array, "B T"], mask: Bool[Array, "B T"], *, cap: float
) -> Float[Array, "B T"]:
    """w = min(π_proximal / π_behavior, cap), constant to the gradient; 0 off the mask.

    Truncated importance sampling (Ionides 2008): as `decoupled_weight`, but a token over the cap is kept, at the cap.
    Biased towards the behavior policy, of bounded variance.
    """
    weight = _weight(proximal_logp, behavior_logp, mask)
    return jax.lax.stop_gradient(masked.keep(jnp.minimum(weight, cap), mask))


def _weight(proximal_logp, behavior_logp, mask) -> Float[Array, "B T"]:
    log_weight = masked.keep(proximal_logp - behavior_logp, mask)
    return jnp.exp(jnp.clip(log_weight, -MAX_LOG_RATIO_NATS, MAX_LOG_RATIO_NATS))
