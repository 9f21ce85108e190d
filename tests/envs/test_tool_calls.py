"""Law: what is not exactly a call is never run; it becomes a message with its number and reason, and nothing raises."""

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.tool_calls import MAX_CALLS, MAX_DEPTH, BadCall, Call, check_tools, parse, settled, write

SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 1},
        "k": {"type": "integer", "minimum": 1, "maximum": 10},
        "how": {"enum": ["exact", "near"]},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 2},
        "when": {"anyOf": [{"type": "integer"}, {"type": "object", "required": ["year"]}]},
    },
    "required": ["query"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "search", "parameters": SEARCH}},
    {"type": "function", "function": {"name": "stop"}},
]
GOOD = {"query": "capital of Peru", "k": 3}


def hermes(body):
    return f"<tool_call>\n{body}\n</tool_call>"


def only(text, **how):
    said = parse(text, TOOLS, **how)
    assert len(said.calls) == 1, said
    return said.calls[0]


FORMS = {
    "hermes": hermes('{"name": "search", "arguments": {"query": "capital of Peru", "k": 3}}'),
    "on one line": '<tool_call>{"arguments":{"query":"capital of Peru","k":3},"name":"search"}</tool_call>',
    "llama": '{"name": "search", "parameters": {"query": "capital of Peru", "k": 3}}',
    "llama, a type": ' {"type": "function", "name": "search", "parameters": {"query": "capital of Peru", "k": 3}}\n',
    "python tag": '<|python_tag|>{"name": "search", "parameters": {"query": "capital of Peru", "k": 3}}',
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form):
    said = parse(FORMS[form], TOOLS)
    assert said.calls == (Call(1, "search", GOOD),) and not said.text.strip() and not said.truncated
    assert parse(f"<think> {FORMS[form]} or not? </think>{FORMS[form]}", TOOLS).calls == said.calls


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_what_is_written_is_read_back(form):
    arguments = {"query": 'a "quoted" </tool_call> ; {line}\n\\ é'}
    assert parse(write("search", arguments, form), TOOLS).calls == (Call(1, "search", arguments),)


def test_text_around_calls_and_their_order():
    one, two = write("search", {"query": "a"}), write("stop", {})
    said = parse(f"I look. {one} and {two} so.", TOOLS)
    assert said.text == "I look.  and  so." and [c.name for c in said.calls] == ["search", "stop"]
    both = f"{write('search', {'query': 'a'}, 'llama')} ; {write('stop', {}, 'llama')}"
    assert [(c.number, c.name) for c in parse(f"Well. <|python_tag|>{both}", TOOLS).calls] == [
        (1, "search"),
        (2, "stop"),
    ]
    assert parse(f"Well. <|python_tag|>{both}", TOOLS).text == "Well. "


@pytest.mark.parametrize(
    "text", ["", "Lima", '{"answer": 3}', '{"answer": {"name": "x"}}', "<think> <tool_call> {", "{"]
)
def test_other_text_is_no_call(text):
    assert parse(text, TOOLS) == parse(text, TOOLS, cut=True)
    assert parse(text, TOOLS).calls == () and parse(text, TOOLS).text == text


BAD = {
    '{"name": "search", "arguments": {"query": "x",}}': "it is not JSON",
    '{"name": "search", "arguments": {"query": "x"}} {"name": "stop", "arguments": {}}': r"Extra data at character \d+",
    '{"name": "search", "arguments": {"query": "x\ny"}}': "Invalid control character",
    "{'name': 'search', 'arguments': {'query': 'x'}}": "not JSON",
    "{'name': 'search', 'arguments': {'query': 'it\"s'}}": "not JSON",
    '{"name": "search", "arguments": {"query": "x", "k": NaN}}': "NaN is not JSON",
    '{"name": "search", "arguments": {"query": "x", "k": -Infinity}}': "-Infinity is not JSON",
    '{"name": "search", "arguments": {"query": "x", "k": 1e999}}': 'the number "1e999" is too large',
    '{"name": "search", "arguments": {"query": "x", "k": ' + "9" * 5000 + "}}": "a number that is too long",
    '{"name": "search", "arguments": {"query": "\\ud83d"}}': "half of a surrogate pair",
    '{"name": "search", "arguments": {"query": "x", "query": "y"}}': 'the key "query" twice',
    '{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}': "arguments is a string, want an object",
    '{"name": "search", "arguments": ["x"]}': "arguments is a list, want an object",
    '{"name": "search", "arguments": null}': "arguments is null, want an object",
    '{"name": "search"}': "want name and arguments",
    '{"name": "search", "arguments": {}, "parameters": {}}': "want name and arguments",
    '{"name": "search", "arguments": {"query": "x"}, "id": 3}': "want name and arguments",
    '{"name": 3, "arguments": {"query": "x"}}': "no name of a tool",
    '{"name": "look", "arguments": {"query": "x"}}': 'no tool "look"; there is "search", "stop"',
    '{"name": "search", "arguments": {"k": 3}}': 'arguments lacks "query"',
    '{"name": "search", "arguments": {"query": 3}}': "arguments.query is a number, want string",
    '{"name": "search", "arguments": {"query": ""}}': 'arguments.query is "", want at least 1 characters',
    '{"name": "search", "arguments": {"query": "x", "k": true}}': "arguments.k is a boolean, want integer",
    '{"name": "search", "arguments": {"query": "x", "k": 2.5}}': "arguments.k is a number, want integer",
    '{"name": "search", "arguments": {"query": "x", "k": 11}}': "arguments.k is 11, want at most 10",
    '{"name": "search", "arguments": {"query": "x", "how": "far"}}': 'want one of "exact", "near"',
    '{"name": "search", "arguments": {"query": "x", "tags": ["a", 3]}}': r"tags\[1\] is a number, want string or null",
    '{"name": "search", "arguments": {"query": "x", "tags": ["a", "b", "c"]}}': "want at most 2 items",
    '{"name": "search", "arguments": {"query": "x", "when": "now"}}': "want integer; or .* want object|lacks",
    '{"name": "search", "arguments": {"query": "x", "kk": 3}}': 'has no "kk"; it has "query", "k"',
}


@pytest.mark.parametrize("body", BAD)
def test_a_bad_call_is_a_message_and_stays_in_the_text(body):
    said = parse(f"So: {hermes(body)}", TOOLS)
    (call,) = said.calls
    assert isinstance(call, BadCall) and said.text == f"So: {hermes(body)}"
    assert call.message.startswith("Tool call 1 was not run: ")
    pytest.raises(AssertionError, _raise, call.reason).match(BAD[body])
    for other in (body, f"<|python_tag|>{body}"):
        assert isinstance(only(other), BadCall)


def _raise(text):
    raise AssertionError(text)


def test_one_bad_call_among_good_ones_keeps_its_number():
    said = parse(write("stop", {}) + hermes('{"name": "stop", "arguments": {,}}') + write("search", GOOD), TOOLS)
    assert [type(c) for c in said.calls] == [Call, BadCall, Call] and [c.number for c in said.calls] == [1, 2, 3]
    assert said.calls[1].message.startswith("Tool call 2 was not run: it is not JSON")


@pytest.mark.parametrize(
    "first",
    [
        "<tool_call>oops</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>null</tool_call>",
        "<tool_call>so {x} </tool_call>",
        "<tool_call>\n",
    ],
)
def test_a_call_without_an_object_swallows_no_other(first):
    said = parse(first + ' and \n<tool_call>\n{"name": "t", "arguments": {"q": 1}}\n</tool_call>')
    bad, good = said.calls
    assert isinstance(bad, BadCall) and (good.number, good.name, good.arguments) == (2, "t", {"q": 1})


def test_a_call_cut_by_length_is_neither_a_call_nor_a_bad_one():
    whole = FORMS["hermes"]
    for end in range(len("<tool_call>"), len(whole)):
        said = parse(f"I look. {whole[:end]}", TOOLS, cut=True)
        assert said.truncated and said.calls == () and said.text == "I look. "
    assert "without </tool_call>" in only(whole[:-1]).reason  # the model's own end: its own mistake
    first = parse(whole + whole[:40], TOOLS, cut=True)
    assert first.truncated and first.calls == (Call(1, "search", GOOD),)
    assert parse(FORMS["llama"][:40], TOOLS, cut=True).truncated
    assert isinstance(only(FORMS["llama"][:40]), BadCall)
    assert not parse(whole, TOOLS, cut=True).truncated and not parse("Lima", TOOLS, cut=True).truncated


def test_without_tools_any_name_and_any_object_pass():
    assert parse(write("look", {"x": [1]})).calls == (Call(1, "look", {"x": [1]}),)
    assert isinstance(parse(write("search", {}), []).calls[0], BadCall)


@pytest.mark.parametrize("deep", ["[" * 10**4, '{"a":' * 10**4, '[{"a":' * 10**4])
@pytest.mark.parametrize("form", [hermes, "<|python_tag|>{}".format])
def test_depth_without_end(form, deep):
    call = only(form('{"name": "stop", "arguments": {"x": ' + deep + "}}"))
    assert isinstance(call, BadCall) and f"nested deeper than {MAX_DEPTH}" in call.reason


def test_a_megabyte_is_read_and_nothing_takes_more_than_linear_time():
    assert only(write("search", {"query": "é" * 10**6})).arguments["query"] == "é" * 10**6
    began = time.process_time()
    for piece in (
        '<tool_call>{"',
        '<tool_call>{"</tool_call>',
        '\\"',
        '{"name":',
        "<think>",
        "{}",
        "<tool_call>{};",
        '"',
    ):
        for lead in ("", '{"name": "', "<|python_tag|>", '<tool_call>{"a": "'):
            parse(lead + piece * (10**6 // len(piece)), TOOLS)
    keys = "{" + ",".join(f'"{i}":1' for i in range(10**5)) + ',"7":1}'
    assert 'the key "7" twice' in only(hermes(keys)).reason
    assert time.process_time() - began < 30  # a quadratic look takes minutes


def test_calls_without_end_are_refused_once():
    said = parse(write("stop", {}) * 1000, TOOLS)
    assert len(said.calls) == MAX_CALLS + 1 and "may hold 64 calls" in said.calls[-1].reason
    said = parse(";".join([write("stop", {}, "llama")] * 1000), TOOLS)
    assert len(said.calls) == MAX_CALLS + 1 and isinstance(said.calls[-1], BadCall)


PIECES = ["<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", '{"name": "search", ', "\ud800"]
PIECES += ['"arguments": ', '"parameters": {"query": "x"}}', *FORMS.values(), *"{}[]\"'\\,:;\né", "NaN", "1e400"]
anything = st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(st.characters())


@given(anything, st.booleans(), st.sampled_from([None, [], TOOLS]))
@example("<tool_call>\ud800</tool_call>", False, TOOLS)
def test_no_text_raises_and_only_whole_right_calls_are_calls(text, cut, tools):
    said = parse(text, tools, cut=cut)
    assert [c.number for c in said.calls] == list(range(1, len(said.calls) + 1))
    for call in said.calls:
        if isinstance(call, Call):  # what would be run stands in the text, and is right
            assert json.dumps(call.arguments) and call.name in text
            assert tools is None or call.name == "stop" or (call.name == "search" and "query" in call.arguments)
        else:
            assert call.message.encode()  # the model can be told
    assert not (said.truncated and not cut)


@given(anything, st.integers(0, 400))
def test_what_is_settled_is_the_beginning_whatever_follows(text, n):
    said = parse(text, TOOLS)
    assert said.text.startswith(settled(text[:n])) and settled(text[:n]) == settled(text[:n]).rstrip()


def test_text_is_settled_up_to_a_call():
    assert settled("I look. <tool_c") == settled("I look. <tool_call>{") == "I look."
    assert settled("I lo") == "I lo" and settled(' {"na') == "" and settled("<think> {") == "<think> {"


plain = st.text(st.characters(exclude_categories=["Cs"]))
leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain
values = st.recursive(leaf, lambda v: st.lists(v) | st.dictionaries(plain, v), max_leaves=10)


@given(values, st.sampled_from(["hermes", "llama"]))
def test_every_object_survives(value, form):
    assert parse(write("stop", {"x": value}, form), TOOLS).calls == (Call(1, "stop", {"x": value}),)


def test_tools_of_another_form_are_refused():
    check_tools(TOOLS)
    for bad in ([{"name": "search"}], [{"type": "function", "function": {"name": ""}}], ["search"]):
        with pytest.raises(ValueError, match="tools: got .* want"):
            check_tools(bad)
    with pytest.raises(ValueError, match="want each once"):
        check_tools(TOOLS + TOOLS[:1])
