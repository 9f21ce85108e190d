"""The shape of one decoder of the Llama / Qwen family, and the few choices that no Hugging Face family has."""

import dataclasses
import math
from typing import Literal

Init = Literal["normal", "mimetic"]
Remat = Literal["none", "full", "dots"]
LORA_TARGETS = ("wq", "wk", "wv", "wo", "gate", "up", "down")


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


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which matrices of every layer get a low-rank adapter: W' = W + alpha/rank · A B (Hu et al. 2021, LoRA, eq. 3).

    Kept apart from `ModelConfig`: the adapters that a tree of parameters holds say by themselves what is computed.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank: got {self.rank}, want at least 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"lora.alpha: got {self.alpha}, want a finite number above 0")
        unknown = [name for name in self.targets if name not in LORA_TARGETS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets: got {self.targets}, want one or more of {LORA_TARGETS}, each once")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank
