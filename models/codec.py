"""Messages to ids, world text to ids to append, ids to text: the only place where text becomes tokens.

Sampled ids are kept as sampled and never encoded again (text is a view of them), as long as the chat template leaves a
turn as it was; where it rewrites one, the conversation is rendered anew as the *context* of another row (NotPrefix).
What stands around the contents, the *glue*, is read off the template once (models/glue.py); contents are encoded alone
by a copy of the tokenizer that has no added tokens, so text can hold `<|end|>` or `<search>` and never becomes a
control id.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from models.glue import SLOT, ChatTemplate, Outline, outline

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

# Added tokens of this form are tags that a scripted action may write; roles and <|...|> never are.
_TAG = re.compile(r"</?[A-Za-z_]+>")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")


class Message(Protocol):
    """One chat message."""

    role: str
    content: str


class NotPrefix(ValueError):
    """The template would drop or change an earlier turn: the next does not extend the ids so far. Start a new row."""


@dataclasses.dataclass(frozen=True)
class _Answer:
    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class _Glue:
    """Ids around the contents of a conversation: pieces[0] slot kept[0] pieces[1] slot kept[1] ... pieces[n]."""

    pieces: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    leads: tuple[str, ...]  # "" or " ": a space before the content is encoded with it, as part of its first word
    spellings: tuple[Callable[[str], str], ...]


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Glue around the world's messages after a sampled turn, and whether the template leaves that turn as it was."""

    before: tuple[int, ...]  # from the end of the sampled text to the world's first content
    after: tuple[tuple[int, ...], ...]  # from each content to the next, and from the last one to the next sample
    end: int  # how many ids of `before` close the sampled turn, up to and including the end-of-turn id
    leads: tuple[str, ...]
    spellings: tuple[Callable[[str], str], ...]
    keeps_text: bool
    keeps_thinking: bool


class Codec:
    """Chat template and tokenizer as three maps: start, extend, view.

    Works with any fast `transformers` tokenizer with a chat template. Thread-safe. Padding is told by segment ids,
    never by `pad_id`, which may be one of `end_ids`. A generation prompt that opens a thinking block is glue. A date
    that a template asks the clock for is always the same day. Tools (JSON schemas) stand where the template puts them.
    Does not cover: images; tags that are plain text in the vocabulary too (world text can spell those: escape them in
    the world).
    """

    end_ids: tuple[int, ...]  # ids that end a turn when sampled; the first one is the template's own
    pad_id: int
    vocab_size: int  # one more than the largest id
    opened: str  # the thinking tag with which every generation prompt ends, "" if it opens none

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", extra_end_ids: Sequence[int] = ()):
        """`end_ids` is the union of the template's end of turn, the tokenizer's eos and `extra_end_ids` (those of a
        generation config, say).

        Raises ValueError when the template is missing or has no end-of-turn token, or for an id out of range.
        """
        if not getattr(tokenizer, "is_fast", False) or not tokenizer.chat_template:
            raise ValueError(
                f"codec: got {type(tokenizer).__name__} with chat_template={tokenizer.chat_template!r}, "
                "want a fast tokenizer with a chat template: chat_template.jinja beside tokenizer.json, or "
                "chat_template in tokenizer_config.json"
            )
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        names = {getattr(tokenizer, name) for name in _NAMED}
        tags = [t for t in spec["added_tokens"] if _TAG.fullmatch(t["content"]) and t["content"] not in names]
        self._full = _backend(spec, spec["added_tokens"])
        self._plain = _backend(spec, [])
        self._characters_of_an_id = _characters_of_an_id(spec)
        self._control_texts = {t["id"]: t["content"] for t in spec["added_tokens"]}
        self._control = frozenset(self._control_texts)
        moved = [text for i, text in self._control_texts.items() if self._full.token_to_id(text) != i]
        if moved:
            raise ValueError(
                f"codec: added tokens {moved} got other ids in a copy of the tokenizer, want the same; "
                "save it again without gaps between its ids"
            )
        self._tag_ids = {t["content"]: t["id"] for t in tags}
        self._tags = _tag_pattern(tags)
        self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())  # there may be gaps
        # bound per instance: a cache on the method would keep the codec alive for ever
        self._template = ChatTemplate(tokenizer)
        self._start_glue = functools.lru_cache(maxsize=1024)(self._derive_start)
        self._turn_glue = functools.lru_cache(maxsize=256)(self._derive_turn)
        self._keeps = functools.lru_cache(maxsize=4096)(self._template.keeps)
        self._keeps_all = functools.cache(self._template.keeps_all)
        self.opened = self._template.opened
        end = self._template_end()
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.end_ids = tuple(dict.fromkeys([end, *eos, *map(int, extra_end_ids)]))
        if not 0 <= min(self.end_ids) <= max(self.end_ids) < self.vocab_size:
            raise ValueError(f"codec: got end ids {self.end_ids}, want ids from 0 to {self.vocab_size - 1}")
        self.pad_id = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @functools.cached_property
    def world_role(self) -> str:
        """The role in which the world answers: "tool", or "user" where the template refuses or drops tool messages."""
        try:
            self._turn_glue(("tool",))
        except ValueError:
            self._turn_glue(("user",))
            return "user"
        return "tool"

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether the template tells the model of its tools; where it does not, `tools` change no ids."""
        return self._template.takes_tools

    @property
    def tool_form(self) -> Literal["hermes", "llama"]:
        """How the model writes its calls, by what its template says of them."""
        return self._template.tool_form

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a prompt up to where the policy begins to sample. No content is ever read as a control token.

        An assistant's message becomes what the template leaves of it; its tags are single ids (`encode_action`).
        Errors (ValueError): no messages, roles that the template refuses, tools whose text holds a control token.
        """
        if not messages:
            raise ValueError("codec.start: got no messages, want at least one; give the task a prompt")
        outlines, stretches, owns = _outlines(messages)
        glue = self._start_glue(outlines, self._tools_text(tools))
        ids = list(glue.pieces[0])
        for slot, lead, spelling, piece in zip(glue.kept, glue.leads, glue.spellings, glue.pieces[1:], strict=True):
            text = lead + spelling(stretches[slot])
            ids += self.encode_action(text) if owns[slot] else self._world(text)
            ids += piece
        return ids

    def extend(
        self, sampled_ids: Sequence[int], text: str, role: str = "tool", before: Sequence[Message] = ()
    ) -> list[int]:
        """Ids to append after `sampled_ids` when the world answers `text`: `extend_by` with one message."""
        return self.extend_by(sampled_ids, [_Answer(role, text)], before)

    def extend_by(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        before: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids to append after `sampled_ids` when others answer: close the turn, their messages, open the next turn.

        A sampled end-of-turn id is not repeated. `before` (with its `tools`) is the conversation before the turn, whose
        rendering must stay as it is too; without it, one user message and up to two turns like this one are taken.
        Raises NotPrefix when the template would change any of it: `start` then renders the whole conversation.
        """
        roles = tuple(message.role for message in messages)
        if not roles or "assistant" in roles:
            raise ValueError(f"codec.extend_by: got messages of roles {roles}, want one or more, none the assistant's")
        glue = self._turn_glue(roles)
        said = self.turn_text(sampled_ids)
        thinking = "</think>" in said
        if before:
            kept = self._keeps(_outlines(before)[0], outline("assistant", said)[0], roles, self._tools_text(tools))
        else:
            kept = glue.keeps_thinking if thinking else glue.keeps_text
        if not kept:
            raise NotPrefix(
                f"codec.extend: the template rewrites an earlier {'thinking ' if thinking else ''}turn when a "
                f"{roles[0]!r} message follows, want a prefix extension; start a new row, or use a template or role "
                "that keeps turns"
            )
        closed = bool(sampled_ids) and sampled_ids[-1] == self.end_ids[0]
        ids = list(glue.before[glue.end :] if closed else glue.before)
        for message, lead, spelling, after in zip(messages, glue.leads, glue.spellings, glue.after, strict=True):
            ids += self._world(lead + spelling(message.content))
            ids += after
        return ids

    def keeps_turns(self, role: str, thinking: bool = True) -> bool:
        """Whether turns followed by a `role` message are prefix extensions whatever is said, thinking tags in any place
        included if `thinking`: then an episode is one row. Raises ValueError when the template refuses the role.
        """
        return self._keeps_all(role, thinking)

    def turn_text(self, sampled_ids: Sequence[int]) -> str:
        """The content of the assistant's message that was sampled: with what the generation prompt opened, without an
        end id.
        """
        ids = sampled_ids[:-1] if sampled_ids and sampled_ids[-1] in self.end_ids else sampled_ids
        return self.opened + self.view(ids)

    def view(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens written out. A cut UTF-8 character shows as U+FFFD."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    def id_bytes(self) -> list[bytes | None]:
        """The UTF-8 bytes that each id adds to a text (`view` shows them); None for control tokens, which are no text,
        and for what is no token. A tag is its text. For models/constraint.py.

        Errors: ValueError for a tokenizer that is not byte-level BPE.
        """
        spec = json.loads(self._full.to_str())
        if (spec["decoder"] or {}).get("type") != "ByteLevel":
            raise ValueError(
                f"codec: got a tokenizer with decoder {spec['decoder']}, want a byte-level one (as Llama 3 and Qwen "
                "have), whose ids have the same bytes wherever they stand"
            )
        unspelled = self._control.difference(self._tag_ids.values())
        spelled: list[bytes | None] = [None] * self.vocab_size
        for text, i in self._full.get_vocab(with_added_tokens=True).items():
            if i not in unspelled:
                read = [_BYTE_OF.get(character) for character in text]
                spelled[i] = text.encode() if None in read else bytes(read)  # as its decoder does
        return spelled

    def fewest_ids(self, text: str) -> int:
        """So many ids or more stand for `text` where anybody but the assistant says it: told by its length alone, since
        encoding what fits nowhere may take minutes. 0 where the tokenizer is of a kind that does not tell.
        """
        return math.ceil(len(text.strip()) / self._characters_of_an_id)  # a template may strip it

    def encode_action(self, text: str) -> list[int]:
        """Ids of a *scripted* action: its tags become their single ids, other text is plain. Never for sampled text."""
        if self._tags is None:
            return self._plain.encode(text, add_special_tokens=False).ids
        ids = []
        for i, piece in enumerate(self._tags.split(text)):  # odd pieces are the tags
            ids += [self._tag_ids[piece]] if i % 2 else self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    def _world(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no character: it becomes "?"
        ids = self._plain.encode(text, add_special_tokens=False).ids
        forged = self._control.intersection(ids)
        if forged:  # only a model whose own vocabulary holds its control tokens can get here
            names = sorted(self._control_texts[i] for i in forged)
            raise ValueError(f"codec: world text became control ids {names}, want none; escape them in the world")
        return ids

    def _tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Tools as JSON, "" for none: they become glue, so nothing in them may read as a control token."""
        text = json.dumps(list(tools), ensure_ascii=False) if tools else ""
        forged = sorted(name for name in self._control_texts.values() if name in text)
        if forged:
            raise ValueError(f"codec: tools hold the control tokens {forged}, want none; write their texts otherwise")
        return text

    def _derive_start(self, conversation: tuple[Outline, ...], tools: str) -> _Glue:
        layout = self._template.layout(conversation, tools)
        last = len(layout.pieces) - 1
        return _Glue(
            pieces=tuple(self._encode_glue(piece, i < last) for i, piece in enumerate(layout.pieces)),
            kept=layout.kept,
            leads=tuple(_lead(piece) for piece in layout.pieces[:-1]),
            spellings=layout.spellings,
        )

    def _derive_turn(self, roles: tuple[str, ...]) -> _Turn:
        think = f"{self.opened or '<think>'}\n{SLOT}\n</think>\n\n{SLOT}"
        close, *rest = self._template.turn(roles)
        before = self._encode_glue(close, True)
        whole = self._template.layout([("user", SLOT), ("assistant", SLOT), *((role, SLOT) for role in roles)])
        return _Turn(
            before=before,
            after=tuple(self._encode_glue(piece, i < len(rest) - 1) for i, piece in enumerate(rest)),
            end=1 + _first(before, self._control),
            leads=tuple(_lead(piece) for piece in (close, *rest[:-1])),
            spellings=whole.spellings[-len(roles) :],
            keeps_text=self._keeps_two(self.opened + SLOT, roles),
            keeps_thinking=self._keeps_two(think, roles),
        )

    def _keeps_two(self, said: str, roles: tuple[str, ...]) -> bool:
        """Two turns deep: a template may keep the last turn's thinking alone."""
        first = (("user", SLOT),)
        second = (*first, ("assistant", said), *((role, SLOT) for role in roles))
        return self._keeps(first, said, roles) and self._keeps(second, said, roles)

    def _encode_glue(self, text: str, before_content: bool) -> tuple[int, ...]:
        if before_content:
            text = text.removesuffix(_lead(text))
        return tuple(self._full.encode(text, add_special_tokens=False).ids)

    def _template_end(self) -> int:
        text = self._template.turn(("user",))[0]
        ids = self._encode_glue(text, True)
        index = _first(ids, self._control)
        if index < 0:
            raise ValueError(
                f"codec: got {text!r} after an assistant message, want an added token that ends the turn; "
                "use a chat template with an end-of-turn token"
            )
        return ids[index]


def _outlines(messages: Sequence[Message]) -> tuple[tuple[Outline, ...], list[str], list[bool]]:
    """Outlines of a conversation, the text of each slot, and whether the assistant said it."""
    outlines, stretches, owns = [], [], []
    for message in messages:
        text, own = outline(message.role, message.content)
        outlines.append((message.role, text))
        stretches += own
        owns += [message.role == "assistant"] * len(own)
    return tuple(outlines), stretches, owns


def _backend(spec: dict, added: list) -> "tokenizers.Tokenizer":
    """A copy with only these added tokens; no truncation or padding, which are state that threads would share."""
    import tokenizers

    spec = {**spec, "added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _characters_of_an_id(spec: dict) -> float:
    """The most characters of a text for which one id can stand; ∞ where that is not known.

    Byte-level BPE that has every byte leaves nothing out and knows all: the characters of an entry are bytes of text,
    and a character has at least one. Composed (NFC), one stands for four at most (Unicode's expansion factor of NFD).
    """
    model, composed = spec["model"], {None: 1, "NFC": 4}.get((spec["normalizer"] or {}).get("type"))
    cut = spec["pre_tokenizer"] or {}
    cuts = cut.get("pretokenizers", [cut])
    kinds = {each.get("type") for each in cuts}
    whole = {"ByteLevel"} <= kinds <= {"ByteLevel", "Digits", "Split"}
    whole = whole and not any(each.get("behavior") == "Removed" for each in cuts)
    if composed is None or not whole or model["type"] != "BPE" or not _BYTE_OF.keys() <= model["vocab"].keys():
        return math.inf
    return composed * max(map(len, model["vocab"]))


def _tag_pattern(tags: Sequence[dict]) -> re.Pattern | None:
    """Splits at the tags, each with the space that its token takes. (A copy with only the tags renumbers them.)"""
    if not tags:
        return None
    texts = [re.escape(tag["content"]) for tag in tags]
    left = [text for text, tag in zip(texts, tags, strict=True) if tag["lstrip"]]
    right = [text for text, tag in zip(texts, tags, strict=True) if tag["rstrip"]]
    before = rf"(?:\s*(?={'|'.join(left)}))?" if left else ""
    after = "(?:" + "|".join(rf"(?<={text})\s*" for text in right) + ")?" if right else ""
    return re.compile(f"{before}({'|'.join(texts)}){after}")


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones for themselves, the others as
    the characters from 256 on (Radford et al. 2019, GPT-2's code).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _lead(piece: str) -> str:
    return " " if piece.endswith(" ") else ""


def _first(ids: Sequence[int], wanted: frozenset[int]) -> int:
    return next((i for i, token in enumerate(ids) if token in wanted), -1)
