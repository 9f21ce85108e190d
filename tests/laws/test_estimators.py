"""Law: over a policy of two steps that can be enumerated, the expectation of an estimator's gradient is the exact one
(the REINFORCE identity), of the reward, and of the reward less a KL penalty.

All groups of G episodes are weighed by their probability; every loss is the recipe's own, at the policy that sampled.
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from rl import critic
from rl.advantages import gae, group_relative, leave_one_out
from rl.losses import recipes
from rl.types import Scored, TrajectoryBatch

EPISODES = np.array(list(itertools.product((0, 1), (0, 1))))  # two actions each
REWARDS = np.array([1.0, -0.5, 0.25, 2.0], np.float32)
THETA = {"first": jnp.array([0.3, -0.2]), "second": jnp.array([[0.1, 0.8], [-0.6, 0.4]])}
REF = {"first": jnp.array([-0.5, 0.5]), "second": jnp.array([[0.7, -0.3], [0.2, 0.9]])}
BETA = 0.3


def log_prob(theta):
    """[4 2]: of both actions of each episode."""
    first, second = (jax.nn.log_softmax(theta[name]) for name in ("first", "second"))
    return jnp.stack([first[EPISODES[:, 0]], second[EPISODES[:, 0], EPISODES[:, 1]]], axis=1)


def value(theta, beta=0.0):
    """E[R] - β KL(π ‖ π_ref)."""
    p = jnp.exp(log_prob(theta).sum(1))
    return jnp.sum(p * (REWARDS - beta * (log_prob(theta) - log_prob(REF)).sum(1)))


def expected_gradient(loss_fn, size, fill):
    """Σ p(group) ∇ loss(group) over all n groups of `size` episodes; `fill` of the batches, [n size 2], does what
    `prepare` would.
    """
    groups = np.array(list(itertools.product(range(4), repeat=size)))
    old = log_prob(THETA)
    shape = (*groups.shape, 2)
    one, zero = np.ones(shape, np.int32), np.zeros(shape, np.int32)
    batches = TrajectoryBatch(
        *(zero, one, zero, one > 0, old[groups], zero),
        rewards=np.stack([0 * REWARDS[groups], REWARDS[groups]], axis=-1),
        advantages=np.zeros(shape, np.float32),
        ref_logp=log_prob(REF)[groups],
        episode=zero + np.arange(size, dtype=np.int32)[:, None],
        turn=zero + np.arange(2, dtype=np.int32),
    )

    def objective(theta, batches):
        def loss(members, batch):
            logp = log_prob(theta)[members]
            return loss_fn(Scored(logp, 0 * logp, batch.values), batch)[0].value

        weight = jnp.prod(jnp.exp(old.sum(1))[groups], axis=1)
        return jnp.sum(weight * jax.vmap(loss)(groups, batches))

    return jax.jit(lambda theta, batches: jax.grad(objective)(theta, fill(groups, batches)))(THETA, batches)


def credited(estimator, beta):
    """The credit that is made on the device, of rewards less β · k1."""
    return lambda groups, batches: jax.vmap(lambda b: critic.fill(b, None, estimator, kl_coef=beta))(batches)


def given(advantages):
    """One number an episode, as the host gives it: of all groups at once."""

    def fill(groups, batches):
        number = np.repeat(np.arange(len(groups)), groups.shape[1])
        each = np.float32(advantages(REWARDS[groups].ravel(), number)).reshape(groups.shape)
        return dataclasses.replace(batches, advantages=jnp.broadcast_to(each[..., None], batches.tokens.shape))

    return fill


def assert_ascends(gradient, objective, scale):
    """A loss descends where the objective ascends."""
    exact = jax.jit(jax.grad(objective))(THETA)
    for name, want in exact.items():
        assert_allclose(gradient[name], -scale * want, rtol=1e-4, atol=1e-6)


def test_leave_one_out_and_the_centred_reward_are_unbiased():
    """RLOO is, and Dr. GRPO is up to (G - 1)/G; both divide an episode's sum by `length`."""
    size, rloo = 3, given(leave_one_out)
    assert_ascends(expected_gradient(recipes.rloo(length=4), size, rloo), value, 1 / 4)
    centred = given(partial(group_relative, scale="none"))
    shrunk = (size - 1) / size / 4
    assert_ascends(expected_gradient(recipes.dr_grpo(length=4), size, centred), value, shrunk)


@pytest.mark.parametrize("lambda_", [0.0, 0.6])
def test_ppo_with_the_exact_value_is_unbiased_at_any_lambda(lambda_):
    """V of the start and of each first action; the token mean halves the gradient of two tokens."""
    p = np.exp(np.asarray(log_prob(THETA)))
    after = [np.sum(p[i : i + 2, 1] * REWARDS[i : i + 2]) for i in (0, 2)]
    start = p[0, 0] * after[0] + p[2, 0] * after[1]

    def fill(groups, batches):
        values = np.stack([np.full(groups.shape, start), np.array(after)[EPISODES[groups, 0]]], axis=-1)
        estimate = jax.vmap(lambda r, v: gae(r, v, jnp.ones(2, bool), discount=1.0, lambda_=lambda_))
        advantages, returns = estimate(batches.rewards[:, 0], values[:, 0].astype(np.float32))
        made = {"advantages": advantages[:, None], "values": values, "returns": returns[:, None]}
        return dataclasses.replace(batches, **made)

    assert_ascends(expected_gradient(recipes.ppo(), 1, fill), value, 1 / 2)


@pytest.mark.parametrize(
    ("recipe", "estimator", "size", "scale"),
    [
        (recipes.reinforce_pp(), critic.token_level(discount=1.0, lambda_=1.0), 1, 1 / 2),
        (recipes.rloo(length=4), critic.by_group(baseline="others"), 2, 1 / 4),
        (recipes.dr_grpo(length=4), critic.by_group(baseline="none"), 2, 1 / 8),
    ],
)
def test_a_kl_penalty_in_the_reward_has_the_gradient_of_the_kl(recipe, estimator, size, scale):
    """k1 taken off the reward, token by token or over the episode: E[R] - β KL is ascended, the exact KL."""
    gradient = expected_gradient(recipe, size, credited(estimator, BETA))
    assert_ascends(gradient, lambda theta: value(theta, BETA), scale)
