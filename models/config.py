"""The shape of one decoder of the Llama / Qwen family, and the few choices that no Hugging Face family has."""

import dataclasses
from typing import Literal

Init = Literal["normal", "mimetic"]
Remat = Literal["none", "full", "dots"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static description of a decoder: hashable, so it can be a static argument of `jax.jit`.

    `dtype` is the compute dtype; parameters are always float32 masters, and norms, softmax and logits are float32.
    `remat` names what the backward pass recomputes: nothing, whole layers, or all but the matrix products.
    `key_shift` and `init="mimetic"` make copying emerge early in tiny models; no Hugging Face family has them.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = False
    attention_bias: bool = False  # on q, k and v, as Qwen2; never on the output
    key_shift: bool = False
    init: Init = "normal"
    dtype: str = "float32"
    remat: Remat = "none"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, want at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"got n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}; want n_kv_heads to divide n_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, want an even number (RoPE turns pairs of channels)")
        for name, choices in (
            ("init", ("normal", "mimetic")),
            ("dtype", ("float32", "bfloat16")),
            ("remat", ("none", "full", "dots")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, want one of {choices}")

    @property
    def groups(self) -> int:
        """Query heads that share one kv head."""
        return self.n_heads // self.n_kv_heads

    @property
    def embed_scale(self) -> float:
        """Factor on embeddings at the input: √D with the mimetic initialisation of a tied table, else 1."""
        return self.d_model**0.5 if self.init == "mimetic" and self.tie_embeddings else 1.0
