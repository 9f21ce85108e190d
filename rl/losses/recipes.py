"""Losses the learner can take, each a composition of the parts beside it; defaults are the papers'.

A recipe returns `loss_fn(scored, batch) -> (Mean, metrics)`. The learner adds totals and counts over micro-batches,
devices and hosts; it divides once. Advantages come with the batch: which ones belong to a recipe is said beside it,
and credit by turns (rl/credit.py) or of a critic (rl/critic.py) goes with any.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl import masked
from rl.losses.kl import kl_estimate
from rl.losses.reduce import reduce_loss
from rl.losses.supervised import cross_entropy
from rl.losses.surrogate import (
    clipped,
    clipped_surrogate,
    clipped_weight_surrogate,
    cut,
    decoupled_weight,
    loglinear_proximal,
    sequence_log_ratio,
)
from rl.losses.value import clipped_value_loss, explained_variance
from rl.types import Mean, Metric, Scored, TrajectoryBatch

Metrics = Mapping[str, Metric]
LossFn = Callable[..., tuple[Mean, Metrics]]  # (scored, batch); of a policy also kl_coef=, where β is the state's
# (log-ratio, log π, advantages), all masked -> per-token loss, tokens that the clip touched
Surrogate = Callable[[Array, Array, Array], tuple[Float[Array, "B T"], Bool[Array, "B T"]]]


def policy_gradient(
    surrogate: Surrogate,
    *,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    entropy_coef: float = 0.0,
    level: str = "token",
    decoupled_cap: float | None = None,
    weigh: Callable[..., Float[Array, "B T"]] = decoupled_weight,
    proximal: str = "forward",
    reduce: str = "token",
    length: int | None = None,
) -> LossFn:
    """surrogate(log π/π_behavior, log π, A) + kl_coef · KL(π ‖ ref) - entropy_coef · H(π), reduced by `reduce`.

    What all recipes of a policy have in common. `level` is "token" or "sequence" (GSPO); `kl_kind` the estimator in the
    loss, "k1" (whose gradient has nothing of the KL: only for comparison), "k2" or "k3". With kl_coef > 0 the batch
    must hold `ref_logp`; the loss takes another β than that at each call, `kl_coef=`, of no effect where this is 0.
    With `decoupled_cap` the ratio is π/π_proximal and w = π_proximal/π_behavior multiplies the surrogate; `weigh` says
    what becomes of a w over the cap: rejected (`decoupled_weight`) or cut to it (`truncated_weight`). `proximal` is
    "forward" (the batch must hold `proximal_logp`: one forward pass when it was cut, fixed over its updates) or
    "loglinear" (`loglinear_proximal`, from the update's own forward pass).

    Metrics, on action tokens (and, where the batch has a `world_mask`, on the observations under it, of ratio 1 at the
    first update): `policy/entropy` nats; `policy/kl` = KL(behavior ‖ π) by k3; `policy/ref_kl` = KL(π ‖
    ref) by k3, if the batch has a reference; `policy/clip_frac`; `policy/ratio_max` of π/π_behavior;
    `policy/engine_gap_max` = max |log π - engine's log π| where staleness is 0, a measure of faults at a batch's first
    update only (later the policy has moved); `policy/staleness` in versions, `policy/staleness_max`;
    `policy/advantage_abs`; if decoupled, `policy/is_weight` w, and `policy/is_capped_frac` of the w over the cap.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level: got {level!r}, want 'token' or 'sequence'")
    if proximal not in ("forward", "loglinear"):
        raise ValueError(f"proximal: got {proximal!r}, want 'forward' or 'loglinear'")
    has_kl = bool(kl_coef)

    def loss_fn(scored, batch, kl_coef=kl_coef):
        logp, mask = scored.logp, batch.action_mask
        anchor = batch.behavior_logp
        if decoupled_cap is not None and proximal == "loglinear":
            anchor = loglinear_proximal(masked.keep(logp, mask), batch.behavior_logp, batch.staleness)
        elif decoupled_cap is not None:
            anchor = _given(batch.proximal_logp, "proximal_logp")
        log_ratio = masked.keep(logp - anchor, mask)
        # Advantages are data: garbage in a padded slot must not meet the ratio either.
        advantages = masked.keep(batch.advantages, mask)
        used = log_ratio if level == "token" else sequence_log_ratio(log_ratio, mask, batch.segment)
        loss, touched = surrogate(used, masked.keep(logp, mask), advantages)
        metrics = policy_metrics(scored, batch) | {"policy/clip_frac": masked.mean(touched, mask)}
        if decoupled_cap is not None:
            weight = weigh(anchor, batch.behavior_logp, mask, cap=decoupled_cap)
            loss = weight * loss
            metrics["policy/is_weight"] = masked.mean(weight, mask)
            metrics["policy/is_capped_frac"] = masked.mean((weight == 0) | (weight == decoupled_cap), mask)
        if has_kl or batch.ref_logp is not None:
            own, ref = masked.keep(logp, mask), masked.keep(_given(batch.ref_logp, "ref_logp"), mask)
            metrics["policy/ref_kl"] = masked.mean(jax.lax.stop_gradient(kl_estimate(own, ref, kind="k3")), mask)
        if has_kl:
            loss = loss + kl_coef * kl_estimate(own, ref, kind=kl_kind)
        if entropy_coef:
            loss = loss - entropy_coef * masked.keep(scored.entropy, mask)
        return reduce_loss(loss, mask, batch.segment, how=reduce, length=length, share=batch.episode_share), metrics

    return loss_fn


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    reduce: str = "sequence",
    **options,
) -> LossFn:
    """clipped_surrogate(log π/π_behavior, A), the mean over episodes of their token means.

    GRPO (2402.03300 eq. 3), with kl_coef 0.04 in the paper; advantages `group_relative(scale="std")`. `options` are
    those of `policy_gradient`.
    """
    clip = {"clip_low": clip_low, "clip_high": clip_high}

    def surrogate(log_ratio, logp, advantages):
        loss = clipped_surrogate(log_ratio, advantages, **clip, dual_clip=dual_clip)
        return loss, clipped(log_ratio, advantages, **clip)

    return policy_gradient(surrogate, reduce=reduce, **options)


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, **options) -> LossFn:
    """DAPO (2503.14476 eq. 8): clip-higher, token mean, no KL. Not here: filtering of groups, overlong shaping."""
    return grpo(clip_low=clip_low, clip_high=clip_high, reduce="token", **options)


def dr_grpo(*, length: int, clip_low: float = 0.2, clip_high: float = 0.2, **options) -> LossFn:
    """Dr. GRPO (2503.20783): Σ over a response / `length`. Its advantages are `group_relative(scale="none")`."""
    return grpo(clip_low=clip_low, clip_high=clip_high, reduce="fixed", length=length, **options)


def rloo(*, length: int, clip_low: float = 0.2, clip_high: float = 0.2, **options) -> LossFn:
    """RLOO (2402.14740): Σ over a response / `length`, advantages `leave_one_out`. With length 1 and one update a batch
    it is the paper's A·∇log π(y): then every ratio is 1.

    `leave_one_out` is G/(G - 1) times `group_relative(scale="none")`, so this is `dr_grpo` at another rate.
    """
    return grpo(clip_low=clip_low, clip_high=clip_high, reduce="fixed", length=length, **options)


def reinforce_pp(*, clip_low: float = 0.2, clip_high: float = 0.2, kl_kind: str = "k2", **options) -> LossFn:
    """REINFORCE++ (2501.03262): clipped, token mean. Its advantages are returns (discounted over the policy's own
    tokens alone), whitened over the whole batch: `critic.whitened(critic.token_level(discount=γ, lambda_=1.0))` without
    a value head.
    """
    return grpo(clip_low=clip_low, clip_high=clip_high, reduce="token", kl_kind=kl_kind, **options)


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **options) -> LossFn:
    """GSPO (2507.18071): one length-normalised ratio for each row of an episode, in its token form.

    The paper's s_i is the ratio of one response given one context. A later row has another context (the template has
    dropped what was said): it is a response of its own, with a ratio and a clip of its own. The mean is over episodes.
    """
    return grpo(clip_low=clip_low, clip_high=clip_high, level="sequence", reduce="sequence", **options)


def gspo_token(*, clip_low: float = 3e-4, clip_high: float = 4e-4, **options) -> LossFn:
    """GSPO-token (2507.18071 eq. 13): `gspo` is in this form already, so that A may differ from token to token or from
    turn to turn. The ratio and its clip are the sequence's, the sign and size of the push the token's own.
    """
    return gspo(clip_low=clip_low, clip_high=clip_high, **options)


def gigpo(*, clip_low: float = 0.2, clip_high: float = 0.2, **options) -> LossFn:
    """GiGPO (2505.10978): GRPO's loss; its advantages are one a turn, `advantages.gigpo`. kl_coef 0.01 there."""
    return grpo(clip_low=clip_low, clip_high=clip_high, reduce="sequence", **options)


def cispo(*, clip_high: float, clip_low: float = 1.0, **options) -> LossFn:
    """CISPO (2506.13585 eq. 4): clipped weights on A·log π, token mean; advantages `group_relative(scale="std")`.

    The paper has no lower bound (clip_low 1) and gives no number for the upper one. `policy/clip_frac` counts the
    tokens whose weight is cut; none is silenced.
    """
    clip = {"clip_low": clip_low, "clip_high": clip_high}

    def surrogate(log_ratio, logp, advantages):
        return clipped_weight_surrogate(log_ratio, logp, advantages, **clip), cut(log_ratio, **clip)

    return policy_gradient(surrogate, reduce="token", **options)


def ppo_decoupled(*, decoupled_cap: float = 5.0, value: Mapping[str, float] | None = None, **options) -> LossFn:
    """Decoupled PPO (AReaL, 2505.24298 eq. 5): clipped around the proximal policy, weighted to the behavior policy.

    Its advantages are returns, whitened over the batch: no critic. With one, `value` is `ppo`'s value_coef, value_clip.
    """
    if value is not None:
        return ppo(decoupled_cap=decoupled_cap, **value, **options)
    return grpo(decoupled_cap=decoupled_cap, reduce="token", **options)


def critic(*, clip: float | None = 0.2, reduce: str = "token", length: int | None = None) -> LossFn:
    """The value head's loss alone (rl/losses/value.py). The batch must hold `values` and `returns`.

    Alone it teaches a critic before the policy moves; through a shared trunk the policy moves all the same, but for
    adapters and trunks that are frozen. Metrics, on action tokens: `value/loss`; `value/mean`, `value/return`;
    `value/explained` of the returns' variance by the values that the advantages were made with; `value/clip_frac`
    (moved farther than `clip`).
    """

    def loss_fn(scored, batch):
        mask = batch.action_mask
        if scored.values is None:
            raise ValueError('this loss needs values, got none; make_learner(heads=("value_head",)) gives them')
        now, old, returns = (
            masked.keep(x, mask)
            for x in (scored.values, _given(batch.values, "values"), _given(batch.returns, "returns"))
        )
        per_token = clipped_value_loss(now, old, returns, clip=clip)
        moved = jax.lax.stop_gradient(jnp.abs(now - old))
        metrics = {
            "value/loss": masked.mean(jax.lax.stop_gradient(per_token), mask),
            "value/mean": masked.mean(old, mask),
            "value/return": masked.mean(returns, mask),
            "value/explained": explained_variance(old, returns, mask),
            "value/clip_frac": masked.mean(moved > (jnp.inf if clip is None else clip), mask),
        }
        loss = reduce_loss(per_token, mask, batch.segment, how=reduce, length=length, share=batch.episode_share)
        return loss, metrics

    return loss_fn


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_coef: float = 0.5,
    value_clip: float | None = 0.2,
    reduce: str = "token",
    length: int | None = None,
    **options,
) -> LossFn:
    """PPO (1707.06347 eq. 9): clipped surrogate + value_coef · clipped value loss, over the same tokens.

    Advantages and returns are the critic's (rl/critic.py), filled by `learner.prepare`. For stale data give
    `decoupled_cap` (2505.24298). Metrics: those of `policy_gradient` and of `critic`.
    """
    policy = grpo(clip_low=clip_low, clip_high=clip_high, reduce=reduce, length=length, **options)
    value = critic(clip=value_clip, reduce=reduce, length=length)

    def loss_fn(scored, batch, **kl):
        of_policy, metrics = policy(scored, batch, **kl)
        of_value, more = value(scored, batch)
        return Mean(of_policy.total + value_coef * of_value.total, of_policy.count), {**metrics, **more}

    return loss_fn


def sft(*, reduce: str = "token", length: int | None = None) -> LossFn:
    """Cross-entropy on `action_mask` by the same learner. Metrics: `sft/nll`, `policy/entropy` nats a token."""

    def loss_fn(scored, batch):
        per_token = cross_entropy(scored.logp)
        metrics = {
            "sft/nll": masked.mean(jax.lax.stop_gradient(per_token), batch.action_mask),
            "policy/entropy": masked.mean(jax.lax.stop_gradient(scored.entropy), batch.action_mask),
        }
        return reduce_loss(
            per_token, batch.action_mask, batch.segment, how=reduce, length=length, share=batch.episode_share
        ), metrics

    return loss_fn


def policy_metrics(scored: Scored, batch: TrajectoryBatch) -> dict[str, Metric]:
    """What every recipe of a policy watches; see `policy_gradient` for each name's meaning. No gradient passes."""
    mask = batch.action_mask
    logp, entropy = jax.lax.stop_gradient((scored.logp, scored.entropy))
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
