"""Drawing one token per lane, and the log-probability under which it was drawn.

The log-probability is always that of the *full* softmax at the lane's temperature, which is what the learner computes.
Top-k and top-p cut the set that is drawn from, not the log-probability: for evaluation only, refused in training.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a session draws its tokens. top_k = 0 and top_p = 1 cut nothing."""

    temperature: float = 1.0
    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: got {self.temperature}, want > 0; for the likeliest token use greedy=True")
        if self.top_k < 0:
            raise ValueError(f"top_k: got {self.top_k}, want 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, want 0 < top_p <= 1")

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from less than the full softmax."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)


def sample(
    logits: Float[Array, "S V"],
    keys: PRNGKeyArray,
    temperature: Float[Array, "S"],
    greedy: Bool[Array, "S"],
    top_k: Int[Array, "S"] | None = None,
    top_p: Float[Array, "S"] | None = None,
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """One token per lane and its log-probability in nats, log softmax(logits / temperature)[token].

    Lane s draws one uniform number u from keys[s] and takes the first token whose cumulative probability reaches u; a
    greedy lane takes the likeliest token (the first of equals), with its log-probability at the temperature as given.
    Pass top_k and top_p both or neither; None compiles them away. They change no draw of a lane that they do not cut.
    """
    z = logits.astype(jnp.float32) / temperature[:, None]
    top = jnp.max(z, axis=-1, keepdims=True)
    weight = jnp.exp(z - top)
    logp = z - top - jnp.log(jnp.sum(weight, axis=-1, keepdims=True))
    kept = weight if top_k is None else jnp.where(_kept(z, top_k, top_p), weight, 0.0)
    reached = jnp.cumsum(kept, axis=-1)
    # 1 - u is in (0, 1]: a token of weight 0 is never the first to reach it. `kept > 0` guards against a cumulative sum
    # that rounds to a few ulp less than it was one token earlier.
    u = 1.0 - jax.vmap(jax.random.uniform)(keys)
    drawn = _first((reached >= u[:, None] * reached[:, -1:]) & (kept > 0))
    token = jnp.where(greedy, _first(z == top), drawn)
    return token, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0]


def _first(true: Bool[Array, "S V"]) -> Int[Array, "S"]:
    """Index of the first True of each row (the last index if there is none): on a CPU far cheaper than an argmax."""
    last = true.shape[-1] - 1
    return jnp.min(jnp.where(true, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def _kept(z: Float[Array, "S V"], top_k: Int[Array, "S"], top_p: Float[Array, "S"]) -> Bool[Array, "S V"]:
    """The k likeliest tokens, of which the fewest whose probabilities (renormalised) reach p; at least one."""
    size = z.shape[-1]
    order = jnp.argsort(-z, axis=-1)
    ranked = jnp.take_along_axis(z, order, axis=-1)
    limit = jnp.where(top_k > 0, top_k, size)
    keep = jnp.arange(size) < limit[:, None]
    probs = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # top_p = 1 must keep everything, whatever the rounding of the cumulative sum.
    keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)
