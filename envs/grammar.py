"""What a constrained turn may say, as a regular expression: JSON of a schema, and tool calls (envs/tool_calls.py).

models/constraint.py makes an automaton of it. JSON is written as `json.dumps` writes it, keys in the order of the
schema; what is finite there (nesting, digits) is bounded. A schema is covered whole or refused: what is said under its
expression is JSON that it accepts.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs import tool_calls

_SAID = {"title", "description", "default", "examples", "deprecated", "$schema", "$defs", "definitions", "$comment"}
_READ: Mapping[str, set[str]] = {
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_WHOLE = "[1-9][0-9]{0,14}"  # exact in a float
_NUMBER = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?"
_PLAIN: Mapping[str, str] = {"number": _NUMBER, "boolean": "true|false", "null": "null"}
_MOST_VALUES = 1000  # of an integer between two bounds
_MOST_LENGTH = 100_000  # of an expression
_ESCAPES = r'\\["\\/bfnrt]'
_FORBIDDEN = r'"\\\x00-\x1f'  # in a string, as they are
# How nothing in a string of a call may begin: a reader of turns, or a stop string, could find a mark there.
_MARKS = (tool_calls.OPEN[:6], tool_calls.CLOSE[:7], tool_calls.PYTHON[:6], "<think")


@dataclasses.dataclass(frozen=True)
class _How:
    """`root` is what `$ref` points into, `within` the references that are being read; of strings, the marks that they
    may not hold, and how long they are where the schema does not say.
    """

    root: Mapping[str, Any]
    marks: tuple[str, ...] = ()
    longest: int | None = None
    within: tuple[str, ...] = ()


def schema_regex(schema: Any) -> str:
    """The expression of JSON that `schema` accepts, whole numbers of up to 15 digits.

    Covers `type`, `enum`, `const`, `anyOf`, `properties`, `required`, `items`, `minItems`, `maxItems`, `minLength`,
    `maxLength`, of an integer `minimum` of 0 or 1 or both bounds, and `$ref` to `#/$defs` that do not hold themselves.
    Properties beyond `properties` are not said. Errors (ValueError): any other keyword, by name and place.
    """
    return _value(schema, _How(schema if isinstance(schema, Mapping) else {}), "schema")


def object_regex() -> str:
    """The expression of a JSON object whose values are plain, or lists or objects of plain values."""
    plain = "|".join([_string({}, _How({}), ""), *_PLAIN.values()])
    return _any_object(f"(?:{plain}|{_items(f'(?:{plain})', 0, None)}|{_any_object(f'(?:{plain})')})")


def call_regex(
    tools: Sequence[Mapping[str, Any]],
    form: tool_calls.Form = "hermes",
    *,
    opened: str = "",
    many: bool = False,
    longest: int | None = None,
) -> str:
    """The expression of one call of one of `tools`, or, if `many`, of one or more, that `tool_calls.parse` takes.

    `opened` is the thinking tag that precedes the turn: then it thinks first. `longest`: the most characters of what
    else would have no end, a thought or a string whose schema gives no maxLength. Errors (ValueError): as
    `schema_regex`, or parameters that are no object.
    """
    calls = [_call(tool, form, longest) for tool in tools]
    one, between = f"(?:{'|'.join(calls)})", "; "
    if form == "hermes":
        one, between = f"{re.escape(tool_calls.OPEN)}\n{one}\n{re.escape(tool_calls.CLOSE)}", "\n"
    return _thought(opened, longest) + (f"{one}(?:{between}{one})*" if many else one)


def text_or_calls_regex(
    tools: Sequence[Mapping[str, Any]], form: tool_calls.Form = "hermes", *, many: bool = True
) -> str:
    """The expression of any text that begins no call, and then, or of Llama's form instead, of calls of `tools`."""
    text = r"\s*" + _avoiding((tool_calls.OPEN, tool_calls.PYTHON), "", first=r"{\s")
    calls = call_regex(tools, form, many=many)
    return f"{text}(?:{calls})?" if form == "hermes" else f"{text}|{calls}"


def _call(tool: Mapping[str, Any], form: tool_calls.Form, longest: int | None) -> str:
    function = tool["function"]
    schema = function.get("parameters", {"type": "object", "properties": {}})
    if schema.get("type", "object") != "object" or "properties" not in schema:
        raise ValueError(f"tool {function['name']}: its parameters are no object with properties")
    arguments = _value({"type": "object", **schema}, _How(schema, _MARKS, longest), f"parameters of {function['name']}")
    key = "parameters" if form == "llama" else "arguments"
    return rf'\{{"name": {_literal(function["name"])}, "{key}": {arguments}\}}'


def _thought(opened: str, longest: int | None) -> str:
    if not opened:
        return ""
    close = opened.strip().replace("<", "</")
    text = _avoiding((close,), "") if longest is None else f"[^<]{{0,{longest}}}"
    return f"{text}{re.escape(close)}\n{{0,2}}"


# --- schemas ---------------------------------------------------------------------------------------


def _value(schema: Any, how: _How, where: str) -> str:
    return _want_short(_read(schema, how, where), where)


def _want_short(text: str, where: str) -> str:
    if len(text) > _MOST_LENGTH:
        raise ValueError(f"{where}: too large for an expression; nest less, or have fewer optional properties")
    return text


def _read(schema: Any, how: _How, where: str) -> str:
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where}: got {str(schema)[:80]!r}, want a schema with a type")
    if "$ref" in schema:
        _want_known(schema, {"$ref"}, where)
        return _reference(schema["$ref"], how, where)
    if "anyOf" in schema:
        _want_known(schema, {"anyOf"}, where)
        return _either([_value(part, how, f"{where}.anyOf[{i}]") for i, part in enumerate(schema["anyOf"])], where)
    types = schema.get("type", ())
    types = (types,) if isinstance(types, str) else tuple(types)
    if any(name not in _READ for name in types):
        raise ValueError(f"{where}: got type {types}, want of {', '.join(_READ)}")
    _want_known(schema, {"type", "enum", "const"}.union(*(_READ[name] for name in types)), where)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return _either([_literal(value) for value in values if tool_calls.accepts(value, schema)], where)
    return _either([_of_type(name, schema, how, where) for name in types], where)


def _want_known(schema: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(schema) - known - _SAID)
    if unknown:
        raise ValueError(f"{where}: the keyword {unknown[0]!r} is not supported there; leave it out")


def _of_type(name: str, schema: Mapping[str, Any], how: _How, where: str) -> str:
    if name == "string":
        return _string(schema, how, where)
    if name == "integer":
        return _integer(schema, where)
    if name == "array":
        if "items" not in schema:
            raise ValueError(f"{where}: an array without items is not supported; say what it holds")
        item = _value(schema["items"], how, f"{where}[]")
        return _items(item, *_bounds(schema, "minItems", "maxItems", where))
    if name == "object":
        return _object(schema, how, where)
    return f"(?:{_PLAIN[name]})"


def _either(ways: Sequence[str], where: str) -> str:
    if not ways:
        raise ValueError(f"{where}: no value is allowed, or no type is given; want a schema with a type")
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _literal(value: Any) -> str:
    return re.escape(json.dumps(value, ensure_ascii=False))


def _reference(name: Any, how: _How, where: str) -> str:
    section, _, key = str(name).removeprefix("#/").rpartition("/")
    found = how.root.get(section, {}).get(key) if section in ("$defs", "definitions") else None
    if found is None or name in how.within:
        raise ValueError(f"{where}: $ref {name!r} is not supported; want one of #/$defs that does not hold itself")
    return _value(found, dataclasses.replace(how, within=(*how.within, name)), name)


def _bounds(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for value in (least, *([] if most is None else [most])):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{where}: got {low}={least!r}, {high}={most!r}, want whole numbers of at least 0")
    if most is not None and most < least:
        raise ValueError(f"{where}: got {low}={least} over {high}={most}")
    return least, most


def _string(schema: Mapping[str, Any], how: _How, where: str) -> str:
    least, most = _bounds(schema, "minLength", "maxLength", where)
    if most is None and how.longest is not None:
        most = max(least, how.longest)
    plain = f"(?:{_character('<' if how.marks else '', _FORBIDDEN)})"  # no mark begins in what is counted
    if most is not None:
        return f'"{plain}{{{least},{most}}}"'
    rest = _avoiding(how.marks, _FORBIDDEN) if how.marks else f"{plain}*"
    return f'"{plain}{{{least}}}{rest}"' if least else f'"{rest}"'


def _integer(schema: Mapping[str, Any], where: str) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if any(
        isinstance(bound, bool) or not isinstance(bound, int | float) for bound in (least, most) if bound is not None
    ):
        raise ValueError(f"{where}: got minimum={least!r}, maximum={most!r}, want numbers")
    if (least, most) == (None, None):
        return f"(?:0|-?{_WHOLE})"
    if least is not None and most is not None and most - least < _MOST_VALUES:
        return _either([str(i) for i in range(math.ceil(least), math.floor(most) + 1)], where)
    if most is None and least in (0, 1):
        return f"(?:0|{_WHOLE})" if least == 0 else _WHOLE
    raise ValueError(
        f"{where}: of the keywords 'minimum' and 'maximum' are supported minimum 0 or 1 alone, or both with fewer than "
        f"{_MOST_VALUES} whole numbers between"
    )


def _items(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return r"\[\]"
    times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    some = f"{item}(?:, {item}){times}"
    return rf"\[{some}\]" if least else rf"\[(?:{some})?\]"


def _object(schema: Mapping[str, Any], how: _How, where: str) -> str:
    more, properties = schema.get("additionalProperties", True), schema.get("properties")
    if properties is None and more is not False:
        raise ValueError(f"{where}: an object without properties is not supported; say what it holds")
    if not isinstance(more, bool):
        raise ValueError(f"{where}: the keyword 'additionalProperties' is supported with true or false alone")
    properties, required = properties or {}, schema.get("required", ())
    stray = sorted(set(required) - set(properties))
    if stray:
        raise ValueError(f"{where}: got {stray} required, want names of properties")
    members = [
        (f"{_literal(key)}: {_value(part, how, f'{where}.{key}')}", key in required) for key, part in properties.items()
    ]
    begun, after = [], ""  # what may begin the object at each member, and follow it
    for text, needed in reversed(members):
        begun = [text + after, *([] if needed else begun)]
        _want_short("".join(begun), where)
        after = f", {text}{after}" if needed else f"(?:, {text})?{after}"
    optional = "" if any(needed for _, needed in members) else "?"
    return rf"\{{(?:{'|'.join(begun)}){optional}\}}" if begun else r"\{\}"


def _any_object(value: str) -> str:
    member = f"{_string({}, _How({}), '')}: {value}"
    return rf"\{{(?:{member}(?:, {member})*)?\}}"


# --- texts without marks ---------------------------------------------------------------------------


def _character(beside: str, forbidden: str) -> str:
    """One character, or (in JSON) one escape, other than those of `beside`."""
    if not forbidden:
        return f"[^{re.escape(beside)}]" if beside else r"[^\n]|\n"
    return f"[^{re.escape(beside)}{forbidden}]|{_ESCAPES}"


def _avoiding(marks: Sequence[str], forbidden: str, first: str = "") -> str:
    """A text, or what a JSON string holds, in which none of `marks` is; each begins with `<` and has no other.

    It is made of characters, and of `<` with the beginning of a mark and what goes on otherwise; where such a beginning
    ends the text, or the next `<` follows, nothing has to. `first`: a class that the first character is not of.
    """
    plain, rests = _character("<", forbidden), [mark[1:] for mark in marks]
    begun, parted = f"(?:<{_begun(rests)})", f"<{_parted(rests, forbidden)}"
    part = f"(?:{plain}|{begun}*{parted})"
    some = f"(?:(?:[^<{first}]|{begun}*{parted}){part}*)?" if first else f"{part}*"
    return f"{some}{begun}*"


def _heads(rests: Sequence[str]) -> dict[str, list[str]]:
    """Rests of marks by their first character; where a mark would end there is no way."""
    heads: dict[str, list[str]] = {}
    for rest in rests:
        heads.setdefault(rest[0], []).append(rest[1:])
    return heads


def _begun(rests: Sequence[str]) -> str:
    """A beginning of one of `rests`, or nothing."""
    ways = [re.escape(head) + _begun(more) for head, more in _heads(rests).items() if all(more)]
    return f"(?:{'|'.join(ways)})?" if ways else ""


def _parted(rests: Sequence[str], forbidden: str) -> str:
    """A beginning of one of `rests`, or nothing, and then a character with which none goes on."""
    heads = _heads(rests)
    ways = [_character("<" + "".join(heads), forbidden)]
    ways += [re.escape(head) + _parted(more, forbidden) for head, more in heads.items() if all(more)]
    return f"(?:{'|'.join(ways)})"
