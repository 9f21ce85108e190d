"""Reading and writing Hugging Face model folders: config.json and safetensors, for Llama, Qwen2 and Qwen3.

Every tensor of a folder is accounted for, both ways, before one is read: a missing name, a left-over name, another
shape and a cut file are errors that name file and tensor. Pickles are never opened. models/hf_config.py says which
configs there are.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.config import ModelConfig
from models.hf_config import describe, family, load_config, read_config
from models.layout import Place, assemble, named_places, shapes_of, their_shape, to_ours, to_theirs
from models.sharding import RULES
from models.transformer import Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["describe", "family", "load", "load_config", "read_config", "save"]

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
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
SHARD_BYTES = 5 * 10**9


def places(config: ModelConfig) -> dict[str, Place]:
    """Hugging Face's name of every tensor of such a model, and where it stands; in the order of a forward pass."""
    return named_places(config, TOP_NAMES, LAYER_NAMES, "model.layers.{}.")


# --- reading --------------------------------------------------------------------------------------------------------


def load(
    directory: str | pathlib.Path, *, mesh: Mesh | None = None, rules: Mapping[str, str | None] = RULES
) -> tuple[Params, ModelConfig]:
    """Parameters (float32) and config of a Llama, Qwen2 or Qwen3 folder, one file or several.

    With `mesh` the arrays are born sharded (models/sharding.py's rules), and a process reads only what its devices
    hold; without, they are on the default device. Errors (ValueError, FileNotFoundError) name file and tensor.
    """
    config = load_config(directory)
    with _opened(pathlib.Path(directory), config) as (stored, name_of):
        params = assemble(
            config,
            lambda place, index: to_ours(place, index, stored[name_of[place.path, place.layer]]),
            mesh=mesh,
            rules=rules,
        )
    return params, config


def check(directory: str | pathlib.Path) -> ModelConfig:
    """The config of a folder whose every tensor is there, whole and of the right shape; no weight is read."""
    config = load_config(directory)
    with _opened(pathlib.Path(directory), config):
        return config


@contextlib.contextmanager
def _opened(directory: pathlib.Path, config: ModelConfig) -> Iterator[tuple[dict[str, Any], dict[tuple, str]]]:
    """Every tensor as something to slice, by name, and the name of each place; all accounted for."""
    expected = places(config)
    with contextlib.ExitStack() as stack:
        stored, file_of = {}, {}
        for file, names in _files(directory).items():
            opened = stack.enter_context(_open(file))
            held = set(opened.keys())
            if names is not None and held != names:
                name = sorted(held ^ names)[0]
                there = "is there but not in" if name in held else "is missing but in"
                raise ValueError(f"{file}: tensor {name!r} {there} {INDEX}; download the folder again")
            for name in held:
                if name in stored:
                    raise ValueError(f"{file}: tensor {name!r} is in {file_of[name].name} too; want it once")
                stored[name], file_of[name] = opened.get_slice(name), file
        _account(directory, config, expected, stored, file_of)
        yield stored, {(place.path, place.layer): name for name, place in expected.items()}


def _files(directory: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """The weight files of a folder and, where an index lists them, their tensors' names."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        if index.is_file():
            raise ValueError(f"{directory}: holds {SINGLE} and {INDEX}, want one of them; remove the other")
        return {directory / SINGLE: None}
    if not index.is_file():
        pickles = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickles:
            raise ValueError(
                f"{directory / pickles[0]}: weights as a pickle, which can run code and is never opened; want "
                "safetensors: save the model again with safe_serialization=True where you trust it"
            )
        raise FileNotFoundError(f"{directory}: no {SINGLE} and no {INDEX}; want the weights as safetensors")
    try:
        listed = json.loads(index.read_text())["weight_map"]
        names: dict[pathlib.Path, set[str]] = {}
        for name, file in listed.items():
            if pathlib.PurePath(file).name != file:
                raise ValueError(f"weight_map puts {name!r} into {file!r}, want a file of this folder")
            names.setdefault(directory / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ValueError(f"{index}: no readable weight_map ({type(err).__name__}: {err})") from err
    for file, held in names.items():
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: no such shard, but {INDEX} puts {len(held)} tensors into it, {sorted(held)[0]!r} among them; "
                "download it again"
            )
    return names


def _open(file: pathlib.Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as err:
        raise ValueError(f"{file}: {_what_is_cut(file) or err}; download it again") from err


def _what_is_cut(file: pathlib.Path) -> str | None:
    """Which tensor of a safetensors file ends beyond the end of the file; None if none is known to."""
    size = file.stat().st_size
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        if 8 + length > size:
            return f"truncated: the header says {length} bytes, and the file has {size}"
        try:
            header = json.loads(raw.read(length))
            ends = {name: t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
    cut = sorted((end, name) for name, end in ends.items() if 8 + length + end > size)
    if not cut:
        return None
    return f"truncated: tensor {cut[0][1]!r} ends at byte {8 + length + cut[0][0]}, and the file has {size}"


def _account(
    directory: pathlib.Path,
    config: ModelConfig,
    expected: Mapping[str, Place],
    stored: Mapping[str, Any],
    file_of: Mapping[str, pathlib.Path],
) -> None:
    """Errors: a tensor that is missing, left over, of another shape, or no float."""
    for name, place in expected.items():
        if name not in stored:
            raise ValueError(f"{directory}: got no tensor {name!r}, which model_type and config.json call for")
        shape, dtype = tuple(stored[name].get_shape()), stored[name].get_dtype()
        if shape != their_shape(place):
            raise ValueError(f"{file_of[name]}: tensor {name!r}: got shape {shape}, want {their_shape(place)}")
        if dtype not in FLOATS:
            raise ValueError(f"{file_of[name]}: tensor {name!r}: got dtype {dtype}, want one of {', '.join(FLOATS)}")
    # Tables of RoPE's frequencies, which old checkpoints keep; config.json says the same.
    left = {name for name in stored.keys() - expected.keys() if not name.endswith(".rotary_emb.inv_freq")}
    head, embed = TOP_NAMES["lm_head"], TOP_NAMES["embed"]
    if config.tie_embeddings and head in left:
        _want_equal(file_of[head], head, stored[head], embed, stored[embed])
        left.discard(head)  # a second copy of the table, which some writers keep
    if left:
        first = sorted(left)[0]
        raise ValueError(f"{file_of[first]}: got {len(left)} tensors the config has no place for: {sorted(left)[:5]}")


def _want_equal(file: pathlib.Path, name: str, stored: Any, other: str, table: Any, rows: int = 8192) -> None:
    same = stored.get_shape() == table.get_shape() and stored.get_dtype() == table.get_dtype()
    total = table.get_shape()[0]
    parts = [slice(i, min(i + rows, total)) for i in range(0, total, rows)]
    if not same or any(not np.array_equal(stored[part], table[part]) for part in parts):
        raise ValueError(
            f"{file}: tensor {name!r} differs from {other!r}, but config.json says tie_word_embeddings=true; "
            "set it to false if the model has a head of its own"
        )


# --- writing --------------------------------------------------------------------------------------------------------


def save(
    params: Params,
    config: ModelConfig,
    directory: str | pathlib.Path,
    *,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
    end_ids: Sequence[int] = (),
    longest: int | None = None,
    generation: Mapping[str, Any] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `transformers` loads: config.json, float32 safetensors, and, with `tokenizer`, its files.

    Above `shard_bytes` the weights are cut into several files with an index; one file's tensors are in host memory at a
    time. `end_ids` (default: the tokenizer's eos) go into generation_config.json, and with them what `generation` says
    beside ids (temperature, top_p); `longest`: see `describe`. Needs one process that addresses all
    of `params`. Errors (ValueError): a config that no family computes, parameters of another shape, weights there
    already.
    """
    described = describe(config, longest=longest)
    shapes = {tuple(e.key for e in path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
    wrong = sorted("/".join(path) for path, shape in set(shapes.items()) ^ set(shapes_of(config).items()))
    if wrong:
        raise ValueError(f"parameters do not fit the config: {wrong[:5]}; adapters are merged before a model is saved")
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if old := sorted(directory.glob("*.safetensors*")):
        raise ValueError(f"{old[0]}: holds weights already; give a new folder")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
        ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
        ends = list(end_ids) or [tokenizer.eos_token_id]
        ids = {name: value for name, value in ids.items() if value is not None} | {"eos_token_id": ends}
        _write_json(directory / "generation_config.json", {**generation, **ids})
        described |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    shards = _cut(places(config), shard_bytes)
    files = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        tensors = {name: to_theirs(place.kind, _fetch(params, place)) for name, place in shard.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        listed = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(_bytes(place) for shard in shards for place in shard.values())
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": listed})
    _write_json(directory / "config.json", described)


def _cut(tensors: Mapping[str, Place], most: int) -> list[dict[str, Place]]:
    """Consecutive tensors of at most `most` bytes together; a larger one has a file of its own."""
    shards: list[dict[str, Place]] = [{}]
    size = 0
    for name, place in tensors.items():
        if shards[-1] and size + _bytes(place) > most:
            shards.append({})
            size = 0
        shards[-1][name] = place
        size += _bytes(place)
    return shards


def _bytes(place: Place) -> int:
    return 4 * int(np.prod(place.shape))


def _shard_name(i: int, n: int) -> str:
    return f"model-{i + 1:05d}-of-{n:05d}.safetensors"


def _fetch(params: Params, place: Place) -> np.ndarray:
    leaf = params
    for name in place.path:
        leaf = leaf[name]
    return np.asarray(jax.device_get(leaf if place.layer is None else leaf[place.layer]), np.float32)


def _write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
