"""Estimates of KL(π ‖ π_ref) from tokens that π sampled, per token, unreduced (joschu.net/blog/kl-approx.html)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

MAX_EXPONENT_NATS = 20.0
MAX_K3_NATS = 10.0


def kl_estimate(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], *, kind: str) -> Float[Array, "B T"]:
    """With d = logp - ref_logp: k1 = d, k2 = d²/2, k3 = exp(-d) + d - 1 (2402.03300 eq. 4). Nats.

    k1 and k3 are unbiased, k2 and k3 are ≥ 0; as a loss, k2 alone has the gradient of the KL in expectation. In k3, d
    is cut at ±20 *before* the exponential (cut after it, the gradient would be NaN) and the value at 10.
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
