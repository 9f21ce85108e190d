"""Losses the learner can take, each a composition of the parts beside it (DESIGN section 6); defaults are the papers'.

A recipe returns `loss_fn(logp [B T], entropy [B T], batch) -> (Mean, metrics)`. The learner adds totals and counts over
micro-batches, devices and hosts; it divides once.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl import masked
from rl.losses.kl import kl_estimate
from rl.losses.reduce import reduce_loss
from rl.losses.supervised import cross_entropy
from rl.losses.surrogate import clipped, clipped_surrogate, decoupled_weight, sequence_log_ratio
from rl.types import Max, Mean, TrajectoryBatch

Metrics = Mapping[str, Mean | Max]
LossFn = Callable[[Float[Array, "B T"], Float[Array, "B T"], TrajectoryBatch], tuple[Mean, Metrics]]


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    level: str = "token",
    decoupled_cap: float | None = None,
    reduce: str = "sequence",
    length: int | None = None,
) -> LossFn:
    """clipped_surrogate(log π/π_behavior, A) + kl_coef · k3(π ‖ ref) - entropy_coef · H(π), reduced by `reduce`.

    GRPO (2402.03300 eq. 3): the defaults, with kl_coef 0.04 in the paper. `level` is "token" or "sequence" (GSPO).
    Advantages come with the batch. With kl_coef > 0 the batch must hold `ref_logp`. With `decoupled_cap` the ratio is
    π/π_proximal and w = π_proximal/π_behavior multiplies the surrogate: the batch must hold `proximal_logp`.

    Metrics, on action tokens: `policy/entropy` nats; `policy/kl` = KL(behavior ‖ π) by k3; `policy/ref_kl` = KL(π ‖
    ref) by k3, if used; `policy/clip_frac`; `policy/ratio_max` of π/π_behavior; `policy/engine_gap_max` = max |log π -
    engine's log π| where staleness is 0, a measure of faults at a batch's first update only (later the policy has
    moved); `policy/staleness` in versions, `policy/staleness_max`; `policy/advantage_abs`; `policy/rejected_frac`
    (weight over the cap), if decoupled.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level: got {level!r}, want 'token' or 'sequence'")

    def loss_fn(logp, entropy, batch):
        mask = batch.action_mask
        anchor = batch.behavior_logp if decoupled_cap is None else _given(batch.proximal_logp, "proximal_logp")
        log_ratio = masked.keep(logp - anchor, mask)
        # Advantages are data: garbage in a padded slot must not meet the ratio either.
        advantages = masked.keep(batch.advantages, mask)
        used = log_ratio if level == "token" else sequence_log_ratio(log_ratio, mask, batch.segment)
        clip = {"clip_low": clip_low, "clip_high": clip_high}
        loss = clipped_surrogate(used, advantages, **clip, dual_clip=dual_clip)
        metrics = policy_metrics(logp, entropy, batch) | {
            "policy/clip_frac": masked.mean(clipped(used, advantages, **clip), mask)
        }
        if decoupled_cap is not None:
            weight = decoupled_weight(anchor, batch.behavior_logp, mask, cap=decoupled_cap)
            loss = weight * loss
            metrics["policy/rejected_frac"] = masked.mean(weight == 0, mask)
        if kl_coef:
            ref_logp = _given(batch.ref_logp, "ref_logp")
            ref_kl = kl_estimate(masked.keep(logp, mask), masked.keep(ref_logp, mask), kind="k3")
            loss = loss + kl_coef * ref_kl
            metrics["policy/ref_kl"] = masked.mean(jax.lax.stop_gradient(ref_kl), mask)
        if entropy_coef:
            loss = loss - entropy_coef * masked.keep(entropy, mask)
        return reduce_loss(loss, mask, batch.segment, how=reduce, length=length, share=batch.episode_share), metrics

    return loss_fn


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, **options) -> LossFn:
    """DAPO (2503.14476 eq. 8): clip-higher, token mean, no KL. Not here: filtering of groups, overlong shaping."""
    return grpo(clip_low=clip_low, clip_high=clip_high, reduce="token", **options)


def dr_grpo(*, length: int, clip_low: float = 0.2, clip_high: float = 0.2, **options) -> LossFn:
    """Dr. GRPO (2503.20783): Σ over a response / `length`. Its advantages are `group_relative(scale="none")`."""
    return grpo(clip_low=clip_low, clip_high=clip_high, reduce="fixed", length=length, **options)


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **options) -> LossFn:
    """GSPO (2507.18071): one length-normalised ratio for each row of an episode, in its token form.

    The paper's s_i is the ratio of one response given one context. A later row has another context (the template has
    dropped what was said): it is a response of its own, with a ratio and a clip of its own. The mean is over episodes.
    """
    return grpo(clip_low=clip_low, clip_high=clip_high, level="sequence", reduce="sequence", **options)


def ppo_decoupled(*, decoupled_cap: float = 5.0, **options) -> LossFn:
    """Decoupled PPO (AReaL, 2505.24298 eq. 5): clipped around the proximal policy, weighted to the behavior policy."""
    return grpo(decoupled_cap=decoupled_cap, reduce="token", **options)


def sft(*, reduce: str = "token", length: int | None = None) -> LossFn:
    """Cross-entropy on `action_mask` by the same learner. Metrics: `sft/nll`, `policy/entropy` nats a token."""

    def loss_fn(logp, entropy, batch):
        per_token = cross_entropy(logp)
        metrics = {
            "sft/nll": masked.mean(jax.lax.stop_gradient(per_token), batch.action_mask),
            "policy/entropy": masked.mean(jax.lax.stop_gradient(entropy), batch.action_mask),
        }
        return reduce_loss(
            per_token, batch.action_mask, batch.segment, how=reduce, length=length, share=batch.episode_share
        ), metrics

    return loss_fn


def policy_metrics(
    logp: Float[Array, "B T"], entropy: Float[Array, "B T"], batch: TrajectoryBatch
) -> dict[str, Mean | Max]:
    """What every policy-gradient recipe watches; see `grpo` for the meaning of each name. No gradient passes."""
    mask = batch.action_mask
    logp, entropy = jax.lax.stop_gradient((logp, entropy))
    log_ratio = masked.keep(logp - batch.behavior_logp, mask)
    # The tokens were sampled by the behavior policy, so this estimates KL(behavior ‖ π).
    behavior_kl = kl_estimate(jnp.zeros_like(log_ratio), log_ratio, kind="k3")
    return {
        "policy/entropy": masked.mean(entropy, mask),
        "policy/kl": masked.mean(behavior_kl, mask),
        "policy/ratio_max": masked.maximum(jnp.exp(log_ratio), mask),
        "policy/engine_gap_max": masked.maximum(jnp.abs(log_ratio), mask & (batch.staleness == 0)),
        "policy/staleness": masked.mean(batch.staleness, mask),
        "policy/staleness_max": masked.maximum(batch.staleness.astype(jnp.float32), mask),
        "policy/advantage_abs": masked.mean(jnp.abs(batch.advantages), mask),
    }


def _given(field: Float[Array, "B T"] | None, name: str) -> Float[Array, "B T"]:
    if field is None:
        raise ValueError(f"this loss needs batch.{name}, got None; let learner.prepare fill it (see make_learner)")
    return field
