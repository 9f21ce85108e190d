"""Law: what an expression of a schema matches is JSON that the schema accepts, and what it cannot cover is refused by
name; what one of calls matches is read as calls, each right.
"""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import grammar, tool_calls
from envs.search.actions import TOOLS

PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "age": {"type": "integer", "minimum": 0},
        "rating": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 5}, {"type": "null"}], "default": None},
        "kind": {"enum": ["a b", "é\n", 3, None, True]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "minItems": 1, "maxItems": 2},
        "free": {"type": ["string", "number"]},
    },
    "required": ["age", "kind"],
    "additionalProperties": False,
    "$defs": {"Tag": {"type": "object", "properties": {"on": {"const": False}}, "required": ["on"]}},
}
INLINED = json.loads(json.dumps(PERSON).replace('{"$ref": "#/$defs/Tag"}', json.dumps(PERSON["$defs"]["Tag"])))


def matches(pattern, text):
    return re.fullmatch(pattern, text, re.ASCII) is not None


@settings(max_examples=40)
@given(st.from_regex(re.compile(grammar.schema_regex(PERSON), re.ASCII), fullmatch=True))
def test_what_matches_is_accepted(text):
    value = json.loads(text)
    assert tool_calls.accepts(value, INLINED) and json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"age": 0, "kind": 3}', True),
        ('{"name": "Zoë \\" x", "age": 12, "kind": "a b", "tags": [{"on": false}], "free": -1.5e3}', True),
        ('{"age": 1, "rating": 5, "kind": null, "free": "<b>\\\\"}', True),
        ('{"age": 1, "rating": null, "kind": true}', True),
        ('{"age": 1, "kind": false}', False),
        ('{"age": -1, "kind": 3}', False),
        ('{"age": 01, "kind": 3}', False),
        ('{"kind": 3, "age": 1}', False),  # another order
        ('{"age": 1}', False),
        ('{"kind": 3}', False),
        ('{"name": "", "age": 1, "kind": 3}', False),
        ('{"name": "0123456789", "age": 1, "kind": 3}', False),
        ('{"age": 1, "rating": 6, "kind": 3}', False),
        ('{"age": 1, "kind": 3, "tags": []}', False),
        ('{"age": 1, "kind": 3, "more": 1}', False),
        ('{"age": 1, "kind": 3, "free": "\\u0041"}', False),
        ('{"age": 1, "kind": 3, "free": "a\nb"}', False),
        ('{"age": 1, "kind": 3', False),
    ],
)
def test_of_a_schema(text, right):
    assert matches(grammar.schema_regex(PERSON), text) is right


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": "a+"}, "schema: the keyword 'pattern' is not supported"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}},
            "schema.a: the keyword 'format'",
        ),
        ({"type": "array", "items": {"type": "number", "minimum": 0}}, r"schema\[\]: the keyword 'minimum'"),
        ({"oneOf": []}, "keyword 'oneOf'"),
        ({"type": "array"}, "an array without items"),
        ({"type": "object"}, "an object without properties"),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}, "'additionalProperties'"),
        ({"type": "object", "properties": {}, "required": ["a"]}, r"got \['a'\] required"),
        ({"type": "integer", "minimum": 2}, "keywords 'minimum' and 'maximum'"),
        ({"type": "integer", "minimum": 0, "maximum": 10**9}, "keywords 'minimum' and 'maximum'"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "got minLength=3 over maxLength=2"),
        ({"type": "string", "maxLength": "3"}, "want whole numbers"),
        ({"type": "string", "enum": [3]}, "no value is allowed"),
        ({"type": "list"}, "got type"),
        ({}, "no type is given"),
        (True, "want a schema with a type"),
        (None, "want a schema with a type"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "hold itself"),
        ({"$ref": "other.json"}, "hold itself"),
    ],
)
def test_what_is_not_covered_is_named(schema, said):
    with pytest.raises(ValueError, match=said):
        grammar.schema_regex(schema)


def test_an_expression_does_not_grow_without_bound():
    nested = {"type": "string"}
    for _ in range(40):
        nested = {"type": "array", "items": nested}
    with pytest.raises(ValueError, match="too large for an expression"):
        grammar.schema_regex(nested)
    wide = {"type": "string"}
    for _ in range(3):
        wide = {"type": "object", "properties": {f"p{i}": wide for i in range(60)}}
    with pytest.raises(ValueError, match="too large for an expression"):
        grammar.schema_regex(wide)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("{}", True),
        ('{"a": [1, {"b": null}]}', False),
        ('{"a": [1, "x"], "b": {"c": null}, "d": -0.5}', True),
        ('{"a": "Zoë <b>"}', True),
        ("[1]", False),
    ],
)
def test_any_object(text, right):
    assert matches(grammar.object_regex(), text) is right


@settings(max_examples=10)
@given(st.data())
@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_what_matches_is_read_as_calls(form, opened, data):
    for many in (False, True):
        pattern = grammar.call_regex(TOOLS, form, opened=opened, many=many)
        text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
        calls = tool_calls.parse(opened + text, TOOLS).calls[: tool_calls.MAX_CALLS]
        assert calls and all(isinstance(call, tool_calls.Call) for call in calls), text
        assert many or len(calls) == 1


def test_a_string_of_a_call_holds_no_mark():
    one = grammar.call_regex(TOOLS)
    for text, right in {
        "a < b": True,
        "x <b>x</b><": True,
        "<b": False,  # minLength is counted before the first <
        "x</to <too": True,
        "x<<|py": True,
        "a</tool_call>": False,
        "<<tool_call>": False,
        "<|python_tag|>": False,
        "</<think>": False,
    }.items():
        assert matches(one, tool_calls.write("search", {"query": text})) is right, text
    bounded = grammar.call_regex(TOOLS, longest=3)
    assert matches(bounded, tool_calls.write("search", {"query": "abc"}))
    assert not matches(bounded, tool_calls.write("search", {"query": "abcd"}))
    assert not matches(bounded, tool_calls.write("search", {"query": "<b"}))


@settings(max_examples=25)
@given(st.data())
@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_text_that_begins_no_call_or_calls(form, data):
    pattern = re.compile(grammar.text_or_calls_regex(TOOLS, form), re.ASCII)
    said = tool_calls.parse(data.draw(st.from_regex(pattern, fullmatch=True)), TOOLS)
    assert all(isinstance(call, tool_calls.Call) for call in said.calls[: tool_calls.MAX_CALLS])


def test_texts_and_calls():
    call = tool_calls.write("open", {"document": 3})
    for form, calls in {"hermes": call, "llama": tool_calls.write("open", {"document": 3}, "llama")}.items():
        pattern = grammar.text_or_calls_regex(TOOLS, form)
        for text in ("", "Lima", "  a {b}", "<think> {x </think> a < b <tool", "a\n\nb <", calls):
            assert matches(pattern, text), (form, text)
        for text in ("{", ' {"name": "x"}', "so <tool_call>", "<|python_tag|>", "<<tool_call>", "x <tool_call>{}"):
            assert not matches(pattern, text), (form, text)
    assert matches(grammar.text_or_calls_regex(TOOLS), f"I look. {call}\n{call}")
    assert not matches(grammar.text_or_calls_regex(TOOLS, many=False), f"I look. {call}\n{call}")


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"type": "object"}])
def test_parameters_that_are_no_object_are_refused(parameters):
    with pytest.raises(ValueError, match="tool f: its parameters are no object with properties"):
        grammar.call_regex([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    without = [{"type": "function", "function": {"name": "f"}}]
    assert matches(grammar.call_regex(without), tool_calls.write("f", {}))
