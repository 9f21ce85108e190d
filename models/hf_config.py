"""Hugging Face's config.json <-> ModelConfig, for Llama, Qwen2 and Qwen3.

A key that would change the computation and is not supported is an error, never ignored. Not covered: biases on the
output or the MLP, rotary embeddings on a part of the head, rope scaling of other kinds than `RopeScaling` has.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from models.config import LayerSpec, ModelConfig, RopeScaling
from models.rope import UNSCALED_THETA

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Ours -> theirs, of the numbers of a scaled rope; which of them a kind reads.
_ROPE_NAMES = {
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
_ROPE_READ = {
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_length", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """The ModelConfig of a folder's config.json. Errors (ValueError, FileNotFoundError) name the file."""
    file = pathlib.Path(directory) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; want a Hugging Face model folder (config.json, *.safetensors)")
    try:
        return read_config(json.loads(file.read_text()))
    except ValueError as err:
        raise ValueError(f"{file}: {err}") from err


def read_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Our config for a Hugging Face one; whatever would change the computation and is not supported is a ValueError."""
    kind = theirs.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type: got {kind!r}, want one of {sorted(ARCHITECTURES)}")
    others = set(theirs.get("architectures") or ()) - {ARCHITECTURES[kind]}
    if others:
        raise ValueError(f"architectures: got {sorted(others)}, want {ARCHITECTURES[kind]!r}: a model with its head")
    refused = {
        "hidden_act": theirs.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(theirs.get("attention_bias", False)),  # theirs has one on the output too
        "mlp_bias": bool(theirs.get("mlp_bias", False)),
        "quantization_config": theirs.get("quantization_config") is not None,
        "partial_rotary_factor": theirs.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, bad in refused.items():
        if bad:
            raise ValueError(f"{kind} config: got {key}={theirs[key]!r}, which the decoder does not compute")
    need = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [key for key in (*need, "rms_norm_eps") if key not in theirs]
    if missing:
        raise ValueError(f"{kind} config: got no {', '.join(missing)}; want a whole config.json")
    heads = theirs["num_attention_heads"]
    default_dim = 128 if kind == "qwen3" else theirs["hidden_size"] // heads
    theta, scaling = _rope(theirs)
    return ModelConfig(
        vocab_size=theirs["vocab_size"],
        d_model=theirs["hidden_size"],
        n_layers=theirs["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=theirs.get("num_key_value_heads") or heads,
        head_dim=theirs.get("head_dim") or default_dim,
        d_ff=theirs["intermediate_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=theirs["rms_norm_eps"],
        tie_embeddings=theirs.get("tie_word_embeddings", False),
        qk_norm=kind == "qwen3",
        attention_bias=kind == "qwen2",
        layers=_layers(kind, theirs),
    )


def _layers(kind: str, theirs: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """A spec per layer where the config asks for sliding windows, else ().

    Qwen's rule: `use_sliding_window` lets the layers from `max_window_layers` on slide; `layer_types` overrides it.
    """
    n = theirs["num_hidden_layers"]
    window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None
    types = theirs.get("layer_types")
    if types is None:
        full = n if window is None else theirs.get("max_window_layers", 28)
        types = [_LAYER_TYPES[i >= full] for i in range(n)]
    if len(types) != n or set(types) - set(_LAYER_TYPES):
        raise ValueError(
            f"layer_types: got {len(types)} entries of {sorted(set(types))}, want {n} entries of {list(_LAYER_TYPES)}"
        )
    if "sliding_attention" not in types:
        return ()
    if window is None or kind == "llama":
        raise ValueError(
            f"{kind} config: got sliding layers with use_sliding_window={theirs.get('use_sliding_window')}, "
            f"sliding_window={theirs.get('sliding_window')}; want a Qwen config that sets both, or none"
        )
    return tuple(LayerSpec(window if name == "sliding_attention" else None) for name in types)


def unscaled(theta: float) -> RopeScaling | None:
    """How a rope that is not scaled is written, so that its frequencies are rounded as theirs (see models/rope.py)."""
    return RopeScaling("linear", 1.0) if theta == UNSCALED_THETA else None


def _rope(theirs: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """θ and its scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    nested, legacy = theirs.get("rope_parameters") or {}, theirs.get("rope_scaling") or {}
    values = {float(d["rope_theta"]) for d in (theirs, nested, legacy) if d.get("rope_theta") is not None}
    if len(values) != 1:
        raise ValueError(f"rope_theta: got {sorted(values)}, want exactly one value, at the top or in rope_parameters")
    found = {_scaling(d, theirs) for d in (nested, legacy) if d}
    if len(found) > 1:
        raise ValueError(f"rope: got rope_parameters={nested} and rope_scaling={legacy}, want them to agree")
    theta, scaling = values.pop(), found.pop() if found else None
    return theta, scaling or unscaled(theta)


def _scaling(theirs: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = theirs.get("rope_type", theirs.get("type", "default"))
    if kind == "default":
        kind = None
    elif kind not in _ROPE_READ:
        raise ValueError(f"rope scaling: got {kind!r}, want one of {['default', *_ROPE_READ]}")
    unknown = set(theirs) - {*_ROPE_NAMES.values(), "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown or theirs.get("partial_rotary_factor", 1.0) != 1.0:
        odd = sorted(unknown) or ["partial_rotary_factor"]
        raise ValueError(f"rope scaling: got {odd[0]}={theirs[odd[0]]!r}, which the decoder does not compute")
    if kind is None:
        return None
    longest = config.get("max_position_embeddings")
    given = {ours: theirs.get(_ROPE_NAMES[ours]) for ours in _ROPE_READ[kind]}
    if "original_length" in given and given["original_length"] is None:
        given["original_length"] = longest
    if kind == "yarn" and given["factor"] is None and longest and given["original_length"]:
        given["factor"] = longest / given["original_length"]
    if given["factor"] is None:
        raise ValueError(f"rope scaling {kind!r}: got no factor in {dict(theirs)}, want one")
    return RopeScaling(kind, **{name: value for name, value in given.items() if value is not None})


# --- ours -> theirs -------------------------------------------------------------------------------------------------


def family(config: ModelConfig) -> str:
    """The Hugging Face model type that computes what `config` says; a ValueError names the option that none has."""
    windows = {layer.window for layer in config.layers} - {None}
    llama = not (config.qk_norm or config.attention_bias)
    foreign = [
        text
        for text, present in (
            ("key_shift=True", config.key_shift),
            ("init='mimetic' with tied embeddings (it scales the input)", config.embed_scale != 1.0),
            ("qk_norm=True with attention_bias=True", config.qk_norm and config.attention_bias),
            (
                f"attention_bias=True with head_dim={config.head_dim} and d_model={config.d_model}",
                config.attention_bias and config.head_dim * config.n_heads != config.d_model,
            ),
            (f"layers with windows {sorted(windows)}", len(windows) > 1),
            ("sliding windows without qk_norm or attention_bias", bool(windows) and llama),
        )
        if present
    ]
    if foreign:
        raise ValueError(f"no Hugging Face family has {', '.join(foreign)}; keep this policy as an Orbax checkpoint")
    return "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"


def describe(config: ModelConfig) -> dict[str, Any]:
    """config.json of `config`, readable by transformers 4 and 5. Errors: those of `family`."""
    kind = family(config)
    scaling, longest = config.rope_scaling, 32768
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling == RopeScaling("linear", 1.0):
        scaling = None
    if scaling is not None:
        rope = {"rope_type": scaling.kind}
        rope |= {_ROPE_NAMES[name]: getattr(scaling, name) for name in _ROPE_READ[scaling.kind]}
        rope = {name: value for name, value in rope.items() if value is not None}
        if scaling.original_length:
            longest = max(scaling.original_length + 1, round(scaling.original_length * scaling.factor))
    described = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        # Readers before and after transformers 5 look in different places.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": longest,
        "dtype": "float32",
        "torch_dtype": "float32",
    } | ({} if kind == "qwen2" else {"attention_bias": False})
    if kind != "llama":
        described |= _describe_layers(config)
    return described


def _describe_layers(config: ModelConfig) -> dict[str, Any]:
    windows = [layer.window for layer in config.layers] or [None] * config.n_layers
    window = next((w for w in windows if w is not None), None)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": windows.index(window) if window is not None else config.n_layers,
        "layer_types": [_LAYER_TYPES[w is not None] for w in windows],
    }
