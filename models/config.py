"""The shape of one decoder of the Llama / Qwen family, and the few choices that no Hugging Face family has."""

import dataclasses
import math
from typing import Literal

Init = Literal["normal", "mimetic"]
Remat = Literal["none", "full", "dots"]
Attend = Literal["auto", "xla", "cudnn", "splash"]
HEADS = ("value_head", "orm_head", "prm_head")  # on the trunk (models/heads.py), by their names in the parameters
LORA_TARGETS = ("wq", "wk", "wv", "wo", "gate", "up", "down")

# The window of full attention among layers that have windows: more tokens than any sequence has.
FULL = 2**30
# Which numbers of a RopeScaling each kind reads; any other must stay at its default.
ROPE_READS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_length", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the length of pretraining; `attention.rope_frequencies` computes it.

    `original_length` is that length in tokens. `attention_factor` multiplies cosine and sine; None: as the YaRN paper
    derives it from `factor`, or from `mscale` and `mscale_all_dim` where both are given.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_READS:
            raise ValueError(
                f"rope_scaling.kind: got {self.kind!r}, want one of {tuple(ROPE_READS)}; "
                "a rope left unscaled is rope_scaling=None"
            )
        read = ROPE_READS[self.kind]
        for field in dataclasses.fields(self)[2:]:
            if field.name not in read and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"rope_scaling.{field.name}: got {getattr(self, field.name)!r}, which kind={self.kind!r} does not "
                    f"read; it reads {', '.join(read)}: leave the others out"
                )
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"rope_scaling.{name}: got {value}, want a finite number above 0")
        if "original_length" in read and (self.original_length is None or self.original_length < 1):
            raise ValueError(
                f"rope_scaling.original_length: got {self.original_length}, want the tokens of pretraining's context, "
                f"at least 1: kind={self.kind!r} needs it (original_max_position_embeddings in Hugging Face's words)"
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling: got low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}; "
                "want low below high"
            )
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"rope_scaling: got beta_fast={self.beta_fast}, beta_slow={self.beta_slow}; want fast at least slow"
            )


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What sets one layer apart from the others: today its sliding window.

    `window`: a token sees itself and the window - 1 tokens before it; None: all before it.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window < FULL:
            raise ValueError(f"window: got {self.window}, want 1 token to {FULL - 1}, or None for full attention")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Static description of a decoder: hashable, so it can be a static argument of `jax.jit`.

    `dtype` is the compute dtype; parameters are always float32 masters, and norms, softmax and logits are float32.
    `remat` names what the backward pass recomputes: nothing, whole layers, or all but the matrix products.
    `key_shift` and `init="mimetic"` make copying emerge early in tiny models; no Hugging Face family has them.
    `layers` has one entry a layer, or none if every layer attends to all before it. `attention` names the kernel over
    packed rows (`attention.attend`); "auto" chooses by platform. `n_ids`: how many rows of the table are ids of the
    tokenizer, the first ones (None: all); no other has any probability (`transformer.head_logits`).
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
    rope_scaling: RopeScaling | None = None
    layers: tuple[LayerSpec, ...] = ()
    attention: Attend = "auto"
    n_ids: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, want at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"got n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}; want n_kv_heads to divide n_heads"
            )
        if self.n_ids is not None and not 1 <= self.n_ids <= self.vocab_size:
            raise ValueError(f"n_ids: got {self.n_ids}, want 1 to vocab_size={self.vocab_size}, or None for all")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta: got {self.rope_theta}, want more than 0")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, want an even number (RoPE turns pairs of channels)")
        for name, choices in (
            ("init", ("normal", "mimetic")),
            ("dtype", ("float32", "bfloat16")),
            ("remat", ("none", "full", "dots")),
            ("attention", ("auto", "xla", "cudnn", "splash")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, want one of {choices}")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(f"rope_scaling: got {self.rope_scaling!r}, want a RopeScaling or None")
        if not isinstance(self.layers, tuple) or not all(isinstance(layer, LayerSpec) for layer in self.layers):
            raise ValueError(f"layers: got {self.layers!r}, want a tuple of LayerSpec")
        if self.layers and len(self.layers) != self.n_layers:
            raise ValueError(
                f"layers: got {len(self.layers)} entries with n_layers={self.n_layers}; want one a layer, or none"
            )

    @property
    def groups(self) -> int:
        """Query heads that share one kv head."""
        return self.n_heads // self.n_kv_heads

    @property
    def windows(self) -> tuple[int, ...]:
        """How far back each layer sees, in tokens, `FULL` for all; empty if no layer has a sliding window."""
        if all(layer.window is None for layer in self.layers):
            return ()
        return tuple(FULL if layer.window is None else layer.window for layer in self.layers)

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
