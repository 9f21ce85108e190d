"""Reading and writing Hugging Face model folders: config.json and model.safetensors, for Llama, Qwen2 and Qwen3.

Every tensor of a folder is accounted for, both ways; a config key that would change the computation and is not
supported is an error, never ignored. Not covered: sharded checkpoints, rope scaling, sliding windows, biases on the
output or the MLP.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.transformer import Params, init

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Ours, within a layer -> theirs. Their matrices are [out in], ours [in out] with heads apart.
LAYER_NAMES = {
    ("attention_norm",): "input_layernorm.weight",
    ("attention", "wq"): "self_attn.q_proj.weight",
    ("attention", "wk"): "self_attn.k_proj.weight",
    ("attention", "wv"): "self_attn.v_proj.weight",
    ("attention", "wo"): "self_attn.o_proj.weight",
    ("attention", "bq"): "self_attn.q_proj.bias",
    ("attention", "bk"): "self_attn.k_proj.bias",
    ("attention", "bv"): "self_attn.v_proj.bias",
    ("attention", "q_norm"): "self_attn.q_norm.weight",
    ("attention", "k_norm"): "self_attn.k_norm.weight",
    ("mlp_norm",): "post_attention_layernorm.weight",
    ("mlp", "gate"): "mlp.gate_proj.weight",
    ("mlp", "up"): "mlp.up_proj.weight",
    ("mlp", "down"): "mlp.down_proj.weight",
}
TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def family(config: ModelConfig) -> str:
    """The Hugging Face model type that computes what `config` says; an error names the option that none has."""
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
        )
        if present
    ]
    if foreign:
        raise ValueError(f"no Hugging Face family has {', '.join(foreign)}; keep this policy as an Orbax checkpoint")
    return "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"


def save(params: Params, config: ModelConfig, directory: str | pathlib.Path) -> None:
    """Write config.json and model.safetensors (float32); refuses a config that no Hugging Face family computes."""
    kind = family(config)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
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
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": 32768,
        "dtype": "float32",
        "torch_dtype": "float32",
    } | ({} if kind == "qwen2" else {"attention_bias": False})
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(params)):
        names = tuple(entry.key for entry in path)
        if names[0] == "blocks":
            for i, layer in enumerate(np.asarray(leaf, np.float32)):
                tensors[f"model.layers.{i}.{LAYER_NAMES[names[1:]]}"] = _to_theirs(names[1:], layer)
        else:
            tensors[TOP_NAMES[names[0]]] = _to_theirs(names, np.asarray(leaf, np.float32))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def load(directory: str | pathlib.Path) -> tuple[Params, ModelConfig]:
    """Parameters (float32) and config of a Llama, Qwen2 or Qwen3 folder with one model.safetensors."""
    directory = pathlib.Path(directory)
    config = read_config(json.loads((directory / "config.json").read_text()))
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    with safe_open(directory / "model.safetensors", framework="flax") as file:
        unread = set(file.keys())
        if config.tie_embeddings:
            unread.discard(TOP_NAMES["lm_head"])  # a second copy of the table, which some writers keep

        def take(names: tuple[str, ...], name: str, shape: tuple[int, ...]) -> np.ndarray:
            if name not in unread:
                raise ValueError(f"{directory}: got no tensor {name!r}, which model_type and config.json call for")
            unread.remove(name)
            theirs = np.asarray(file.get_tensor(name).astype(jnp.float32))
            return _to_ours(names, theirs, shape, f"{directory}: {name}")

        def read(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            names = tuple(entry.key for entry in path)
            if names[0] != "blocks":
                return jnp.asarray(take(names, TOP_NAMES[names[0]], leaf.shape))
            suffix = LAYER_NAMES[names[1:]]
            layers = [take(names[1:], f"model.layers.{i}.{suffix}", leaf.shape[1:]) for i in range(config.n_layers)]
            return jnp.asarray(np.stack(layers))

        params = jax.tree_util.tree_map_with_path(read, shapes)
    if unread:
        raise ValueError(f"{directory}: got {len(unread)} tensors the config has no place for: {sorted(unread)[:5]}")
    return params, config


def read_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Our config for a Hugging Face one; whatever would change the computation and is not supported is an error."""
    kind = theirs.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type: got {kind!r}, want one of {sorted(ARCHITECTURES)}")
    refused = {
        "hidden_act": theirs.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(theirs.get("attention_bias", False)),  # theirs has one on the output too
        "mlp_bias": bool(theirs.get("mlp_bias", False)),
        "use_sliding_window": bool(theirs.get("use_sliding_window", False)),
        "layer_types": set(theirs.get("layer_types") or ()) - {"full_attention"} != set(),
        "quantization_config": theirs.get("quantization_config") is not None,
    }
    for key, bad in refused.items():
        if bad:
            raise ValueError(f"{kind} config: got {key}={theirs[key]!r}, which the decoder does not compute")
    heads = theirs["num_attention_heads"]
    return ModelConfig(
        vocab_size=theirs["vocab_size"],
        d_model=theirs["hidden_size"],
        n_layers=theirs["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=theirs.get("num_key_value_heads") or heads,
        head_dim=theirs.get("head_dim") or theirs["hidden_size"] // heads,
        d_ff=theirs["intermediate_size"],
        rope_theta=_rope_theta(theirs),
        rms_eps=theirs["rms_norm_eps"],
        tie_embeddings=theirs.get("tie_word_embeddings", False),
        qk_norm=kind == "qwen3",
        attention_bias=kind == "qwen2",
    )


def _rope_theta(theirs: Mapping[str, Any]) -> float:
    """θ from `rope_parameters` (transformers 5) or the top level (4); a scaled rope or no θ at all is an error."""
    nested = theirs.get("rope_parameters") or {}
    scaling = theirs.get("rope_scaling") or nested
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"rope scaling: got {rope_type!r}, want 'default'; scaled positions are not supported yet")
    values = {float(d["rope_theta"]) for d in (theirs, nested) if d.get("rope_theta") is not None}
    if len(values) != 1:
        raise ValueError(f"rope_theta: got {sorted(values)}, want exactly one value, at the top or in rope_parameters")
    return values.pop()


def _to_theirs(names: tuple[str, ...], ours: np.ndarray) -> np.ndarray:
    if names[-1] in ("wq", "wk", "wv"):
        ours = ours.reshape(ours.shape[0], -1).T
    elif names[-1] == "wo":
        ours = ours.reshape(-1, ours.shape[-1]).T
    elif names[-1] in ("bq", "bk", "bv"):
        ours = ours.reshape(-1)
    elif names[-1] in ("gate", "up", "down", "lm_head"):
        ours = ours.T
    return np.ascontiguousarray(ours)


def _to_ours(names: tuple[str, ...], theirs: np.ndarray, shape: tuple[int, ...], where: str) -> np.ndarray:
    expected = _to_theirs(names, np.broadcast_to(np.float32(0), shape)).shape
    if theirs.shape != expected:
        raise ValueError(f"{where}: got shape {theirs.shape}, want {expected}")
    turned = theirs.T if names[-1] in ("wq", "wk", "wv", "wo", "gate", "up", "down", "lm_head") else theirs
    return turned.reshape(shape)
