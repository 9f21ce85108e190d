"""Parameters for tests, drawn by NumPy, so that nothing is compiled for them; and their comparison."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from models import transformer
from models.config import ModelConfig


@cache
def drawn(config: ModelConfig, seed: int = 0) -> dict:
    """The tree of `transformer.init`: matrices and biases N(0, 1/D), norms N(1, .01). Nothing is 0 or 1, so that a
    forgotten bias or norm weight shows.
    """
    shapes = jax.eval_shape(partial(transformer.init, config), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def one(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.standard_normal(x.shape, np.float32)
        is_norm = path[-1].key.endswith("norm")
        return jnp.asarray(1 + 0.1 * noise if is_norm else np.float32(config.d_model**-0.5) * noise)

    return jax.tree_util.tree_map_with_path(one, shapes)


def same(a, b) -> bool:
    """Whether two trees have the same structure and equal numbers."""
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))
