"""Law: RoPE's frequencies are those of the published tables, stretched by kind, and positions are exact in float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import RopeScaling
from models.rope import rope, rope_angles, rope_frequencies

LLAMA_31 = RopeScaling("llama3", 8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0)


def test_rope_turns_half_split_pairs_by_the_position():
    cos, sin = rope_angles(jnp.array([[2]]), 4, 100.0)  # inv_freq = 1, 100^(-1/2) = .1, so angles 2 and .2
    turned = rope(jnp.array([[[[1.0, 0.0, 0.0, 1.0]]]]), cos, sin)[0, 0, 0]
    # Pairs are (0, 2) and (1, 3): (1, 0) → (cos 2, sin 2); (0, 1) → (-sin .2, cos .2).
    np.testing.assert_allclose(turned, [np.cos(2), -np.sin(0.2), np.sin(2), np.cos(0.2)], rtol=1e-6)


def test_g2_llama3_scaling_keeps_the_short_waves_and_divides_the_long():
    """CASES G2: wavelengths under 8192 / 4 stay, over 8192 are divided by 8, those between are blended."""
    plain, _ = rope_frequencies(128, 5e5, None)
    got, factor = rope_frequencies(128, 5e5, LLAMA_31)
    assert factor == 1.0 and got.dtype == np.float32
    np.testing.assert_array_equal(got[:29], plain[:29])
    np.testing.assert_array_equal(got[35:], plain[35:] / np.float32(8))
    assert (got[29:35] < plain[29:35]).all() and (got[29:35] > plain[29:35] / 8).all()
    np.testing.assert_allclose(got[[29, 32, 35, 63]], [0.00216657, 0.000524846, 9.55621e-5, 3.06893e-7], rtol=1e-5)
    np.testing.assert_allclose(plain[32], 0.00141421, rtol=1e-5)


@pytest.mark.parametrize("theta, value", [(1e6, 1e-3), (1e4, 1e-2)])
def test_g3_theta_is_the_one_given(theta, value):
    np.testing.assert_allclose(rope_frequencies(128, theta, None)[0][32], value, rtol=1e-6)  # θ^(-64/128)


def test_linear_scaling_divides_every_frequency():
    plain, scaled = (rope_frequencies(16, 1e5, s)[0] for s in (None, RopeScaling("linear", 4.0)))
    np.testing.assert_array_equal(scaled, plain / 4)


def test_yarn_blends_by_turns_and_scales_cosine_and_sine():
    """Pairs that turn over 32 times in 4096 tokens keep their frequency, those under once have it divided by 4.

    The bounds are rounded outwards to whole pairs: by up to θ^(1/32) = 1.33 in turns.
    """
    plain, _ = rope_frequencies(64, 1e4, None)
    got, factor = rope_frequencies(64, 1e4, RopeScaling("yarn", 4.0, original_length=4096))
    assert factor == pytest.approx(0.1 * np.log(4) + 1)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_allclose(got[turns > 44], plain[turns > 44], rtol=1e-6)
    np.testing.assert_allclose(got[turns < 0.7], plain[turns < 0.7] / 4, rtol=1e-6)
    cos, sin = rope_angles(jnp.array([[4100]]), 64, 1e4, RopeScaling("yarn", 4.0, original_length=4096))
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


@pytest.mark.parametrize(
    "numbers, factor",
    [
        (dict(attention_factor=1.25), 1.25),
        (dict(mscale=1.0, mscale_all_dim=1.0), 1.0),  # DeepSeek's: numerator and denominator alike
        (dict(mscale=1.0), 0.1 * np.log(4) + 1),  # one of the two alone is not read
    ],
)
def test_yarn_attention_factor(numbers, factor):
    scaling = RopeScaling("yarn", 4.0, original_length=4096, **numbers)
    assert rope_frequencies(64, 1e4, scaling)[1] == pytest.approx(factor)


@pytest.mark.parametrize("position", [0, 4095, 4096, 8191, 131_071])
def test_cosine_and_sine_are_exact_at_any_position(position):
    """The angle is the float32 product; cosine and sine of it are right to rounding, with no table that ends."""
    inv_freq, _ = rope_frequencies(32, 5e5, None)
    cos, sin = rope_angles(jnp.array([[position]]), 32, 5e5)
    angle = (np.float32(position) * inv_freq).astype(np.float64)
    np.testing.assert_allclose(cos[0, 0], np.cos(angle), rtol=0, atol=3e-7)
    np.testing.assert_allclose(sin[0, 0], np.sin(angle), rtol=0, atol=3e-7)
