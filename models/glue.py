"""What a chat template puts around contents, read off by rendering marks in their place.

A conversation is rendered as *outlines*: each stretch of text is a SLOT, filled with a mark. Of an assistant's message
the thinking tags and the outer space stay in the outline, because templates look at them (they drop earlier thinking,
or strip); any other content is one slot, so that no text of the world can change the glue. Text alone; no ids.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SLOT = "\0"
Outline = tuple[str, str]  # role, text with SLOTs

_TAGS = re.compile(r"(\s*</?think>\s*)")
_OPENED = re.compile(r"<think>\s*\Z")
# Forms that a turn may take, thinking in and out of order included: what templates were seen to tell apart.
_FORMS = (
    "",
    SLOT,
    f"<think>{SLOT}",
    f"{SLOT}</think>{SLOT}",
    f"<think></think>{SLOT}",
    f"<think>{SLOT}</think>{SLOT}",
    f"{SLOT}<think>{SLOT}</think>{SLOT}<think>{SLOT}</think>",
)
# Templates that ask the clock (Llama 3.2 writes the date into the system turn) always hear the day that Llama's fall
# back to where there is none: ids must not depend on the day of a run.
_DAY = datetime.datetime(2024, 7, 26)
_CLOCK = (
    "{% macro strftime_now(form) %}{{ form"
    + "".join(f" | replace('{part}', '{_DAY.strftime(part)}')" for part in "%d %b %B %m %Y %y %A %a %H %M %S".split())
    + " }}{% endmacro %}{{ '' }}"  # what is printed last keeps a newline with which the template begins
)
# How a template may write a content, tried in this order ("\t" around the probe tells the first four apart). Llama's
# writes tool text as a JSON string; the quotes are glue.
_SPELLINGS: tuple[Callable[[str], str], ...] = (
    str,
    str.rstrip,
    str.lstrip,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A rendered conversation, cut at its contents: pieces[0] slot kept[0] pieces[1] slot kept[1] ... pieces[n]."""

    pieces: tuple[str, ...]
    kept: tuple[int, ...]  # the slots that stand in the text: a template may drop what an assistant said
    spellings: tuple[Callable[[str], str], ...]  # how the template writes the text of each


class ChatTemplate:
    """A tokenizer's chat template over outlines. Errors (ValueError): it refuses a role, or cannot be cut at marks."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        self._tokenizer = tokenizer
        source = tokenizer.get_chat_template()
        self._source = _CLOCK + source if "strftime_now" in source else source
        self.turn = functools.lru_cache(maxsize=256)(self._turn)
        found = _OPENED.search(self.render([("user", SLOT)]))
        self.opened = found.group() if found else ""  # the thinking tag that the generation prompt opens, if it does

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether it writes the tools that it is given anywhere."""
        tool = {"name": _mark(1), "description": _mark(1), "parameters": {"type": "object", "properties": {}}}
        try:
            return _mark(1) in self.render([("user", SLOT)], tools=json.dumps([{"type": "function", "function": tool}]))
        except ValueError:
            return False

    @property
    def tool_form(self) -> Literal["hermes", "llama"]:
        """Llama's where it speaks of "parameters" and not of <tool_call>."""
        llama = "<tool_call>" not in self._source and ('"parameters"' in self._source or "python_tag" in self._source)
        return "llama" if llama else "hermes"

    def render(self, conversation: Sequence[Outline], mark: Callable[[int], str] | None = None, tools: str = "") -> str:
        """The text of the conversation with its generation prompt; slot i is `mark(i)`, `tools` are JSON."""
        from jinja2 import TemplateError  # transformers renders chat templates with it

        contents, slot = [], 0
        for _, text in conversation:
            contents.append(_fill(text, slot, mark or _mark))
            slot += text.count(SLOT)
        messages = [{"role": role, "content": text} for (role, _), text in zip(conversation, contents, strict=True)]
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=json.loads(tools) if tools else None,
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as err:
            raise ValueError(
                f"codec: the chat template refuses roles {[role for role, _ in conversation]} ({err}); use roles that "
                "it knows (role='user' where it has no tool role)"
            ) from err

    def layout(self, conversation: Sequence[Outline], tools: str = "") -> Layout:
        """Cut at the contents. Every content must be there once, in order; an assistant's may be dropped."""
        droppable = [role == "assistant" for role, text in conversation for _ in range(text.count(SLOT))]
        text = self.render(conversation, tools=tools)
        kept = [i for i, may_go in enumerate(droppable) if not may_go or _mark(i) in text]
        pieces = _cut(text, [_mark(i) for i in kept])
        probed = self.render(conversation, lambda i: _mark(i) if droppable[i] else _probe(i), tools)
        spellings = tuple(str if droppable[i] else _spelling(probed, i) for i in kept)
        return Layout(tuple(pieces), tuple(kept), spellings)

    def keeps(self, before: Sequence[Outline], said: str, roles: tuple[str, ...], tools: str = "") -> bool:
        """Whether the rendering of `before`, an assistant's `said` and messages of `roles` begins with that of `before`
        and the turn, and goes on as every turn does.

        Space within and around the turn does not count: templates move it, and the sampled ids keep it.
        """
        seen = self.render(before, tools=tools)
        longer = self.render([*before, ("assistant", said), *((role, SLOT) for role in roles)], tools=tools)
        slots = sum(text.count(SLOT) for _, text in before)
        turn = seen + _fill(said.removeprefix(self.opened), slots, _mark)
        if not longer.startswith(seen.rstrip()) or not _squeeze(longer).startswith(_squeeze(turn)):
            return False
        close, *after = self.turn(roles)
        first = slots + said.count(SLOT)
        start, *rest = _cut(longer, [_mark(first + i) for i in range(len(roles))])
        return start.endswith(close) and rest == after

    def keeps_all(self, role: str, thinking: bool) -> bool:
        """`keeps` for two turns of any two forms, those with thinking tags only if `thinking`."""
        forms = [self.opened + form for form in _FORMS if thinking or "think>" not in form]
        first = [("user", SLOT)]
        return all(
            self.keeps(first, one, (role,))
            and all(self.keeps([*first, ("assistant", one), (role, SLOT)], other, (role,)) for other in forms)
            for one in forms
        )

    def _turn(self, roles: tuple[str, ...]) -> tuple[str, ...]:
        """Text from the end of an assistant's turn to the content of the first message of `roles` after it, from there
        to the next one, and so on to the end of the generation prompt.
        """
        text = self.render([("user", SLOT), ("assistant", SLOT), *((role, SLOT) for role in roles)])
        return tuple(_cut(text, [_mark(i) for i in range(2 + len(roles))])[2:])


def outline(role: str, content: str) -> tuple[str, list[str]]:
    """The outline of a message and the stretches of text in its slots."""
    if role != "assistant":
        return SLOT, [content]
    text, stretches = "", []
    for i, piece in enumerate(_TAGS.split(content)):  # odd pieces are tags
        core = piece.strip()
        if i % 2 or not core:
            text += piece
        else:
            text += piece.replace(core, SLOT, 1)
            stretches.append(core)
    return text, stretches


def _mark(slot: int) -> str:
    return f"qzmark{slot}zq"


def _probe(slot: int) -> str:
    return f'\t{_mark(slot)}"\n\\\t'


def _fill(text: str, slot: int, mark: Callable[[int], str]) -> str:
    pieces = text.split(SLOT)
    return pieces[0] + "".join(mark(slot + i) + piece for i, piece in enumerate(pieces[1:]))


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _spelling(probed: str, slot: int) -> Callable[[str], str]:
    for spelling in _SPELLINGS:
        if spelling(_probe(slot)) in probed:
            return spelling
    raise ValueError(
        f"codec: the template writes message content {_probe(slot)!r} in a way of its own in {probed!r}, want it as it "
        "is, stripped, or as a JSON string; use another role for it, or another template"
    )


def _cut(text: str, marks: Sequence[str]) -> list[str]:
    """Cuts a rendered conversation at its marks. Raises ValueError unless each occurs once, in order."""
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
