"""A GGUF file's vocabulary as a `transformers` tokenizer: byte-level BPE, as Llama 3, SmolLM2 and Qwen use it.

The file names the pre-tokenizer and does not describe it: each kind is written out here (llama.cpp's names).
`transformers` is imported inside the functions: it costs about a second.
"""

import collections
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Words with one character before them, numbers in runs of at most `{}`, other characters with one space before and
# line ends after them; then white space, of which the last belongs to the word that follows.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = {"smollm": "smollm", "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3", "qwen2": "qwen2"}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type
_KEY = "tokenizer.ggml."
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(fields: Mapping[str, Any], path: pathlib.Path) -> "PreTrainedTokenizerFast":
    """The tokenizer that the metadata describe, its ids those of the file. Errors (ValueError) name file and key."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    kind = _kind(fields, path)
    tokens, types = _vocabulary(fields, path)
    merges = [tuple(merge.split(" ")) for merge in _list(fields, "merges", path)]
    try:
        model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=kind == "llama3"
        )
    except Exception as err:  # the Rust side has one class for all
        raise ValueError(f"{path}: {_KEY}merges: {err}; want pairs whose parts and whole are tokens") from err
    backend = Tokenizer(model)
    _set_pieces(backend, kind)
    backend.decoder = decoders.ByteLevel()
    added = {i: AddedToken(t, normalized=False, special=types[i] == _CONTROL) for i, t in enumerate(tokens)}
    backend.add_tokens([token for i, token in added.items() if types[i] in (_CONTROL, _USER_DEFINED)])
    named = {name: _named(fields, f"{key}_token_id", tokens, path) for name, key in _NAMED.items()}
    named = {name: token for name, token in named.items() if token is not None}
    if fields.get(f"{_KEY}add_bos_token", kind == "llama3") and "bos_token" in named:
        _begin_with(backend, named["bos_token"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def end_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a turn by the metadata: end of sequence, then end of turn."""
    keys = (f"{_KEY}eos_token_id", f"{_KEY}eot_token_id")
    return tuple(dict.fromkeys(fields[key] for key in keys if key in fields))


def _kind(fields: Mapping[str, Any], path: pathlib.Path) -> str:
    model, kind = fields.get(f"{_KEY}model"), fields.get(f"{_KEY}pre")
    if model != "gpt2":
        raise ValueError(f"{path}: {_KEY}model: got {model!r}, want 'gpt2' (byte-level BPE)")
    if kind not in KINDS:
        raise ValueError(f"{path}: {_KEY}pre: got {kind!r}, want one of {list(KINDS)}")
    return KINDS[kind]


def _vocabulary(fields: Mapping[str, Any], path: pathlib.Path) -> tuple[list[str], list[int]]:
    """Tokens and their types; places at the end that no token fills (rows of a padded table) are cut off."""
    tokens, types = _list(fields, "tokens", path), _list(fields, "token_type", path)
    if len(tokens) != len(types):
        raise ValueError(f"{path}: {_KEY}token_type: got {len(types)} entries for {len(tokens)} tokens")
    while types and types[-1] == _UNUSED:
        tokens, types = tokens[:-1], types[:-1]
    if len(set(tokens)) < len(tokens):
        twice = collections.Counter(tokens).most_common(1)[0][0]
        raise ValueError(f"{path}: {_KEY}tokens: got {twice!r} twice, want each token once")
    return tokens, types


def _list(fields: Mapping[str, Any], name: str, path: pathlib.Path) -> list:
    value = fields.get(f"{_KEY}{name}")
    if not isinstance(value, list):
        raise ValueError(f"{path}: {_KEY}{name}: got {value!r}, want a list; the file has no whole tokenizer")
    return value


def _named(fields: Mapping[str, Any], key: str, tokens: list[str], path: pathlib.Path) -> str | None:
    i = fields.get(f"{_KEY}{key}")
    if i is not None and i >= len(tokens):
        raise ValueError(f"{path}: {_KEY}{key}: got {i}, want an id below {len(tokens)}")
    return None if i is None else tokens[i]


def _set_pieces(backend: Any, kind: str) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    if kind == "smollm":
        # GPT-2's own pieces, but every digit alone.
        first, last = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        pattern = Regex(_WORDS.format("{1,3}" if kind == "llama3" else ""))
        first = pre_tokenizers.Split(pattern, behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, last])
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()


def _begin_with(backend: Any, token: str) -> None:
    from tokenizers import processors

    backend.post_processor = processors.TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 {token}:1 $B:1",
        special_tokens=[(token, backend.token_to_id(token))],
    )
