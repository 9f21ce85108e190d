"""Credit over a packed batch, on the device: values and rewards in, advantages and returns out. A critic's; and that of
a group, where the reward holds a KL penalty, of which the host knows nothing.

An estimator is a composition, made once and handed to `make_learner(critic=...)`; `prepare` calls it. The chain of an
episode's tokens is followed wherever its rows lie in the batch, in other packed rows and on other devices: by
`batch.episode` and `batch.turn`, which `pack(..., chains=True)` fills. These scalars are gathered; no parameter is.

What a fresh critic does: the value head begins as zeros (models/heads.py), so at the first step V = 0, no baseline: A
is the discounted return, γλ to the power of the tokens (or turns) that follow. With λ < 1 early tokens are then given
less than late ones, whoever decided; begin with λ = 1, whiten, or teach the critic first (`recipes.critic`).

Does not cover: bootstrapping after a cut. A limit is failure, so nothing follows the last token of an episode.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl import masked
from rl.advantages import bi_level_gae, gae, relative_on_device, turn_level_gae
from rl.losses.kl import kl_estimate
from rl.types import MEMBERS, TrajectoryBatch

# (rewards, values, turn, mask, episode), each [n], the tokens of an episode in its order -> advantages, returns
Estimator = Callable[..., tuple[Float[Array, " n"], Float[Array, " n"]]]


def token_level(*, discount: float, lambda_: float) -> Estimator:
    """GAE over tokens (`advantages.gae`). Without a value head and with lambda_ 1: the returns (REINFORCE++)."""
    return lambda rewards, values, turn, mask, episode: gae(
        rewards, values, mask, discount=discount, lambda_=lambda_, episode=episode
    )


def turn_level(*, discount: float, lambda_: float) -> Estimator:
    """GAE over turns (`advantages.turn_level_gae`)."""
    return lambda rewards, values, turn, mask, episode: turn_level_gae(
        rewards, values, turn, mask, discount=discount, lambda_=lambda_, episode=episode
    )


def bi_level(*, discount: float, lambda_: float, turn_discount: float) -> Estimator:
    """GAE over turns, then over the tokens of each (`advantages.bi_level_gae`)."""
    how = {"discount": discount, "lambda_": lambda_, "turn_discount": turn_discount}
    return lambda rewards, values, turn, mask, episode: bi_level_gae(
        rewards, values, turn, mask, **how, episode=episode
    )


def by_group(*, baseline: str) -> Estimator:
    """One number an episode against its group, `advantages.relative_on_device`: GRPO ("std"), Dr. GRPO ("none"), RLOO
    ("others"). Returns are the episode's sum of rewards from each token on.
    """

    def estimate(rewards, values, turn, mask, episode):
        _, returns = gae(rewards, 0 * values, mask, discount=1.0, lambda_=1.0, episode=episode)
        return relative_on_device(rewards, mask, episode, episode // MEMBERS, baseline=baseline), returns

    return estimate


def whitened(estimator: Estimator) -> Estimator:
    """The same with advantages of mean 0 and variance 1 over all action tokens of the batch; returns stay."""

    def estimate(rewards, values, turn, mask, episode):
        advantages, returns = estimator(rewards, values, turn, mask, episode)
        return masked.whiten(advantages, mask), returns

    return estimate


def fill(
    batch: TrajectoryBatch,
    values: Float[Array, "B T"] | None,
    estimator: Estimator,
    *,
    kl_coef: Float[Array, ""] | float | None = None,
) -> TrajectoryBatch:
    """`values`, `advantages` and `returns` of the batch, 0 off the mask. None: there is no value head, and V = 0.

    With `kl_coef` the rewards are less `kl_penalty`, and so is all that is made of them; `batch.rewards` stays.
    Raises ValueError for a batch without `episode` and `turn`.
    """
    if batch.episode is None or batch.turn is None:
        raise ValueError("a critic's credit needs batch.episode and batch.turn, got None; use pack(..., chains=True)")
    values = masked.keep(jnp.zeros_like(batch.rewards) if values is None else values, batch.action_mask)
    # A turn's tokens lie in one row, in their order, which a stable sort keeps.
    order = jnp.lexsort((batch.turn.ravel(), batch.episode.ravel()))
    rewards = batch.rewards if kl_coef is None else batch.rewards - kl_coef * kl_penalty(batch)
    fields = (rewards, values, batch.turn, batch.action_mask, batch.episode)
    both = estimator(*(x.ravel()[order] for x in fields))
    advantages, returns = (jnp.zeros_like(x).at[order].set(x).reshape(values.shape) for x in both)
    return dataclasses.replace(batch, values=values, advantages=advantages, returns=returns)


def kl_penalty(batch: TrajectoryBatch) -> Float[Array, "B T"]:
    """k1 = log π - log π_ref of each action token, nats; 0 off the mask. Summed over an episode it is RLOO's penalty
    (2402.14740); token by token it is that of REINFORCE++ (2501.03262) and of PPO (1909.08593).

    π is the policy just before the update where the batch has it (`proximal_logp`), else the one that sampled.
    """
    if batch.ref_logp is None:
        raise ValueError("a KL penalty in the reward needs batch.ref_logp, got None; let learner.prepare fill it")
    own = batch.behavior_logp if batch.proximal_logp is None else batch.proximal_logp
    own, ref = (masked.keep(x, batch.action_mask) for x in (own, batch.ref_logp))
    return kl_estimate(own, ref, kind="k1")
