"""Tool calls in JSON, as models write them: what a turn calls, or what is wrong with each call.

Two forms are read. Hermes and Qwen write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of
them; Llama 3 writes a turn that begins with `{"name": ..., "parameters": {...}}`, or has it after `<|python_tag|>`,
several with `;` between them. What is thought is no call. Nothing is repaired: a call that is not exactly right is a
`BadCall`, whose message the model reads, and no tool runs with arguments that the model did not write.
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Form = Literal["hermes", "llama"]

MAX_CALLS = 64  # in one turn: each costs at most one look at the whole text
MAX_DEPTH = 64  # of objects and lists in one another

OPEN, CLOSE, PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"

_THOUGHT = re.compile(r"<think>(?:(?!</think>).)*+(?:</think>)?", re.DOTALL)
_BARE = re.compile(r"""\s*+\{\s*+["'](?:name|parameters|arguments|type)["']\s*+:""")
_SEPARATOR = re.compile(r"\s*+;")
_VALUE = re.compile(r"\s*+[\[{]")
# A string without its end runs to the end of the text, so that no character is looked at twice.
_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, well formed and, where its tool's schema was given, of the right types."""

    number: int  # in its turn, from 1
    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BadCall:
    """One call that must not be run."""

    number: int
    reason: str

    @property
    def message(self) -> str:
        """What the model is told."""
        return f"Tool call {self.number} was not run: {self.reason}."


@dataclasses.dataclass(frozen=True)
class Said:
    """A turn, read: `text` is what stands around the calls (a bad call stays in it, as it was written)."""

    text: str
    calls: tuple[Call | BadCall, ...]
    truncated: bool = False  # it ends inside a call, because the turn was cut: neither a call nor a bad one


class _Wrong(Exception):
    """Why a call is bad; the text is for the model."""


def parse(text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, cut: bool = False) -> Said:
    """The calls of a turn, in order. Never raises, whatever the text; time is linear in it.

    `tools` are those that may be called (see `check_tools`); with None any name and any object pass. `cut`: the turn
    ended by length, not by the model.
    """
    spoken = _spoken(text)
    at = spoken.find(OPEN)
    if at >= 0:
        return _hermes(text, spoken, at, tools, cut)
    at = spoken.find(PYTHON)
    if at >= 0:
        return _llama(text, at, at + len(PYTHON), tools, cut)
    lead = len(spoken) - len(spoken.lstrip())
    if _BARE.match(spoken):
        return _llama(text, lead, lead, tools, cut)
    return Said(text, ())


def settled(text: str) -> str:
    """The beginning of a turn, so far `text`, that stands around its calls whatever comes after: fit to be shown."""
    spoken = _spoken(text)
    ends = [at for mark in (OPEN, PYTHON) if (at := spoken.find(mark)) >= 0]
    ends += [len(text) - n for mark in (OPEN, PYTHON) for n in range(1, len(mark)) if spoken.endswith(mark[:n])]
    if spoken.lstrip()[:1] in ("", "{"):
        ends.append(len(spoken) - len(spoken.lstrip()))
    return text[: min(ends, default=len(text))].rstrip()


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """That `tools` are as chat templates take them: {"type": "function", "function": {"name", "parameters", ...}}.

    Of a schema `type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `minItems`,
    `maxItems`, `minLength`, `maxLength`, `minimum`, `maximum` and `anyOf` are checked; other keywords are not looked
    at. Errors: ValueError.
    """
    names = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        schema = function.get("parameters", {}) if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name or not isinstance(schema, Mapping):
            raise ValueError(
                f'tools: got {str(tool)[:200]}, want {{"type": "function", "function": {{"name": ..., "parameters": '
                "{a JSON schema}}}"
            )
        _check_schema(schema, name)
        names.append(name)
    if len(set(names)) < len(names):
        raise ValueError(f"tools: got the names {names}, want each once")


def accepts(value: Any, schema: Any) -> bool:
    """Whether `schema`, of which `check_tools` says what is read, allows the value."""
    try:
        _check(value, schema, "value")
    except _Wrong:
        return False
    return True


def write(name: str, arguments: Mapping[str, Any], form: Form = "hermes") -> str:
    """One call as a model of that form would write it."""
    if form == "llama":
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def _spoken(text: str) -> str:
    """`text` with blanks for what is thought: the same places, and nothing there to find."""
    return _THOUGHT.sub(lambda thought: " " * len(thought.group()), text)


def _hermes(text: str, spoken: str, at: int, tools: Sequence[Mapping[str, Any]] | None, cut: bool) -> Said:
    around, calls, end = [], [], 0
    while at >= 0:
        number, start = len(calls) + 1, at + len(OPEN)
        around.append(text[end:at])
        if number > MAX_CALLS:
            calls.append(BadCall(number, f"a turn may hold {MAX_CALLS} calls"))
            around.append(text[at:])
            return Said("".join(around), tuple(calls))
        value_end = _object_end(text, start) if _VALUE.match(text, start) else None
        closed = text.find(CLOSE, value_end or start)
        again = spoken.find(OPEN, start) if value_end is None else -1
        if 0 <= again < closed:  # opened twice: what the second one holds is a call of its own
            calls.append(BadCall(number, f"{OPEN} without {CLOSE}"))
            around.append(text[at:again])
            at = end = again
            continue
        if closed < 0 and value_end is not None:  # quotes that do not match may have hidden the end
            closed = text.find(CLOSE, start)
        if closed < 0 and cut:
            return Said("".join(around), tuple(calls), truncated=True)
        end = len(text) if closed < 0 else closed + len(CLOSE)
        try:
            if closed < 0:
                raise _Wrong(f"{OPEN} without {CLOSE}")
            calls.append(Call(number, *_read(text[start:closed], tools)))
        except _Wrong as wrong:
            calls.append(BadCall(number, str(wrong)))
            around.append(text[at:end])
        at = spoken.find(OPEN, end)
    return Said("".join([*around, text[end:]]), tuple(calls))


def _llama(text: str, begin: int, at: int, tools: Sequence[Mapping[str, Any]] | None, cut: bool) -> Said:
    """Calls from `at` to the end of the text; `begin` is where the text before them ends."""
    around, calls = text[:begin], []
    while True:
        number, end = len(calls) + 1, _object_end(text, at)
        if end is None and cut:
            return Said(around, tuple(calls), truncated=True)
        separator = None if end is None or number > MAX_CALLS else _SEPARATOR.match(text, end)
        source = text[at : separator.start()] if separator else text[at:]
        try:
            if number > MAX_CALLS:
                raise _Wrong(f"a turn may hold {MAX_CALLS} calls")
            calls.append(Call(number, *_read(source, tools)))
        except _Wrong as wrong:
            calls.append(BadCall(number, str(wrong)))
            around += source
        if separator is None:
            return Said(around, tuple(calls))
        at = separator.end()


def _object_end(text: str, start: int) -> int | None:
    """Where the object that begins after `start` ends; None where it does not, or nests too deep."""
    depth = 0
    for found in _STRUCTURE.finditer(text, start):
        if found.group() in "[{":
            depth += 1
        elif found.group() in "]}":
            depth -= 1
            if depth <= 0:
                return found.end()
        if depth > MAX_DEPTH:
            return None
    return None


def _read(source: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of one call. Raises `_Wrong`."""
    call = _json(source)
    if not isinstance(call, dict):
        raise _Wrong(f"it is {_kind(call)}, want an object with name and arguments")
    keys = [key for key in ("arguments", "parameters") if key in call]
    extra = sorted(set(call) - {"name", "type", *keys})
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise _Wrong("it has no name of a tool")
    if len(keys) != 1 or extra or call.get("type", "function") != "function":
        raise _Wrong(f"it has the keys {_listed(call)}, want name and arguments")
    name, arguments = call["name"], call[keys[0]]
    if not isinstance(arguments, dict):
        raise _Wrong(f"{keys[0]} is {_kind(arguments)}, want an object")
    if tools is not None:
        known = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
        if name not in known:
            raise _Wrong(f"there is no tool {_short(name)}; there is {_listed(known) or 'none'}")
        _check(arguments, known[name], keys[0])
    return name, arguments


def _json(source: str) -> Any:
    """Strict JSON: no NaN, no number beyond a float, no key twice, no half of a surrogate pair, no endless depth."""
    depth = 0
    for found in _STRUCTURE.finditer(source):  # the parser of the library recurses: it must not see what is too deep
        depth += (found.group() in "[{") - (found.group() in "]}")
        if depth > MAX_DEPTH:
            raise _Wrong(f"it is nested deeper than {MAX_DEPTH}")
    try:
        value = json.loads(source, object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_float)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as err:
        raise _Wrong(f"it is not JSON ({err.msg} at character {err.pos})") from None
    except UnicodeEncodeError:
        raise _Wrong("it holds half of a surrogate pair") from None
    except ValueError:  # an integer of more digits than Python reads
        raise _Wrong("it holds a number that is too long") from None
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise _Wrong(f"it has the key {_short(counts.most_common(1)[0][0])} twice")
    return found


def _constant(name: str) -> Any:
    raise _Wrong(f"{name} is not JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Wrong(f"the number {_short(digits)} is too large")
    return value


# --- schemas ---------------------------------------------------------------------------------------

_TYPES: Mapping[str, Any] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v == int(v),  # 3.0 is one
}
_BOUNDS = (
    ("minItems", list, len, "at least {} items"),
    ("maxItems", list, len, "at most {} items"),
    ("minLength", str, len, "at least {} characters"),
    ("maxLength", str, len, "at most {} characters"),
    ("minimum", int | float, lambda v: v, "at least {}"),
    ("maximum", int | float, lambda v: v, "at most {}"),
)


def _check(value: Any, schema: Any, where: str) -> None:
    """Raises `_Wrong` at the first place where `value` is not what `schema` says."""
    if schema is False:
        raise _Wrong(f"{where} must not be there")
    if not isinstance(schema, Mapping):  # True, or what is no schema: says nothing
        return
    types = schema.get("type", ())
    types = (types,) if isinstance(types, str) else tuple(types)
    if types and not any(_TYPES[name](value) for name in types):
        raise _Wrong(f"{where} is {_kind(value)}, want {' or '.join(map(str, types))}")
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(_same(value, other) for other in allowed):
        raise _Wrong(f"{where} is {_short(value)}, want one of {', '.join(map(_short, allowed))}")
    for keyword, kind, size, said in _BOUNDS:
        if keyword in schema and isinstance(value, kind) and not isinstance(value, bool):
            bound = schema[keyword]
            if size(value) < bound if keyword.startswith("min") else size(value) > bound:
                raise _Wrong(f"{where} is {_short(value)}, want {said.format(bound)}")
    if isinstance(value, dict):
        _check_object(value, schema, where)
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check(item, schema.get("items"), f"{where}[{i}]")
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], where)


def _check_schema(schema: Any, where: str) -> None:
    """That `_check` can read it. Raises ValueError."""
    if not isinstance(schema, Mapping):
        return
    types = schema.get("type", ())
    unknown = [t for t in ((types,) if isinstance(types, str) else types) if t not in _TYPES]
    if unknown:
        raise ValueError(
            f"tools: got type {_short(unknown[0])} in the schema of {where}, want one of {_listed(_TYPES)}"
        )
    inner = [
        *schema.get("properties", {}).items(),
        *((key, schema.get(key)) for key in ("items", "additionalProperties")),
    ]
    for key, part in [*inner, *((f"anyOf[{i}]", part) for i, part in enumerate(schema.get("anyOf", ())))]:
        _check_schema(part, f"{where}.{key}")


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> None:
    properties = schema.get("properties", {})
    missing = [key for key in schema.get("required", ()) if key not in value]
    if missing:
        raise _Wrong(f"{where} lacks {_listed(missing)}")
    for key, item in value.items():
        if key in properties:
            _check(item, properties[key], f"{where}.{key}")
        elif schema.get("additionalProperties") is False:
            raise _Wrong(f"{where} has no {_short(key)}; it has {_listed(properties) or 'nothing'}")
        else:
            _check(item, schema.get("additionalProperties"), f"{where}.{_short(key)}")


def _check_any(value: Any, schemas: Sequence[Any], where: str) -> None:
    reasons = []
    for schema in schemas:
        try:
            _check(value, schema, where)
        except _Wrong as wrong:
            reasons.append(str(wrong))
        else:
            return
    raise _Wrong("; or ".join(reasons))


def _same(a: Any, b: Any) -> bool:
    """Equal in JSON, where true is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(names: Any) -> str:
    return ", ".join(_short(name) for name in list(names)[:16])
