"""Messages to ids, world text to ids to append, ids to text: the only place where text becomes tokens.

Sampled ids are kept as sampled and never encoded again (text is a view of them). What stands around the contents, the
*glue*, is read off the chat template once by rendering sentinel messages; contents are encoded alone by a copy of the
tokenizer that has no added tokens, so text can hold `<|end|>` or `<search>` and never becomes a control id.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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
class _Glue:
    """Ids around the contents of a conversation: pieces[0] content[0] pieces[1] content[1] ... pieces[n]."""

    pieces: tuple[tuple[int, ...], ...]
    leads: tuple[str, ...]  # "" or " ": a space before the content is encoded with it, as part of its first word
    trims: tuple[bool, ...]  # the template strips this content


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Glue around a world message that follows a sampled turn, and whether the template leaves that turn as it was."""

    before: tuple[int, ...]  # from the end of the sampled text to the world's content
    after: tuple[int, ...]  # from the world's content to the next sample
    end: int  # how many ids of `before` close the sampled turn, up to and including the end-of-turn id
    lead: str
    trims: bool
    keeps_text: bool
    keeps_thinking: bool


class Codec:
    """Chat template and tokenizer as three maps: start, extend, view.

    Works with any fast `transformers` tokenizer with a chat template. Thread-safe. Padding is told by segment ids,
    never by `pad_id`, which may be one of `end_ids`. Does not cover: tool schemas in the template, images.
    """

    end_ids: tuple[int, ...]  # ids that end a turn when sampled; the first one is the template's own
    pad_id: int
    vocab_size: int

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        """Raises ValueError when the template is missing, or has no end-of-turn token."""
        if not getattr(tokenizer, "is_fast", False) or not tokenizer.chat_template:
            raise ValueError(
                f"codec: got {type(tokenizer).__name__} with chat_template={tokenizer.chat_template!r}, "
                "want a fast tokenizer with a chat template; set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        names = {getattr(tokenizer, name) for name in _NAMED}
        tags = [t for t in spec["added_tokens"] if _TAG.fullmatch(t["content"]) and t["content"] not in names]
        self._full = _backend(spec, spec["added_tokens"])
        self._plain = _backend(spec, [])
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
        self.vocab_size = self._full.get_vocab_size(with_added_tokens=True)
        # bound per instance: a cache on the method would keep the codec alive for ever
        self._start_glue = functools.cache(self._derive_start)
        self._turn_glue = functools.cache(self._derive_turn)
        end = self._template_end()
        eos = tokenizer.eos_token_id
        self.end_ids = (end,) if eos is None or eos == end else (end, eos)
        self.pad_id = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a prompt up to where the policy begins to sample. No content is ever read as a control token."""
        if not messages:
            raise ValueError("codec.start: got no messages, want at least one; give the task a prompt")
        glue = self._start_glue(tuple(message.role for message in messages))
        ids = list(glue.pieces[0])
        for message, lead, trim, piece in zip(messages, glue.leads, glue.trims, glue.pieces[1:], strict=True):
            ids += self._world(message.content, lead, trim)
            ids += piece
        return ids

    def extend(self, sampled_ids: Sequence[int], text: str, role: str = "tool") -> list[int]:
        """Ids to append after `sampled_ids` when the world answers `text`: close the turn, the text, open the next one.

        A sampled end-of-turn id is not repeated. Raises NotPrefix when the template would change the sampled turn.
        """
        glue = self._turn_glue(role)
        thinking = "</think>" in self.view(sampled_ids)
        if not (glue.keeps_thinking if thinking else glue.keeps_text):
            raise NotPrefix(
                f"codec.extend: the template rewrites an earlier {'thinking ' if thinking else ''}turn when a {role!r} "
                "message follows, want a prefix extension; start a new row, or use a template or role that keeps turns"
            )
        closed = bool(sampled_ids) and sampled_ids[-1] == self.end_ids[0]
        ids = list(glue.before[glue.end :] if closed else glue.before)
        ids += self._world(text, glue.lead, glue.trims)
        ids += glue.after
        return ids

    def check_turns(self, role: str = "tool", thinking: bool = True) -> None:
        """Call at start-up: that turns followed by a `role` message are prefix extensions, also those with a thinking
        part.

        Raises NotPrefix when the template rewrites them, ValueError when it refuses the role. An episode under such a
        template has to be split into several rows; that comes with real models, and until then a run with it is refused
        before it begins.
        """
        glue = self._turn_glue(role)
        for kind, kept in (("", glue.keeps_text), ("thinking ", glue.keeps_thinking or not thinking)):
            if not kept:
                raise NotPrefix(
                    f"codec: the chat template rewrites an earlier {kind}turn when a {role!r} message follows, want a "
                    "prefix extension; use a template that keeps its turns (one without a split on '</think>', say), "
                    "or another role for the world's messages"
                )

    def view(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens written out. A cut UTF-8 character shows as U+FFFD."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    def encode_action(self, text: str) -> list[int]:
        """Ids of a *scripted* action: its tags become their single ids, other text is plain. Never for sampled text."""
        if self._tags is None:
            return self._plain.encode(text, add_special_tokens=False).ids
        ids = []
        for i, piece in enumerate(self._tags.split(text)):  # odd pieces are the tags
            ids += [self._tag_ids[piece]] if i % 2 else self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    def _world(self, text: str, lead: str, trims: bool) -> list[int]:
        ids = self._plain.encode(lead + (text.strip() if trims else text), add_special_tokens=False).ids
        forged = self._control.intersection(ids)
        if forged:  # only a model whose own vocabulary holds its control tokens can get here
            names = sorted(self._control_texts[i] for i in forged)
            raise ValueError(f"codec: world text became control ids {names}, want none; escape them in the world")
        return ids

    def _render(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        from jinja2 import TemplateError  # transformers renders chat templates with it

        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as err:
            raise ValueError(
                f"codec: the chat template refuses roles {list(roles)} ({err}); use roles that it knows "
                "(role='user' where it has no tool role)"
            ) from err

    def _derive_start(self, roles: tuple[str, ...]) -> _Glue:
        marks = [f"qzmark{i}zq" for i in range(len(roles))]
        pieces = _split(self._render(roles, marks), marks)
        padded = self._render(roles, [f"{mark} " for mark in marks])
        return _Glue(
            pieces=tuple(self._encode_glue(piece, i < len(marks)) for i, piece in enumerate(pieces)),
            leads=tuple(_lead(piece) for piece in pieces[:-1]),
            trims=tuple(f"{mark} " not in padded for mark in marks),
        )

    def _derive_turn(self, role: str) -> _Turn:
        # With and without thinking, one and two turns deep: a template may keep only the last turn's thinking.
        plain = _probe(self._render, role, ["qzturn0zq", "qzturn1zq"])
        think = _probe(self._render, role, [f"<think>\nqzwhy{i}zq\n</think>\n\nqzturn{i}zq" for i in range(2)])
        roles, marks = ["user", "assistant", role], [f"qzmark{i}zq" for i in range(3)]
        pieces = _split(self._render(roles, marks), marks)
        before, after = self._encode_glue(pieces[2], True), self._encode_glue(pieces[3], False)
        return _Turn(
            before=before,
            after=after,
            end=1 + _first(before, self._control),
            lead=_lead(pieces[2]),
            trims=f"{marks[2]} " not in self._render(roles, [f"{mark} " for mark in marks]),
            keeps_text=plain,
            keeps_thinking=think,
        )

    def _encode_glue(self, text: str, before_content: bool) -> tuple[int, ...]:
        if before_content:
            text = text.removesuffix(_lead(text))
        return tuple(self._full.encode(text, add_special_tokens=False).ids)

    def _template_end(self) -> int:
        roles, marks = ["user", "assistant", "user"], [f"qzmark{i}zq" for i in range(3)]
        text = _split(self._render(roles, marks), marks)[2]
        ids = self._encode_glue(text, True)
        index = _first(ids, self._control)
        if index < 0:
            raise ValueError(
                f"codec: got {text!r} after an assistant message, want an added token that ends the turn; "
                "use a chat template with an end-of-turn token"
            )
        return ids[index]


def _backend(spec: dict, added: list) -> "tokenizers.Tokenizer":
    """A copy with only these added tokens; no truncation or padding, which are state that threads would share."""
    import tokenizers

    spec = {**spec, "added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


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


def _lead(piece: str) -> str:
    return " " if piece.endswith(" ") else ""


def _first(ids: Sequence[int], wanted: frozenset[int]) -> int:
    return next((i for i, token in enumerate(ids) if token in wanted), -1)


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Cuts a rendered conversation at its sentinels. Raises ValueError unless each occurs once, in order."""
    pieces, rest = [], text
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise ValueError(
                f"codec: the template renders message {mark!r} {'twice' if found else 'nowhere or out of order'} in "
                f"{text!r}, want once, in order; this template cannot be split into glue and contents"
            )
        pieces.append(before)
    return [*pieces, rest]


def _probe(render, role: str, turns: Sequence[str]) -> bool:
    """True when each render of a growing conversation extends the last one by the turn as it was written.

    Space around a turn does not count: templates strip it, and the sampled ids keep it.
    """
    roles, contents = ["user"], ["qzask0zq"]
    seen = render(roles, contents)
    for i, turn in enumerate(turns):
        roles, contents = [*roles, "assistant", role], [*contents, turn, f"qzsaid{i}zq"]
        longer = render(roles, contents)
        if not longer.startswith(seen) or not longer[len(seen) :].lstrip().startswith(turn):
            return False
        seen = longer
    return True
