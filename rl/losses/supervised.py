"""Cross-entropy on the tokens of demonstrations that an agent would have sampled."""

from jaxtyping import Array, Float


def cross_entropy(logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """-log π(token) in nats, per token, unreduced."""
    return -logp
