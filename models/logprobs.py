"""Log-probabilities of tokens, in chunks: an array [B T V] never exists. The one place where targets are shifted."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.transformer import Params, head_logits


def token_logp(
    params: Params,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    *,
    n_ids: int | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    chunk: int = 256,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each target and entropy of its distribution, both in nats at the sampling temperature τ.

        logp[b, t] = log softmax(W hidden[b, t-1] / τ)[targets[b, t]]        logp[b, 0] = entropy[b, 0] = 0

    Both inputs have full length T; the shift by one happens here. A segment's first token is scored from the segment
    before it: finite, meaningless, and the caller's to mask. The softmax is over the first `n_ids` rows of W, those
    that the sampler draws from (`ModelConfig.n_ids`; None: all). `chunk`: tokens of each row whose logits exist at a
    time; with more than one chunk they are computed again in the backward pass.
    """
    rows, length, width = hidden.shape
    if targets.shape != (rows, length):
        raise ValueError(f"targets: got shape {targets.shape}, want {(rows, length)}, as hidden without its last axis")
    if chunk < 1:
        raise ValueError(f"chunk: got {chunk}, want at least 1")
    if length == 1:
        return jnp.zeros((rows, 1)), jnp.zeros((rows, 1))

    def score(h: Float[Array, "B c D"], target: Int[Array, "B c"]) -> tuple[Float[Array, "B c"], Float[Array, "B c"]]:
        z = head_logits(params, h, n_ids) / temperature
        logz = jax.nn.logsumexp(z, axis=-1)
        logp = jnp.take_along_axis(z, target[..., None], axis=-1)[..., 0] - logz
        # Mean logit first, then one subtraction: p·log p needs no second [B c V].
        return logp, logz - jnp.sum(jax.nn.softmax(z, axis=-1) * z, axis=-1)

    source, target = hidden[:, :-1], targets[:, 1:]
    if chunk >= length - 1:
        logp, entropy = score(source, target)
    else:
        n_chunks = -(-(length - 1) // chunk)
        extra = n_chunks * chunk - (length - 1)
        source = jnp.pad(source, ((0, 0), (0, extra), (0, 0))).reshape(rows, n_chunks, chunk, width)
        target = jnp.pad(target, ((0, 0), (0, extra))).reshape(rows, n_chunks, chunk)
        again = jax.checkpoint(score)
        logp, entropy = jax.lax.map(lambda xs: again(*xs), (source.swapaxes(0, 1), target.swapaxes(0, 1)))
        logp, entropy = (x.swapaxes(0, 1).reshape(rows, -1)[:, : length - 1] for x in (logp, entropy))
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (logp, entropy))
