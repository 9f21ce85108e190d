"""A saved folder reads back to the same parameters, bit for bit; nothing in it is guessed or left over."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from models import hf, transformer
from models.config import ModelConfig

LLAMA = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, rope_theta=1e6)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, attention_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=16),
}


def random_params(config: ModelConfig) -> dict:
    shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), shapes)


@pytest.mark.parametrize("kind", FAMILIES)
def test_round_trip_is_exact_and_transformers_reads_the_config(kind, tmp_path):
    config = FAMILIES[kind]
    params = random_params(config)
    hf.save(params, config, tmp_path)
    again, read = hf.load(tmp_path)
    assert read == config
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == kind
    assert hf.read_config(theirs.to_dict()) == config


def test_layout_is_theirs(tmp_path):
    params = random_params(FAMILIES["qwen2"])
    hf.save(params, FAMILIES["qwen2"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 + 2 * 12
    attention, x = params["blocks"]["attention"], np.random.default_rng(1).standard_normal(32).astype(np.float32)
    # Their linear layer is y = W x + b with the heads laid one after another.
    theirs = tensors["model.layers.1.self_attn.q_proj.weight"] @ x + tensors["model.layers.1.self_attn.q_proj.bias"]
    ours = np.einsum("d,dnh->nh", x, attention["wq"][1]) + attention["bq"][1]
    np.testing.assert_allclose(theirs, ours.reshape(-1), rtol=1e-4, atol=1e-5)
    theirs = tensors["model.layers.0.self_attn.o_proj.weight"] @ x
    ours = np.einsum("nh,nhd->d", x.reshape(4, 8), attention["wo"][0])
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(tensors["lm_head.weight"], params["lm_head"].T)


def test_options_of_no_family_are_refused(tmp_path):
    for change in ({"key_shift": True}, {"init": "mimetic"}, {"qk_norm": True, "attention_bias": True}):
        config = dataclasses.replace(LLAMA, **change)
        with pytest.raises(ValueError, match="no Hugging Face family has"):
            hf.save(random_params(config), config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_and_left_over_tensors_are_named(tmp_path):
    hf.save(random_params(LLAMA), LLAMA, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    foreign = {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    save_file(tensors | foreign, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no place for: .*q_proj.bias"):
        hf.load(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no tensor 'model.layers.1.mlp.up_proj.weight'"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: got 'gpt2'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope scaling: got 'llama3'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling: got 'yarn'"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta: got \\[\\]"),
        ({"rope_theta": 5e5}, "rope_theta: got \\[500000.0, 1000000.0\\]"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_would_change_the_computation_is_refused(change, message, tmp_path):
    hf.save(random_params(LLAMA), LLAMA, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        hf.read_config(described | change)


@pytest.mark.parametrize("change", [{"rope_theta": None}, {"rope_parameters": None}])
def test_theta_is_read_from_either_place(change, tmp_path):
    hf.save(random_params(LLAMA), LLAMA, tmp_path)
    assert hf.read_config(json.loads((tmp_path / "config.json").read_text()) | change).rope_theta == 1e6
