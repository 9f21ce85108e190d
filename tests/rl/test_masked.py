"""Nothing off the mask reaches a value or a gradient (CASES A6, A12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rl import masked

MASK = jnp.array([1, 0, 1, 1, 0, 1], bool)


@pytest.mark.parametrize("value", [0.1, 0.3, 1.1, 10.1, 27.7, 100.1])
def test_equal_numbers_are_whitened_to_0(value):
    """Their mean is off by a rounding, of which √eps would make an advantage."""
    mask = np.arange(1000) % 7 > 0
    x = jnp.where(mask, jnp.float32(value), jnp.nan)
    np.testing.assert_array_equal(masked.whiten(x, mask), 0)
    assert float(jnp.abs(masked.whiten(x.at[1].add(0.1), mask)).max()) > 1


def test_whiten():
    # 2, 4, 6, 8: mean 5, biased std √5 = 2.2360680; -3 / 2.2360680 = -1.3416
    out = masked.whiten(jnp.array([2, jnp.inf, 4, 6, jnp.nan, 8]), MASK)
    assert_allclose(out, [-1.3416408, 0, -0.4472136, 0.4472136, 0, 1.3416408], rtol=1e-6)


def test_mean_and_variance():
    x, m = jnp.arange(1.0, 6.0), jnp.array([1, 1, 0, 0, 1], bool)
    # 1, 2, 5: mean 8/3; deviations² 25/9 + 4/9 + 49/9 = 26/3, over 2
    assert_allclose(masked.mean_var(x, m, ddof=1), (8 / 3, 13 / 3), rtol=1e-6)
    assert masked.mean_var(x, m & False, ddof=1) == (0, 0)
    assert masked.mean_var(x, jnp.arange(5) == 2, ddof=1) == (3, 0)
    # a row padded with garbage: 2, not 51
    mean = masked.mean(jnp.array([3.0, 1, 100, 100]), jnp.array([1, 1, 0, 0], bool))
    assert (float(mean.total), float(mean.count)) == (4, 2)
    assert float(masked.maximum(jnp.array([jnp.nan, -3, -7]), jnp.array([0, 1, 1], bool)).value) == -3
    assert float(masked.maximum(x, m & False).value) == -jnp.inf


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(
    "reduce",
    [
        lambda x, m: jnp.sum(masked.keep(x, m) ** 2),
        lambda x, m: masked.mean(x, m).total,
        lambda x, m: masked.maximum(x, m).value,
        lambda x, m: masked.mean_var(x, m)[1],
        lambda x, m: jnp.sum(masked.whiten(x, m) ** 3),
    ],
)
def test_garbage_under_the_mask_changes_no_bit(reduce, garbage):
    clean = jnp.array([2.0, 0, 4, 7, 0, 8])
    dirty = jnp.where(MASK, clean, garbage)
    assert_array_equal(reduce(dirty, MASK), reduce(clean, MASK))
    assert_array_equal(jax.grad(reduce)(dirty, MASK), jax.grad(reduce)(clean, MASK))


def test_segment_sum_is_by_row_and_by_run():
    segment = jnp.array([[7, 7, 2, 0], [7, 2, 2, 2]])
    assert_array_equal(masked.segment_sum(jnp.arange(8.0).reshape(2, 4), segment), [[1, 1, 2, 3], [4, 18, 18, 18]])
