"""A saved folder reads back to the same parameters, bit for bit; nothing in it is guessed or left over."""

import collections
import dataclasses
import json
import pickle

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from models import hf
from models.config import LayerSpec, ModelConfig, RopeScaling
from models.sharding import make_mesh, param_shardings
from tests.models.weights import drawn, same

LLAMA = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, rope_theta=1e6)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, attention_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=16),
}
SCALED = {
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeScaling("yarn", 4.0, original_length=4096, attention_factor=1.2, truncate=False),
}


def described(config: ModelConfig = LLAMA) -> dict:
    return json.loads(json.dumps(hf.describe(config)))


# ---- there and back


@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_round_trip_is_exact_and_transformers_reads_the_config(kind, head_dim, tmp_path):
    """Also where heads times their width is not the model's width."""
    config = dataclasses.replace(FAMILIES[kind], head_dim=head_dim)
    params = drawn(config)
    hf.save(params, config, tmp_path)
    again, read = hf.load(tmp_path)
    assert read == config and same(params, again)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == kind
    assert hf.read_config(theirs.to_dict()) == config


def test_layout_is_theirs(tmp_path):
    params = drawn(FAMILIES["qwen2"])
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


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("axes", [(1, 1, 2), (1, 4, 1), (2, 2, 2)])
def test_born_sharded_is_the_same_and_reads_parts_only(kind, axes, tmp_path, monkeypatch):
    config = FAMILIES[kind]
    params = drawn(config)
    hf.save(params, config, tmp_path)
    read, to_ours = collections.Counter(), hf.to_ours

    class Counted:
        """What stands in a file, with a count of the numbers that are taken out of it."""

        def __init__(self, place, stored):
            self.place, self.stored = place, stored

        def __getitem__(self, index):
            part = self.stored[index]
            read[self.place] += part.size
            return part

    monkeypatch.setattr(hf, "to_ours", lambda place, index, stored: to_ours(place, index, Counted(place, stored)))
    mesh = make_mesh(*axes)
    again, _ = hf.load(tmp_path, mesh=mesh)
    assert same(params, again)
    shardings = param_shardings(config, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, again, shardings))
    # Every matrix is cut fsdp·tensor ways, and no number is read twice although data replicates the parts.
    kinds = ("wq", "wk", "wv", "wo", "gate", "up", "down", "embed", "lm_head")
    matrices = {place: int(np.prod(place.shape)) for place in hf.places(config).values() if place.kind in kinds}
    assert {place: read[place] for place in matrices} == matrices
    assert len({str(shard.index) for shard in again["embed"].addressable_shards}) == axes[1] * axes[2]


def test_a_mesh_that_does_not_divide_a_head_is_read_whole_where_rules_say_so(tmp_path):
    params = drawn(LLAMA)
    hf.save(params, LLAMA, tmp_path)
    rules = {"layers": "data", "embed": None, "vocab": None, "heads": None, "kv_heads": None, "head_dim": "tensor"}
    again, _ = hf.load(tmp_path, mesh=make_mesh(2, 1, 2), rules=rules | {"mlp": "fsdp"})
    assert same(params, again)


def test_several_files_and_their_index(tmp_path):
    config = FAMILIES["qwen3"]
    params = drawn(config)
    hf.save(params, config, tmp_path, shard_bytes=20_000)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    listed = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert listed["weight_map"].keys() == hf.places(config).keys()
    sizes = [sum(x.nbytes for x in load_file(tmp_path / file).values()) for file in files]
    assert max(sizes) <= 20_000 and sum(sizes) == listed["metadata"]["total_size"]
    assert same(params, hf.load(tmp_path)[0])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_floats_become_float32_masters(dtype, tmp_path):
    hf.save(drawn(LLAMA), LLAMA, tmp_path)
    tensors = {name: x.astype(dtype) for name, x in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    params, _ = hf.load(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
    want = tensors["model.layers.1.mlp.up_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(params["blocks"]["mlp"]["up"][1], want)


def test_options_of_no_family_are_refused(tmp_path):
    windows = (LayerSpec(4), LayerSpec(8))
    for base, change in (
        (LLAMA, {"key_shift": True}),
        (LLAMA, {"init": "mimetic"}),
        (LLAMA, {"qk_norm": True, "attention_bias": True}),
        (LLAMA, {"layers": (LayerSpec(), LayerSpec(8))}),
        (LLAMA, {"d_model": 34}),  # LlamaConfig refuses it
        (FAMILIES["qwen3"], {"layers": windows}),
    ):
        config = dataclasses.replace(base, **change)
        with pytest.raises(ValueError, match="no Hugging Face family has"):
            hf.save(drawn(config), config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_adapters_and_a_folder_with_weights_are_refused(tmp_path):
    params = drawn(LLAMA)
    attention = {**params["blocks"]["attention"], "wq_lora_a": np.zeros((2, 32, 4), np.float32)}
    with pytest.raises(ValueError, match="blocks/attention/wq_lora_a.*merged before"):
        hf.save({**params, "blocks": {**params["blocks"], "attention": attention}}, LLAMA, tmp_path)
    hf.save(params, LLAMA, tmp_path)
    with pytest.raises(ValueError, match="model.safetensors: holds weights already"):
        hf.save(params, LLAMA, tmp_path)


# ---- configs


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_ropes_go_there_and_back(kind, tmp_path):
    config = dataclasses.replace(LLAMA, rope_scaling=SCALED[kind])
    (tmp_path / "config.json").write_text(json.dumps(described(config)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_type"] == kind
    for read in (described(config), theirs.to_dict(), described(config) | {"rope_parameters": None}):
        assert hf.read_config(read) == config


def test_a_plain_rope_is_rounded_as_theirs():
    """At θ = 10000 a policy of our own keeps another rounding (models/rope.py); a folder's must be theirs."""
    ours = dataclasses.replace(LLAMA, rope_theta=10_000.0)
    theirs = dataclasses.replace(ours, rope_scaling=RopeScaling("linear", 1.0))
    assert described(ours) == described(theirs) and described(ours)["rope_scaling"] is None
    assert hf.read_config(described(ours)) == theirs


def test_published_rope_scalings():
    # Llama 3.1, as its config.json has it; and the Qwen2.5 card's YaRN (old names, length from the top level)
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    plain = described() | {"rope_parameters": None}
    got = hf.read_config(plain | {"rope_scaling": {**llama, "rope_type": "llama3"}})
    assert got.rope_scaling == RopeScaling("llama3", 8.0, original_length=8192)
    got = hf.read_config(plain | {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768})
    assert got.rope_scaling == RopeScaling("yarn", 4.0, original_length=32768)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, ()),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (LayerSpec(), LayerSpec(4))),
        (
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            (LayerSpec(4), LayerSpec()),
        ),
    ],
)
def test_sliding_windows_layer_by_layer(change, layers, tmp_path):
    theirs = described(FAMILIES["qwen3"]) | {"layer_types": None} | change
    config = hf.read_config(theirs)
    assert config.layers == layers
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    types = AutoConfig.from_pretrained(tmp_path).layer_types
    assert [t == "sliding_attention" for t in types] == [
        spec.window is not None for spec in layers or [LayerSpec()] * 2
    ]
    assert hf.read_config(described(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: got 'gpt2'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*want 'LlamaForCausal"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "rope scaling: got 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling: got 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "'linear': got no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "want them to agree"),
        ({"rope_parameters": None, "rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta: got \\[\\]"),
        ({"rope_theta": 5e5}, "rope_theta: got \\[500000.0, 1000000.0\\]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_causal": False}, "is_causal=False, which the decoder does not compute"),
        ({"is_causal": None}, "is_causal=None"),  # transformers: whatever is not true looks both ways
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which is not known; take it out"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"attention_multiplier": 0.1}, "attention_multiplier"),
        ({"num_experts": 8}, "num_experts"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: got 2 entries of \\['chunked"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "got sliding layers"),
    ],
)
def test_what_would_change_the_computation_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf.read_config(described() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "40"}, "vocab_size: got '40', want a whole number"),
        ({"vocab_size": None}, "vocab_size: got None"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: got 2.0"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0, want a whole number, at least 1"),
        ({"num_key_value_heads": True}, "num_key_value_heads: got True"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: got '1e-6', want a finite number above 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps: got None"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no', want true or false"),
        ({"rope_theta": "1e6"}, "rope_theta: got '1e6'"),
        ({"rope_scaling": "yarn"}, "rope_scaling: got 'yarn', want an object"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope scaling: got \\['yarn'\\], want one of"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": "4"}}, "factor='4', want a number"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}},
            "truncate=1, want true or false",
        ),
        ({"original_max_position_embeddings": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "got None, want"),
        ({"layer_types": 3}, "layer_types: got 3, want a list"),
        ({"layer_types": [["full_attention"]] * 2}, "layer_types: got 2 entries"),
        ({"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers: got '1'"),
        ({"architectures": 3}, "architectures: got 3"),
        ({"model_type": ["llama"]}, "model_type: got \\['llama'\\]"),
    ],
)
def test_what_is_no_number_is_named(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(described() | change))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        hf.load_config(tmp_path)


def test_what_says_nothing_of_the_computation_is_no_hindrance():
    idle = {"transformers.js_config": {"dtype": "q4"}, "is_llama_config": True, "rope_interleaved": False}
    idle |= {"_attn_implementation_autoset": True, "num_experts": None, "initializer_range": 0.04, "eos_token_id": [1]}
    assert hf.read_config(described() | idle) == LLAMA


@pytest.mark.parametrize("nested", [{}, {"original_max_position_embeddings": 8192}])
def test_the_original_length_at_the_top_goes_first(nested):
    """As transformers computes the frequencies (tests/golden has the logits of one such)."""
    plain = described() | {"rope_parameters": None, "max_position_embeddings": 16384}
    plain |= {"original_max_position_embeddings": 4096}
    yarn = hf.read_config(plain | {"rope_scaling": {"type": "yarn", "factor": None, **nested}})
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, original_length=4096)
    llama3 = hf.read_config(plain | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **nested}})
    assert llama3.rope_scaling == RopeScaling("llama3", 8.0, original_length=4096)
    assert hf.read_config(plain | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope_scaling.kind == "linear"


@pytest.mark.parametrize("change", [{"rope_theta": None}, {"rope_parameters": None}])
def test_theta_is_read_from_either_place(change):
    assert hf.read_config(described() | change).rope_theta == 1e6


# ---- bad folders: one error that names file and tensor


@pytest.fixture
def folder(tmp_path):
    """Several files, an untied head."""
    config = dataclasses.replace(LLAMA, tie_embeddings=False)
    hf.save(drawn(config), config, tmp_path, shard_bytes=20_000)
    return tmp_path


def shard_with(folder, name):
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def refused(folder, message, kind=ValueError):
    """Both ways in say it."""
    for read in (hf.load, hf.check):
        with pytest.raises(kind, match=message):
            read(folder)


def test_missing_and_left_over_tensors_are_named(tmp_path):
    hf.save(drawn(LLAMA), LLAMA, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    foreign = {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    save_file(tensors | foreign, tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors: got 1 tensors the config has no place for: .*q_proj.bias")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "no tensor 'model.layers.1.mlp.up_proj.weight'")


def test_a_truncated_shard_names_the_tensor(folder):
    name = "model.layers.1.mlp.down_proj.weight"
    file = shard_with(folder, name)
    whole = file.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    ends = {key: value["data_offsets"][1] for key, value in header.items() if key != "__metadata__"}
    last = max(ends, key=ends.get)
    file.write_bytes(whole[:-5])
    refused(folder, f"{file.name}: truncated: tensor '{last}' ends at byte {len(whole)}, and the file has")
    file.write_bytes(whole[:60])
    refused(folder, f"{file.name}: truncated: the header says")
    file.write_bytes(b"<html>")
    refused(folder, f"{file.name}: ")


def test_a_wrong_shape_and_a_wrong_dtype_name_the_tensor(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    file = shard_with(folder, name)
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].T.copy()}, file)
    refused(folder, rf"{file.name}: tensor '{name}': got shape \(32, 16\), want \(16, 32\)")
    save_file(tensors | {name: tensors[name].astype(np.int32)}, file)
    refused(folder, f"{file.name}: tensor '{name}': got dtype I32")


def test_shards_and_index_must_agree(folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    file, index = shard_with(folder, name), folder / "model.safetensors.index.json"
    tensors, listed = load_file(file), index.read_text()
    save_file({key: x for key, x in tensors.items() if key != name}, file)
    refused(folder, f"{file.name}: tensor '{name}' is missing but in model.safetensors.index.json")
    save_file(tensors | {"more": tensors[name]}, file)
    refused(folder, f"{file.name}: tensor 'more' is there but not in")
    file.unlink()
    refused(folder, f"{file.name}: no such shard, but .*'{sorted(tensors)[0]}' among them", FileNotFoundError)
    index.write_text(listed.replace(file.name, f"../{file.name}"))
    refused(folder, "want a file of this folder")
    index.write_text("{}")
    refused(folder, "index.json: no readable weight_map")


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    (tmp_path / "config.json").write_text(json.dumps(described()))
    refused(tmp_path, "no model.safetensors and no model.safetensors.index.json", FileNotFoundError)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    refused(tmp_path, "pytorch_model.bin: weights as a pickle.*never opened")
    assert not (tmp_path / "exploded").exists()


def test_a_tied_head_may_be_kept_twice_but_must_be_the_table(tmp_path):
    params = drawn(LLAMA)
    hf.save(params, LLAMA, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert same(params, hf.load(tmp_path)[0])
    head[39, 31] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    refused(tmp_path, "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight'")


def test_a_folder_without_config_or_with_a_broken_one_names_it(tmp_path):
    refused(tmp_path, "config.json: no such file", FileNotFoundError)
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json: ")
    (tmp_path / "config.json").write_text(json.dumps(described() | {"model_type": "mamba"}))
    refused(tmp_path, "config.json: model_type: got 'mamba', want one of")
    theirs = described()
    del theirs["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    refused(tmp_path, "config.json: llama config: got no rms_norm_eps")
    (tmp_path / "config.json").write_text("[]")
    refused(tmp_path, "config.json: got a list, want an object")
