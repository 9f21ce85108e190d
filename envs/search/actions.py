"""Reading a policy's turn: one action, in tags or as a JSON tool call, or what is wrong with it."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from envs import tool_calls
from envs.answers import after_thinking

STOP = ("</search>", "</open>", "</answer>")
FORMS = "<search> query </search>, <open> document number </open> or <answer> text </answer>"

CALL_STOP = (tool_calls.CLOSE,)
CALL_FORMS = "one call of search, open or answer"


def _tool(name: str, description: str, argument: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = {"type": "object", "properties": {argument: schema}, "required": [argument], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_ARGUMENTS = {"search": "query", "open": "document", "answer": "text"}
TOOLS = (
    _tool("search", "Find documents.", "query", {"type": "string", "minLength": 1}),
    _tool("open", "Read on in a document that was found.", "document", {"type": "integer", "minimum": 1}),
    _tool("answer", "Give the answer; it ends the task.", "text", {"type": "string", "minLength": 1}),
)

_TAG = re.compile(r"<(/?)(think|search|open|answer)>")
_ACTION = re.compile(r"<(search|open|answer)>\s*(.*?)\s*</\1>", re.DOTALL)
_FORGED = re.compile(r"<\s*/?\s*information\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?:Doc\s+)?(\d{1,6})", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Action:
    kind: Literal["search", "open", "answer"]
    argument: str  # stripped, not empty


class Malformed(Exception):
    """A turn that holds no single well-formed action; the text says what is wrong, for the policy to read."""


def cut(text: str) -> str:
    """`text` up to and including the first stop string in it; what a model wrote after that was never a turn."""
    ends = [at + len(stop) for stop in STOP if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def parse(text: str) -> Action:
    """The one action of a turn.

    Tags are exact and lower case; think blocks and text around the action are free. Raises `Malformed` for no action or
    several, tags that are nested, unclosed, stray or empty, and for an <information> tag in any spelling: only the
    world writes that.
    """
    text = cut(text)
    _want_unforged(text)
    actions: list[Action] = []
    inside, start = "", 0
    for tag in _TAG.finditer(text):
        closing, name = tag.group(1), tag.group(2)
        if not closing:
            if inside:
                raise Malformed(f"<{name}> inside <{inside}>")
            inside, start = name, tag.end()
        elif name != inside:
            raise Malformed(f"</{name}> without <{name}>")
        else:
            if name != "think":
                actions.append(Action(name, " ".join(text[start : tag.start()].split())))
            inside = ""
    if inside:
        raise Malformed(f"<{inside}> is not closed")
    if len(actions) != 1:
        raise Malformed(f"{len(actions)} actions in one turn" if actions else "no action")
    if not actions[0].argument:
        raise Malformed(f"<{actions[0].kind}> is empty")
    return actions[0]


def _want_unforged(text: str) -> None:
    if _FORGED.search(text):
        raise Malformed("only the search engine writes <information>")


def document_number(argument: str) -> int | None:
    """The number in "3" or "Doc 3"; None for anything else."""
    match = _NUMBER.fullmatch(argument)
    return int(match.group(1)) if match else None


def parse_call(text: str) -> Action:
    """The one action of a turn that is a JSON tool call (envs/tool_calls.py). Raises `Malformed`, as `parse` does."""
    text = _cut_call(text)
    _want_unforged(text)
    calls = tool_calls.parse(text, TOOLS).calls
    if len(calls) != 1:
        raise Malformed(f"{len(calls)} actions in one turn" if calls else "no action")
    if isinstance(calls[0], tool_calls.BadCall):
        raise Malformed(calls[0].message.rstrip("."))
    name = calls[0].name
    value = calls[0].arguments[_ARGUMENTS[name]]
    argument = " ".join(str(int(value) if isinstance(value, float) else value).split())  # 3.0 is a whole number in JSON
    if not argument:
        raise Malformed(f"{name} is empty")
    return Action(name, argument)


def _cut_call(text: str) -> str:
    at = text.find(tool_calls.CLOSE)
    return text if at < 0 else text[: at + len(tool_calls.CLOSE)]


def in_order(text: str) -> bool:
    """Whether a turn that parses is one think block, then its action, with white space alone around them."""
    action = after_thinking(cut(text))
    return action is not None and _ACTION.fullmatch(action) is not None


def call_in_order(text: str) -> bool:
    """`in_order` of a turn that `parse_call` reads."""
    return after_thinking(tool_calls.parse(_cut_call(text), TOOLS).text) == ""


def as_calls(text: str) -> str:
    """A turn in tags as the same turn in JSON: each action becomes a call."""

    def call(action: re.Match) -> str:
        name, argument = action.group(1), action.group(2)
        number = document_number(argument) if name == "open" else None
        return tool_calls.write(name, {_ARGUMENTS[name]: argument if number is None else number})

    return _ACTION.sub(call, text)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a policy acts: how a turn is read, whether it has the form it was told, what ends it, what a malformed one is
    told to write, and the tools.
    """

    parse: Callable[[str], Action]
    in_order: Callable[[str], bool]
    stop: tuple[str, ...]
    forms: str
    tools: tuple[Mapping[str, Any], ...]


PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        "tags": Protocol(parse, in_order, STOP, FORMS, ()),
        "json": Protocol(parse_call, call_in_order, CALL_STOP, CALL_FORMS, TOOLS),
    }
)
