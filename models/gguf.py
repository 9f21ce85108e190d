"""Reading GGUF files (llama.cpp's format), quantised tensors included: Llama, Qwen2 and Qwen3.

The header is read here, because a cut file must name what is cut; the `gguf` package dequantises. llama.cpp stores the
query and key rows of the Llama architecture with RoPE's channel pairs side by side: they are put back into halves.
Not covered: files in several parts, sentencepiece vocabularies, mixtures of experts, writing.
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from models.config import ModelConfig, RopeScaling
from models.gguf_tokenizer import build_tokenizer
from models.hf_config import unscaled
from models.layout import Place, assemble, named_places, their_shape, to_ours
from models.sharding import RULES
from models.transformer import Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ARCHITECTURES = ("llama", "qwen2", "qwen3")
LAYER_NAMES = {
    ("attention_norm",): "attn_norm.weight",
    ("attention", "wq"): "attn_q.weight",
    ("attention", "wk"): "attn_k.weight",
    ("attention", "wv"): "attn_v.weight",
    ("attention", "wo"): "attn_output.weight",
    ("attention", "bq"): "attn_q.bias",
    ("attention", "bk"): "attn_k.bias",
    ("attention", "bv"): "attn_v.bias",
    ("attention", "q_norm"): "attn_q_norm.weight",
    ("attention", "k_norm"): "attn_k_norm.weight",
    ("mlp_norm",): "ffn_norm.weight",
    ("mlp", "gate"): "ffn_gate.weight",
    ("mlp", "up"): "ffn_up.weight",
    ("mlp", "down"): "ffn_down.weight",
}
TOP_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
# Keys below the architecture's name that say nothing about the computation, or what other keys and shapes say.
_IDLE_KEYS = {"context_length", "vocab_size", "rope.scaling.finetuned"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file; it knows slicing, and reads and dequantises only the blocks that are asked for."""

    name: str
    shape: tuple[int, ...]  # [out in], as Hugging Face's
    kind: Any  # gguf.GGMLQuantizationType
    raw: np.ndarray  # uint8 [rows, bytes of a row]
    per_block: int  # numbers that are quantised together, along a row
    file: pathlib.Path
    pairs: int = 0  # head dimension, where RoPE's channel pairs stand side by side

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        if len(self.shape) == 1:
            return self._block(slice(None), index)[0]
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        block = self._block(rows, columns)
        if self.pairs:  # a slice of rows holds whole heads
            block = block.reshape(-1, self.pairs // 2, 2, block.shape[1]).swapaxes(1, 2).reshape(block.shape)
        return block

    def _block(self, rows: slice, columns: slice) -> np.ndarray:
        begin, end, _ = columns.indices(self.shape[-1])
        first, last = begin // self.per_block, -(-end // self.per_block)
        size = self.raw.shape[1] * self.per_block // self.shape[-1]
        numbers = _dequantise(self, self.raw[rows, first * size : last * size])
        return numbers[:, begin - first * self.per_block : end - first * self.per_block]


@dataclasses.dataclass(frozen=True)
class File:
    """What a file holds: metadata by key, tensors by name."""

    path: pathlib.Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def load(
    path: str | pathlib.Path, *, mesh: Mesh | None = None, rules: Mapping[str, str | None] = RULES
) -> tuple[Params, ModelConfig, "PreTrainedTokenizerFast"]:
    """Parameters (float32, dequantised), config and tokenizer of a GGUF file; sharded as `models.hf.load` does.

    Errors (ValueError, FileNotFoundError) name the file and, where one is wrong, the tensor; or say how to install the
    `gguf` package.
    """
    file = open_file(path)
    params, config = load_params(file, mesh=mesh, rules=rules)
    return params, config, build_tokenizer(file.fields, file.path)


def load_params(
    file: File, *, mesh: Mesh | None = None, rules: Mapping[str, str | None] = RULES
) -> tuple[Params, ModelConfig]:
    """Parameters and config alone, of a file that is open."""
    config = read_config(file)
    name_of = {(place.path, place.layer): name for name, place in account(file, config).items()}
    turned = ("wq", "wk") if file.fields["general.architecture"] == "llama" else ()

    def read(place: Place, index: tuple[slice, ...]) -> np.ndarray:
        tensor = file.tensors[name_of[place.path, place.layer]]
        if place.kind in turned:
            tensor = dataclasses.replace(tensor, pairs=config.head_dim)
        return to_ours(place, index, tensor)

    return assemble(config, read, mesh=mesh, rules=rules), config


def account(file: File, config: ModelConfig) -> dict[str, Place]:
    """Where each tensor stands. Errors (ValueError): one that is missing, left over, or of another shape."""
    places = named_places(config, TOP_NAMES, LAYER_NAMES, "blk.{}.")
    for name, place in places.items():
        if name not in file.tensors:
            raise ValueError(f"{file.path}: got no tensor {name!r}, which its metadata call for")
        if file.tensors[name].shape != their_shape(place):
            got = file.tensors[name].shape
            raise ValueError(f"{file.path}: tensor {name!r}: got shape {got}, want {their_shape(place)}")
    left = sorted(file.tensors.keys() - places.keys() - {"rope_freqs.weight"})
    if left:
        raise ValueError(f"{file.path}: got {len(left)} tensors the config has no place for: {left[:5]}")
    return places


def _dequantise(tensor: Tensor, raw: np.ndarray) -> np.ndarray:
    from gguf import quants

    # A plain read: contiguous rows, without the file's mapping behind them.
    data = np.array(raw)
    if tensor.kind.name in ("F32", "F16", "F64"):
        return data.view({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[tensor.kind.name]).astype(np.float32)
    try:
        return np.asarray(quants.dequantize(data, tensor.kind), np.float32)
    except NotImplementedError as err:
        raise ValueError(f"{tensor.file}: tensor {tensor.name!r}: {err}; convert it to another type") from err


# --- metadata ------------------------------------------------------------------------------------------------------


def read_config(file: File) -> ModelConfig:
    """The config that the metadata and the tensors' shapes describe; a key that is not understood is a ValueError."""
    try:
        return _config(file)
    except ValueError as err:
        raise ValueError(f"{file.path}: {err}") from err


def _config(file: File) -> ModelConfig:
    arch = file.fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture: got {arch!r}, want one of {list(ARCHITECTURES)}")
    rest = {key.removeprefix(f"{arch}."): v for key, v in file.fields.items() if key.startswith(f"{arch}.")}

    def take(key: str, default: Any = None, *, of: tuple[type, ...] = (int,)) -> Any:
        value = rest.pop(key, default)
        if type(value) not in of or not value > 0:
            raise ValueError(f"{arch}.{key}: got {value!r}, want one number above 0 for all layers")
        return value

    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_gate.weight"):
        if name not in file.tensors:
            raise ValueError(f"got no tensor {name!r}, want the weights of a whole {arch} model")
    if rest.pop("attention.causal", True) is not True:
        raise ValueError(f"{arch}.attention.causal: got {file.fields[f'{arch}.attention.causal']!r}, want true")
    width, heads = take("embedding_length"), take("attention.head_count")
    head_dim = take("attention.key_length", width // heads)
    theta = take("rope.freq_base", 10_000.0, of=(int, float))
    config = ModelConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        d_model=width,
        n_layers=take("block_count"),
        n_heads=heads,
        n_kv_heads=take("attention.head_count_kv", heads),
        head_dim=head_dim,
        d_ff=take("feed_forward_length"),
        rope_theta=theta,
        rms_eps=take("attention.layer_norm_rms_epsilon", of=(int, float)),
        tie_embeddings="output.weight" not in file.tensors,
        qk_norm=arch == "qwen3",
        attention_bias=arch == "qwen2",
        rope_scaling=_scaling(file, arch, rest, head_dim, theta),
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if take(key, head_dim) != head_dim:
            raise ValueError(f"{arch}.{key}: got {file.fields[f'{arch}.{key}']}, want {head_dim}, the head's")
    odd = sorted(key for key, value in rest.items() if key not in _IDLE_KEYS and value not in (0, False, ""))
    if odd:
        raise ValueError(f"{arch}.{odd[0]}: got {rest[odd[0]]!r}, which the decoder does not compute")
    return config


def _scaling(file: File, arch: str, rest: dict[str, Any], head_dim: int, theta: float) -> RopeScaling | None:
    """RoPE's scaling: from its keys (taken out of `rest`), or, for Llama 3, from its table of divisors."""
    kind = rest.pop("rope.scaling.type", "none")
    factor = rest.pop("rope.scaling.factor", None) or rest.pop("rope.scale_linear", None)
    length = rest.pop("rope.scaling.original_context_length", None)
    for name, value in (("factor", factor), ("original_context_length", length)):
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{arch}.rope.scaling.{name}: got {value!r}, want a number")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise ValueError(f"got {arch}.rope.scaling.type={kind!r} and 'rope_freqs.weight', want one")
        divisors = file.tensors["rope_freqs.weight"][slice(None)]
        return _llama3(divisors, head_dim, theta, length or 8192)
    if kind == "none" and factor in (None, 1.0):
        return unscaled(theta)
    if factor is None or kind not in ("linear", "yarn", "none"):
        raise ValueError(f"{arch}.rope.scaling: got {kind!r} with factor {factor}, want linear or yarn")
    if kind == "yarn":
        return RopeScaling("yarn", factor, original_length=length)
    return RopeScaling("linear", factor)


def _llama3(divisors: np.ndarray, head_dim: int, theta: float, length: int) -> RopeScaling:
    """The scaling whose table this is. Llama 3.1 to 3.3 differ in the factor alone, which is the largest divisor."""
    scaling = RopeScaling("llama3", float(str(divisors.max())), original_length=length)
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((length / wavelength - low) / (high - low), 0, 1)
    want = 1 / (share + (1 - share) / scaling.factor)
    if divisors.shape != want.shape or not np.allclose(divisors, want, rtol=1e-4):
        raise ValueError("tensor 'rope_freqs.weight': got another table than Llama 3's; it is not supported")
    return scaling


# --- the file ------------------------------------------------------------------------------------------------------


def open_file(path: str | pathlib.Path) -> File:
    """Metadata and tensors, the latter mapped and not read. Errors: ValueError, FileNotFoundError."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; want a GGUF file")
    with path.open("rb") as raw:
        if path.stat().st_size < 24 or raw.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file: it does not begin with 'GGUF'")
        cursor = _Cursor(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ), path)
    if (version := cursor.number("I")) not in (2, 3):
        raise ValueError(f"{path}: GGUF version: got {version}, want 2 or 3, little-endian")
    n_tensors, n_fields = cursor.number("Q"), cursor.number("Q")
    fields = {}
    for _ in range(n_fields):
        key = cursor.string("the name of a key")
        fields[key] = cursor.value(cursor.number("I", key), key)
    if fields.get("split.count", 0) > 1:
        raise ValueError(
            f"{path}: one of {fields['split.count']} parts; want one whole file (llama-gguf-split --merge)"
        )
    infos = []
    for _ in range(n_tensors):
        name = cursor.string("the name of a tensor")
        dims = [cursor.number("Q", name) for _ in range(cursor.number("I", name))]
        infos.append((name, tuple(reversed(dims)), cursor.number("I", name), cursor.number("Q", name)))
    align = fields.get("general.alignment", 32)
    if type(align) is not int or align < 1:
        raise ValueError(f"{path}: general.alignment: got {align!r}, want at least 1 byte")
    begin = -(-cursor.at // align) * align
    tensors = {name: _tensor(cursor, name, shape, kind, begin + at) for name, shape, kind, at in infos}
    if len(tensors) < n_tensors:
        raise ValueError(f"{path}: got {n_tensors} tensors under {len(tensors)} names, want each name once")
    return File(path, fields, tensors)


def _tensor(cursor: "_Cursor", name: str, shape: tuple[int, ...], code: int, at: int) -> Tensor:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as err:
        raise ValueError(
            f"{cursor.path}: reading GGUF needs the package gguf: pip install 'wayfinder-rl[gguf]'"
        ) from err
    try:
        kind = GGMLQuantizationType(code)
    except ValueError as err:
        raise ValueError(f"{cursor.path}: tensor {name!r}: got type {code}, which is unknown to gguf") from err
    per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
    if not shape or min(shape) < 1 or shape[-1] % per_block:
        raise ValueError(f"{cursor.path}: tensor {name!r}: got shape {shape}, want rows of whole {kind.name} blocks")
    row = shape[-1] // per_block * bytes_per_block
    rows = math.prod(shape[:-1])
    if at + rows * row > len(cursor.data):
        raise ValueError(
            f"{cursor.path}: truncated: tensor {name!r} ends at byte {at + rows * row}, and the file has "
            f"{len(cursor.data)}; download it again"
        )
    raw = np.frombuffer(cursor.data, np.uint8, rows * row, at).reshape(rows, row)
    return Tensor(name, shape, kind, raw, per_block, cursor.path)


class _Cursor:
    """A place in a file's header, which moves on as values are read."""

    def __init__(self, data: mmap.mmap, path: pathlib.Path):
        self.data, self.path, self.at = data, path, 4

    def number(self, code: str, what: str = "the header") -> Any:
        try:
            (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        except struct.error as err:
            raise self._cut(what) from err
        self.at += struct.calcsize(f"<{code}")
        # Written as float32: the shortest number that is the same float32 is the one that was meant (1e-05).
        return float(str(np.float32(value))) if code == "f" else value

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        begin, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise self._cut(what)
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError as err:
            raise ValueError(f"{self.path}: {what}: got bytes that are no UTF-8 ({err}); is the file damaged?") from err

    def value(self, code: int, key: str) -> Any:
        """One value of metadata; arrays become lists."""
        if code == _STRING:
            return self.string(key)
        if code == _ARRAY:
            of, length = self.number("I", key), self.number("Q", key)
            if of in _SCALARS and of != 6:
                end = self.at + length * struct.calcsize(f"<{_SCALARS[of]}")
                if end > len(self.data):
                    raise self._cut(key)
                values = np.frombuffer(self.data, np.dtype(f"<{_SCALARS[of]}"), length, self.at).tolist()
                self.at = end
                return values
            return [self.value(of, key) for _ in range(length)]
        if code not in _SCALARS:
            raise ValueError(f"{self.path}: {key}: got a value of type {code}, which GGUF does not have; damaged?")
        return self.number(_SCALARS[code], key)

    def _cut(self, what: str) -> ValueError:
        return ValueError(
            f"{self.path}: truncated in {what}: it ends beyond the file's {len(self.data)} bytes; download it again"
        )
