"""Drawing one token per lane, and the log-probability under which it was drawn.

The log-probability is that of the distribution that was drawn from. Without truncation that is the full softmax at the
lane's temperature, which is what the learner computes: training samples so alone. Top-k, top-p and min-p are for
evaluation: they cut the softmax to the tokens that they keep, whose probabilities are made to sum to 1 again, and a
truncated token's log-probability is under that. Greedy is the exception, since what it draws from has no probabilities:
it reports the full softmax at its temperature.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

LEAST_TEMPERATURE = 1e-4  # logits over less than that overflow float32, and nothing could be drawn from them


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a session draws its tokens. top_k = 0, top_p = 1 and min_p = 0 cut nothing.

    All are of the softmax at `temperature`. A token is drawn from the `top_k` likeliest (the lower id of equals first);
    of these, from the fewest likeliest whose share of them reaches `top_p` (Holtzman et al. 2020, section 3.1); and of
    these, from those with p >= min_p · max p (Nguyen et al. 2024, Min-p sampling, section 3). The likeliest always
    stays. Errors: ValueError.
    """

    temperature: float = 1.0
    greedy: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature: got {self.temperature}, want at least {LEAST_TEMPERATURE}; for the likeliest token use "
                "greedy=True"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k: got {self.top_k}, want 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, want 0 < top_p <= 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(
                f"min_p: got {self.min_p}, want 0 (off) to 1: a share of the likeliest token's probability"
            )

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from less than the full softmax."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


class Cut(NamedTuple):
    """How each lane's distribution is truncated: the fields of its `Sampling`."""

    top_k: Int[Array, "S"]
    top_p: Float[Array, "S"]
    min_p: Float[Array, "S"]


def sample(
    logits: Float[Array, "S V"],
    keys: PRNGKeyArray,
    temperature: Float[Array, "S"],
    greedy: Bool[Array, "S"],
    cut: Cut | None = None,
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """One token per lane and its log-probability in nats.

        logp = log softmax(logits / temperature)[token], over the tokens that `cut` keeps; all without one

    Lane s draws one uniform number u from keys[s] and takes the first token whose cumulative probability reaches u; a
    greedy lane takes the likeliest token (the first of equals), whatever `cut` says. None compiles truncation away; it
    changes no draw of a lane that it does not cut. A logit of -inf is a token that cannot be drawn; want one that is
    finite.
    """
    z = logits.astype(jnp.float32) / temperature[:, None]
    top = jnp.max(z, axis=-1, keepdims=True)
    weight = jnp.exp(z - top)
    kept = weight if cut is None else jnp.where(_kept(z, weight, cut) | greedy[:, None], weight, 0.0)
    logp = z - top - jnp.log(jnp.sum(kept, axis=-1, keepdims=True))
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


def _kept(z: Float[Array, "S V"], weight: Float[Array, "S V"], cut: Cut) -> Bool[Array, "S V"]:
    """The tokens that `Sampling` describes; weight = p / max p."""
    size = z.shape[-1]
    order = jnp.argsort(-z, axis=-1)
    ranked = jnp.take_along_axis(z, order, axis=-1)
    limit = jnp.where(cut.top_k > 0, cut.top_k, size)
    keep = jnp.arange(size) < limit[:, None]
    probs = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    # top_p = 1 must keep everything, whatever the rounding of the cumulative sum.
    keep &= (before < cut.top_p[:, None]) | (cut.top_p[:, None] >= 1.0)
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1) & (weight >= cut.min_p[:, None])
