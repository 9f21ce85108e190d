"""A byte-level BPE tokenizer trained on a corpus, saved as a Hugging Face folder with a chat template.

The pre-tokenizer keeps a name's ids free of its surroundings (needed to copy it): a word or a number takes one leading
space with it, and every other character stands alone, so " Peru" is the same ids before ")", ";", "?" and a tag. Merges
never cross these cuts.
`transformers` is imported inside the functions: it costs about a second.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
TAGS = ("think", "search", "information", "answer", "open")

# Role token, one space, content: the first word carries its space as every later word does.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] | trim + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
_PIECES = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}+| ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | pathlib.Path) -> "PreTrainedTokenizerFast":
    """Trains byte-level BPE on `texts`, saves the folder `out_dir`, and returns the tokenizer read back from it.

    `vocab_size` counts the 256 bytes and the added tokens (five pairs of tags, four roles, pad, end); a small corpus
    may give fewer. A closing tag takes the space on its left: "<search> Peru </search>" is `<search>`, " Peru",
    `</search>`.
    Raises ValueError when `vocab_size` does not hold the bytes and the added tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    control = (PAD, *(f"<|{role}|>" for role in ROLES), END)
    added = [AddedToken(text, normalized=False, special=True) for text in control]
    for tag in TAGS:
        added.append(AddedToken(f"<{tag}>", normalized=False, special=True))
        added.append(AddedToken(f"</{tag}>", normalized=False, special=True, lstrip=True))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(added):
        raise ValueError(
            f"vocab_size: got {vocab_size}, want at least {len(alphabet) + len(added)} "
            f"({len(alphabet)} bytes + {len(added)} added tokens); raise vocab_size"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    # The added tokens stay out of the BPE vocabulary: a copy without them cannot produce their ids from text.
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab_size - len(added), initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_special_tokens(added)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(out_dir))
    return load_tokenizer(out_dir)


def load_tokenizer(folder: str | pathlib.Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a folder's tokenizer.json, and the named tokens and template beside it.

    AutoTokenizer would rebuild the backend of some classes (Qwen2Tokenizer, GPT2Tokenizer) from its vocabulary and
    merges, with pieces of the class's own and so other ids.
    Errors: FileNotFoundError when there is no such file, ValueError for one that cannot be read.
    """
    path = pathlib.Path(folder)
    if not (path / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{path / 'tokenizer.json'}: no such file; want a folder with tokenizer.json, that of a fast tokenizer, or "
            "train one (models.tokenizer.train_tokenizer)"
        )
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as err:  # whatever the libraries stumble over first: they have no class for it
        raise ValueError(f"{_unreadable(path)}: unreadable ({type(err).__name__}: {err}); download it again") from err


def _unreadable(folder: pathlib.Path) -> pathlib.Path:
    """The first of a tokenizer's files that is no JSON object; the folder, if all are."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        file = folder / name
        try:
            if file.is_file() and not isinstance(json.loads(file.read_bytes()), dict):
                return file
        except ValueError:
            return file
    return folder


def end_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
    """Ids that end a turn by the folder's generation_config.json, or else by its config.json; () where neither says.

    Errors (ValueError): a file that cannot be read, or names no ids.
    """
    for name in ("generation_config.json", "config.json"):
        file = pathlib.Path(folder) / name
        if not file.is_file():
            continue
        try:
            ids = json.loads(file.read_text()).get("eos_token_id")
        except (ValueError, AttributeError) as err:
            raise ValueError(f"{file}: unreadable ({err}); download it again") from err
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int for i in ids):
            raise ValueError(f"{file}: eos_token_id: got {ids}, want one id or a list of them")
        return tuple(ids)
    return ()
