"""The tiny models whose logits are pinned: each as we describe it and as transformers does."""

import dataclasses
from typing import Any

import numpy as np

from models.config import LayerSpec, ModelConfig, RopeScaling

ROWS, TOKENS = 2, 24


@dataclasses.dataclass(frozen=True)
class Family:
    """`ours` and the transformers config (`model_type`, `theirs`) say the same; `jumps`: positions leave gaps."""

    ours: ModelConfig
    model_type: str
    theirs: dict[str, Any]
    jumps: bool = True


# Heads times their width is no family's model width here, so a reshape that takes one for the other shows.
_SHAPE = dict(vocab_size=40, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=24)
_THEIRS = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=24,
    max_position_embeddings=32768,
)


def _family(
    model_type: str, *, rope: dict[str, Any], jumps: bool = True, theirs: dict[str, Any], **ours: Any
) -> Family:
    config = ModelConfig(**_SHAPE, rope_theta=rope["rope_theta"], rms_eps=1e-5, **ours)
    tied = dict(tie_word_embeddings=config.tie_embeddings, rms_norm_eps=config.rms_eps, rope_parameters=rope)
    return Family(config, model_type, {**_THEIRS, **tied, **theirs}, jumps)


def _rope(kind: str = "default", theta: float = 500_000.0, **numbers: Any) -> dict[str, Any]:
    return dict(rope_type=kind, rope_theta=theta, **numbers)


_YARN = dict(factor=4.0, original_max_position_embeddings=2048)
FAMILIES: dict[str, Family] = {
    "smollm2": _family("llama", rope=_rope(theta=100_000.0), theirs={}),
    # At this θ a rope without scaling keeps a rounding of our own (models/rope.py): factor 1 asks for theirs.
    "llama_default_theta": _family(
        "llama", rope=_rope(theta=10_000.0), theirs={}, rope_scaling=RopeScaling("linear", 1.0), tie_embeddings=False
    ),
    "llama_llama3": _family(
        "llama",
        rope=_rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
        ),
        theirs={},
        rope_scaling=RopeScaling("llama3", 8.0, 1024),
    ),
    "llama_linear": _family(
        "llama",
        rope=_rope("linear", factor=2.5),
        theirs={},
        rope_scaling=RopeScaling("linear", 2.5),
        tie_embeddings=False,
    ),
    "llama_yarn": _family(
        "llama", rope=_rope("yarn", 10_000.0, **_YARN), theirs={}, rope_scaling=RopeScaling("yarn", 4.0, 2048)
    ),
    "qwen3_yarn_mscale": _family(
        "qwen3",
        rope=_rope("yarn", 1e6, **_YARN, beta_fast=24.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.3, truncate=False),
        theirs=dict(attention_bias=False),
        qk_norm=True,
        rope_scaling=RopeScaling(
            "yarn", 4.0, 2048, beta_fast=24.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.3, truncate=False
        ),
    ),
    # The length of pretraining at the top, beside another in the rope: transformers takes the one at the top.
    "qwen3_yarn_top": _family(
        "qwen3",
        rope=_rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=16384),
        theirs=dict(attention_bias=False, original_max_position_embeddings=2048),
        qk_norm=True,
        rope_scaling=RopeScaling("yarn", 4.0, 2048),
    ),
    "qwen2": _family("qwen2", rope=_rope(theta=1e6), theirs={}, attention_bias=True),
    "qwen3": _family(
        "qwen3", rope=_rope(theta=1e6), theirs=dict(attention_bias=False), qk_norm=True, tie_embeddings=False
    ),
    # The second layer's window only: full attention and windows in one scan.
    "qwen2_window": _family(
        "qwen2",
        rope=_rope(theta=1e6),
        theirs=dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
        jumps=False,
        attention_bias=True,
        layers=(LayerSpec(), LayerSpec(window=5)),
    ),
    "mistral_window": _family(
        "mistral", rope=_rope(), theirs=dict(sliding_window=7), jumps=False, layers=(LayerSpec(7),) * 2
    ),
}


def inputs(family: Family) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and positions [rows tokens], both int32.

    One row starts at 0 and crosses 4096 and 8192 (by jumps, unless a window would tell), the other starts at 4090.
    """
    tokens = np.random.default_rng(7).integers(0, family.ours.vocab_size, (ROWS, TOKENS), dtype=np.int32)
    third = TOKENS // 3
    jumping = np.concatenate([begin + np.arange(third) for begin in (0, 4092, 8188)])
    straight = 8180 + np.arange(TOKENS)
    position = np.stack([jumping if family.jumps else straight, 4090 + np.arange(TOKENS)])
    return tokens, position.astype(np.int32)
