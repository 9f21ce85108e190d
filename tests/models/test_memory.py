"""Law: by the compiler's own account of a gradient step, [B T V] never exists, and each remat policy saves memory.

Nothing is run: `compiled.memory_analysis()` tells how many bytes of temporary buffers the program allocates.
"""

import dataclasses

import jax
import jax.numpy as jnp

from models import transformer
from models.config import ModelConfig
from models.logprobs import token_logp

ROWS, LENGTH = 4, 64
WIDE = ModelConfig(vocab_size=4096, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)
DEEP = ModelConfig(vocab_size=32, d_model=64, n_layers=4, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=256)


def temporary_bytes(config: ModelConfig, chunk: int) -> int:
    def loss(params, tokens, segment, position):
        hidden = transformer.apply(params, config, tokens, segment, position)
        logp, entropy = token_logp(params, hidden, tokens, chunk=chunk)
        return jnp.sum(jnp.where(segment > 0, logp + entropy, 0.0))

    params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    row = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    return jax.jit(jax.grad(loss)).lower(params, row, row, row).compile().memory_analysis().temp_size_in_bytes


def test_chunked_log_probabilities_never_hold_all_logits():
    all_logits = ROWS * LENGTH * WIDE.vocab_size * 4  # 4.2 MB; a chunk of 2 tokens a row has 1/32
    whole, chunked = temporary_bytes(WIDE, LENGTH), temporary_bytes(WIDE, 2)
    assert chunked < 0.75 * all_logits < all_logits <= whole, (chunked, all_logits, whole)


def test_remat_policies_are_ordered_by_memory():
    """Saved by layer: everything; the matrix products; nothing but the layer's input. Few layers, which else unroll."""
    by_policy = {p: temporary_bytes(dataclasses.replace(DEEP, remat=p), LENGTH) for p in ("none", "dots", "full")}
    assert by_policy["none"] > 1.2 * by_policy["dots"] and by_policy["dots"] > 1.2 * by_policy["full"], by_policy
