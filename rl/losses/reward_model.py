"""What a reward model learns: yes or no, at the end of an episode (ORM) or of each of its turns (PRM)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl import masked
from rl.losses.recipes import LossFn
from rl.losses.reduce import reduce_loss


def binary_cross_entropy(log_odds: Float[Array, "B T"], labels: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """-y log σ(z) - (1 - y) log(1 - σ(z)) = log(1 + eᶻ) - y z, in nats, per token, unreduced; y in [0, 1].

    A soft label is the share of k roll-ins that succeed (Math-Shepherd, 2312.08935, soft estimation): the loss is then
    the mean of that of k answers, yes or no.
    """
    return jax.nn.softplus(log_odds) - labels * log_odds


def reward_model() -> LossFn:
    """The mean of `binary_cross_entropy` over all that is judged: the tokens of `action_mask`, whose labels stand in
    `rewards` (rl/reward_model.py lays them out so).

    ORM: one for each episode (a solution-level verifier, Cobbe et al. 2021, 2110.14168). PRM: one for each turn
    (2312.08935). Metrics, over the same: `rm/loss` nats; `rm/accuracy` of yes where P(yes) >= 1/2, by soft labels too;
    `rm/p_yes`, `rm/label` (their means: a model that is calibrated on the whole has them equal).
    """

    def loss_fn(scored, batch):
        if scored.log_odds is None:
            raise ValueError('this loss needs log_odds, got none; make_learner(heads=("orm_head",)) gives them')
        mask = batch.action_mask
        log_odds, labels = masked.keep(scored.log_odds, mask), masked.keep(batch.rewards, mask)
        per_token = binary_cross_entropy(log_odds, labels)
        said = jax.lax.stop_gradient(log_odds)
        metrics = {
            "rm/loss": masked.mean(jax.lax.stop_gradient(per_token), mask),
            "rm/accuracy": masked.mean(jnp.where(said >= 0, labels, 1 - labels), mask),
            "rm/p_yes": masked.mean(jax.nn.sigmoid(said), mask),
            "rm/label": masked.mean(labels, mask),
        }
        return reduce_loss(per_token, mask, batch.segment, how="token"), metrics

    return loss_fn
