"""Random weights of a config without its initialisation, which costs a compilation, and their comparison."""

import jax
import numpy as np

from models import transformer
from models.config import ModelConfig


def random_params(config: ModelConfig) -> dict:
    """NumPy float32 arrays of the right shapes; the same at every call."""
    shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)


def same(a, b) -> bool:
    """Whether two trees have the same structure and equal numbers."""
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))
