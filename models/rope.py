"""Rotary positions: frequencies, their stretching for long contexts, and the turning of queries and keys."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import RopeScaling

# Policies made here have this θ and no scaling: their frequencies keep the one rounding that recorded runs had, which
# differs from transformers' by a unit in the last place. RopeScaling("linear", 1.0) is the same rope in its rounding.
UNSCALED_THETA = 10_000.0


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Float[np.ndarray, " h"], float]:
    """Angle per position of each channel pair, f_i = θ^(-2i/H) stretched by `scaling`, and the factor on cos and sin.

        linear: f / factor
        llama3: f / factor where the wavelength 2π/f is long, f where it is short, a blend of both between
        yarn:   a blend of f / factor and f by how many turns a pair makes in pretraining's context

    Float32, rounded step by step as transformers does: one unit in the last place of f is up to 5e-4 rad at position
    8192, and moves logits by as much.
    Su et al. 2021, RoFormer, eq. 15; Llama 3.1's release; Peng et al. 2023, YaRN, eqs. 17 to 23.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    stretch = (theta ** exponent.astype(np.float64)).astype(np.float32)
    inv_freq = np.float32(1) / stretch
    if scaling is None:
        return inv_freq, 1.0
    if scaling.kind == "linear":
        return inv_freq / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(inv_freq, scaling), 1.0
    return _yarn_frequencies(stretch, theta, scaling), _yarn_attention_factor(scaling)


def _llama3_frequencies(inv_freq: Float[np.ndarray, " h"], scaling: RopeScaling) -> Float[np.ndarray, " h"]:
    length, factor, low, high = (
        np.float32(x)
        for x in (scaling.original_length, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
    )
    wavelength = np.float32(2 * math.pi) / inv_freq
    blend = (length / wavelength - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    long, short = wavelength > length / low, wavelength < length / high
    return np.where(long, inv_freq / factor, np.where(short, inv_freq, blended))


def _yarn_frequencies(stretch: Float[np.ndarray, " h"], theta: float, scaling: RopeScaling) -> Float[np.ndarray, " h"]:
    half = len(stretch)

    def pair_that_turns(times: float) -> float:
        return half * math.log(scaling.original_length / (times * 2 * math.pi)) / math.log(theta)

    begin, end = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, 2 * half - 1)
    if begin == end:
        end += 0.001  # as transformers: the ramp becomes a step
    ramp = (np.arange(half, dtype=np.float32) - np.float32(begin)) / np.float32(end - begin)
    kept = 1 - np.clip(ramp, 0, 1)
    stretched = np.float32(1) / (np.float32(scaling.factor) * stretch)
    return stretched * (1 - kept) + np.float32(1) / stretch * kept


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """0.1 ln(factor) + 1 (eq. 22), or the quotient of two such with weights on the logarithm, unless it is given."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)


def rope_angles(
    position: Int[Array, "B T"], head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Cosine and sine of position · frequency, in float32, times YaRN's attention factor (see `rope_frequencies`).

    Called once per forward pass, outside the layers: no table, so no length after which positions are clamped.
    """
    if scaling is None and theta == UNSCALED_THETA:
        inv_freq, factor = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim), 1.0
    else:
        inv_freq, factor = rope_frequencies(head_dim, theta, scaling)
    angle = position.astype(jnp.float32)[..., None] * inv_freq
    if factor == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return factor * jnp.cos(angle), factor * jnp.sin(angle)


def rope(x: Float[Array, "B T n H"], cos: Float[Array, "B T h"], sin: Float[Array, "B T h"]) -> Float[Array, "B T n H"]:
    """Turn channel pairs (i, i + H/2) by the position's angle: the half-split layout of Hugging Face."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
