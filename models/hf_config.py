"""Hugging Face's config.json <-> ModelConfig, for Llama, Qwen2 and Qwen3.

A key that would change the computation and is not supported is an error, and so is one that is not known: none is
ignored but those listed here. Not covered: biases on the output or the MLP, rotary embeddings on a part of the head,
rope scaling of other kinds than `RopeScaling` has.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from models.config import ROPE_READS, LayerSpec, ModelConfig, RopeScaling
from models.rope import UNSCALED_THETA

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_LAYER_TYPES = ("full_attention", "sliding_attention")
# The one value of these that the decoder computes.
_WANTED = {
    "hidden_act": "silu",
    "attention_bias": False,  # theirs has one on the output too
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "is_causal": True,  # null is not true either, and makes attention look both ways
    "rope_interleaved": False,
    "use_mrope": False,
}
_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"
)  # fmt: skip
_READ = {
    *(*_NEEDED, "model_type", "architectures", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "original_max_position_embeddings"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}
# Of training, of generation, of the writer, and what no decoder's class reads: nothing about the computation. So are
# names with an underscore before them.
_IDLE = {
    *("dtype", "torch_dtype", "transformers_version", "transformers.js_config", "name_or_path", "tokenizer_class"),
    *("unsloth_fixed", "unsloth_version", "is_llama_config", "initializer_range", "attention_dropout", "use_cache"),
    *("pretraining_tp", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "tie_encoder_decoder"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "torchscript"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_length", "max_new_tokens"),
}


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """The ModelConfig of a folder's config.json. Errors (ValueError, FileNotFoundError) name the file."""
    file = pathlib.Path(directory) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; want a Hugging Face model folder (config.json, *.safetensors)")
    try:
        theirs = json.loads(file.read_text())
        if not isinstance(theirs, dict):
            raise ValueError(f"got a {type(theirs).__name__}, want an object of keys and values")
        return read_config(theirs)
    except ValueError as err:
        raise ValueError(f"{file}: {err}") from err


def read_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Our config for a Hugging Face one; whatever would change the computation and is not supported is a ValueError."""
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type: got {kind!r}, want one of {sorted(ARCHITECTURES)}")
    try:
        _check_keys(kind, theirs)
        heads, width = _whole(theirs, "num_attention_heads"), _whole(theirs, "hidden_size")
        default_dim = 128 if kind == "qwen3" else width // heads
        theta, scaling = _rope(theirs)
        return ModelConfig(
            vocab_size=_whole(theirs, "vocab_size"),
            d_model=width,
            n_layers=_whole(theirs, "num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=_whole(theirs, "num_key_value_heads", heads),
            head_dim=_whole(theirs, "head_dim", default_dim),
            d_ff=_whole(theirs, "intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=_number(theirs, "rms_norm_eps"),
            tie_embeddings=_truth(theirs, "tie_word_embeddings"),
            qk_norm=kind == "qwen3",
            attention_bias=kind == "qwen2",
            layers=_layers(kind, theirs),
        )
    except ValueError as err:
        raise ValueError(f"{kind} config: {err}") from err


def _check_keys(kind: str, theirs: Mapping[str, Any]) -> None:
    names = theirs.get("architectures")
    if names and names != [ARCHITECTURES[kind]]:
        raise ValueError(f"architectures: got {names!r}, want {ARCHITECTURES[kind]!r}: a model with its head")
    for key, want in _WANTED.items():
        if theirs.get(key, want) != want:
            raise ValueError(f"got {key}={theirs[key]!r}, which the decoder does not compute")
    unknown = [key for key in theirs.keys() - _WANTED.keys() - _READ - _IDLE if key[:1] != "_"]
    unknown = sorted(key for key in unknown if theirs[key] is not None)
    if unknown:
        raise ValueError(
            f"got {unknown[0]}={theirs[unknown[0]]!r}, which is not known; take it out of config.json if it says "
            "nothing about the computation"
        )
    missing = [key for key in _NEEDED if key not in theirs]
    if missing:
        raise ValueError(f"got no {', '.join(missing)}; want a whole config.json")


def _whole(theirs: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of things, from 1; where it is absent or null, the default, if there is one."""
    value = default if theirs.get(key) is None else theirs[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}: got {theirs.get(key)!r}, want a whole number, at least 1")
    return value


def _number(theirs: Mapping[str, Any], key: str) -> float:
    value = theirs[key]
    if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key}: got {value!r}, want a finite number above 0")
    return float(value)


def _truth(theirs: Mapping[str, Any], key: str) -> bool:
    value = theirs.get(key, False)
    if type(value) is not bool:
        raise ValueError(f"{key}: got {value!r}, want true or false")
    return value


def _layers(kind: str, theirs: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """A spec per layer where the config asks for sliding windows, else ().

    Qwen's rule: `use_sliding_window` lets the layers from `max_window_layers` on slide; `layer_types` overrides it.
    """
    n = theirs["num_hidden_layers"]
    slides = _truth(theirs, "use_sliding_window")
    window = theirs.get("sliding_window", 4096) if slides else None
    types = theirs.get("layer_types")
    if types is None:
        full = n if window is None else theirs.get("max_window_layers", 28)
        if type(full) is not int or full < 0:
            raise ValueError(f"max_window_layers: got {full!r}, want a whole number, at least 0")
        types = [_LAYER_TYPES[i >= full] for i in range(n)]
    if not isinstance(types, list):
        raise ValueError(f"layer_types: got {types!r}, want a list")
    if len(types) != n or any(name not in _LAYER_TYPES for name in types):
        got = sorted(set(map(str, types)))
        raise ValueError(f"layer_types: got {len(types)} entries of {got}, want {n} entries of {list(_LAYER_TYPES)}")
    if "sliding_attention" not in types:
        return ()
    if window is None or kind == "llama":
        raise ValueError(
            f"got sliding layers with use_sliding_window={slides}, sliding_window={theirs.get('sliding_window')}; "
            "want a Qwen config that sets both, or none"
        )
    window = _whole(theirs, "sliding_window", 4096)
    return tuple(LayerSpec(window if name == "sliding_attention" else None) for name in types)


def unscaled(theta: float) -> RopeScaling | None:
    """How a rope that is not scaled is written, so that its frequencies are rounded as theirs (see models/rope.py)."""
    return RopeScaling("linear", 1.0) if theta == UNSCALED_THETA else None


def _rope(theirs: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """θ and its scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    given = {name: {} if theirs.get(name) is None else theirs[name] for name in ("rope_parameters", "rope_scaling")}
    for name, part in given.items():
        if not isinstance(part, dict):
            raise ValueError(f"{name}: got {part!r}, want an object, or null")
    values = {_number(d, "rope_theta") for d in (theirs, *given.values()) if d.get("rope_theta") is not None}
    if len(values) != 1:
        raise ValueError(f"rope_theta: got {sorted(values)}, want exactly one value, at the top or in rope_parameters")
    found = {_scaling(part, theirs) for part in given.values() if part}
    if len(found) > 1:
        raise ValueError(f"rope: got {given}, want them to agree")
    theta, scaling = values.pop(), found.pop() if found else None
    return theta, scaling or unscaled(theta)


def _scaling(theirs: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    kind = theirs.get("rope_type", theirs.get("type", "default"))
    if not isinstance(kind, str) or kind not in ("default", *ROPE_READS):
        raise ValueError(f"rope scaling: got {kind!r}, want one of {['default', *ROPE_READS]}")
    known = {_their_name(name) for names in ROPE_READS.values() for name in names}
    unknown = sorted(theirs.keys() - known - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if unknown or theirs.get("partial_rotary_factor", 1.0) != 1.0:
        odd = (unknown or ["partial_rotary_factor"])[0]
        raise ValueError(f"rope scaling: got {odd}={theirs[odd]!r}, which the decoder does not compute")
    if kind == "default":
        return None
    given = {name: theirs.get(_their_name(name)) for name in ROPE_READS[kind]}
    if "original_length" in given:
        given["original_length"] = _original_length(given["original_length"], config)
    if kind == "yarn" and given["factor"] is None and config.get("max_position_embeddings") is not None:
        given["factor"] = _whole(config, "max_position_embeddings") / given["original_length"]
    if given["factor"] is None:
        raise ValueError(f"rope scaling {kind!r}: got no factor in {dict(theirs)}, want one")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if type(value) is not bool if name == "truncate" else type(value) not in (int, float):
            want = "true or false" if name == "truncate" else "a number"
            raise ValueError(f"rope scaling: got {_their_name(name)}={value!r}, want {want}")
    return RopeScaling(kind, **given)


def _original_length(nested: Any, config: Mapping[str, Any]) -> int:
    """The length of pretraining: at the top it goes before the scaling's own, and before max_position_embeddings."""
    name = _their_name("original_length")
    if name in config:
        return _whole(config, name)
    if nested is not None:
        return _whole({name: nested}, name)
    return _whole(config, "max_position_embeddings")


def _their_name(name: str) -> str:
    """Of a scaled rope's number."""
    return "original_max_position_embeddings" if name == "original_length" else name


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
                f"d_model={config.d_model} with n_heads={config.n_heads} and no qk_norm or attention_bias",
                bool(config.d_model % config.n_heads) and llama,
            ),
            (f"layers with windows {sorted(windows)}", len(windows) > 1),
            ("sliding windows without qk_norm or attention_bias", bool(windows) and llama),
        )
        if present
    ]
    if foreign:
        raise ValueError(f"no Hugging Face family has {', '.join(foreign)}; keep this policy as an Orbax checkpoint")
    return "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"


def describe(config: ModelConfig, *, longest: int | None = None) -> dict[str, Any]:
    """config.json of `config`, readable by transformers 4 and 5. Errors: those of `family`.

    `longest`: the tokens that the model was made for, where that is known; the decoder itself has no limit.
    """
    kind = family(config)
    scaling, assumed = config.rope_scaling, 32768
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling == RopeScaling("linear", 1.0):
        scaling = None
    if scaling is not None:
        rope = {"rope_type": scaling.kind}
        rope |= {_their_name(name): getattr(scaling, name) for name in ROPE_READS[scaling.kind]}
        rope = {name: value for name, value in rope.items() if value is not None}
        if scaling.original_length:
            assumed = max(scaling.original_length + 1, round(scaling.original_length * scaling.factor))
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
        "max_position_embeddings": longest or assumed,
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
