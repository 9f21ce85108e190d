"""Estimates of KL(π ‖ π_ref) from tokens that π sampled, per token, unreduced (joschu.net/blog/kl-approx.html); and the
coefficient β of the penalty.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_EXPONENT_NATS = 20.0
MAX_K3_NATS = 10.0
MOST_ERROR = 0.2  # of the target, that a change of β answers


@dataclasses.dataclass(frozen=True)
class Penalty:
    """How a policy is kept near its reference: β is `coef` at first, of a term in the loss or, `in_reward`, of what is
    taken off the reward.

    With `target` > 0 (nats a token) β is `adapted` after each update; `gain` is the episodes of a batch / the horizon.
    """

    coef: float
    in_reward: bool = False
    target: float = 0.0
    gain: float = 0.0


def adapted(coef: Float[Array, ""], kl: Float[Array, ""], *, target: float, gain: float) -> Float[Array, ""]:
    """β(1 + clip(KL/target - 1, -.2, .2) · gain): the proportional controller of 1909.08593."""
    return coef * (1 + jnp.clip(kl / target - 1, -MOST_ERROR, MOST_ERROR) * gain)


def kl_estimate(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], *, kind: str) -> Float[Array, "B T"]:
    """With d = logp - ref_logp: k1 = d, k2 = d²/2, k3 = exp(-d) + d - 1 (2402.03300 eq. 4). Nats.

    k1 and k3 are unbiased, k2 and k3 are ≥ 0; as a loss, k2 alone has the gradient of the KL in expectation. As a
    reward, which is data, k1 alone has it: E[∇log π · k3] is ∇KL(π ‖ π_ref) - ∇KL(π_ref ‖ π). In k3, d is cut at ±20
    *before* the exponential (cut after it, the gradient would be NaN) and the value at 10.
    """
    d = logp - ref_logp
    if kind == "k1":
        return d
    if kind == "k2":
        return jnp.square(d) / 2
    if kind == "k3":
        x = jnp.clip(-d, -MAX_EXPONENT_NATS, MAX_EXPONENT_NATS)
        return jnp.minimum(jnp.expm1(x) - x, MAX_K3_NATS)  # expm1: near 0 the terms cancel
    raise ValueError(f"kind: got {kind!r}, want 'k1', 'k2' or 'k3'")
