"""Tools that must be called and answers in a schema, as OpenAI's client asks for them, of an untrained policy."""

import enum
import json
import threading

import jax
import openai
import pydantic
import pytest

from launch.constraints import Constraints
from models import transformer
from models.codec import Codec
from models.config import ModelConfig
from rl.episodes import read_episodes
from rl.rollout.engine import Engine
from tests.launch.served import NAME, Script, served
from tests.models import chat_templates as ct

HI = [{"role": "user", "content": "capital of Peru ?"}]
MODEL = ModelConfig(vocab_size=300, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)


def tool(name, strict=None, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    function = {"name": name, "parameters": schema, **({} if strict is None else {"strict": strict})}
    return {"type": "function", "function": function}


FIND = tool("find", limit={"type": "integer", "minimum": 1, "maximum": 9}, kind={"enum": ["city", "é"]})
STOP = tool("stop")
NAMED = {"type": "function", "function": {"name": "find"}}


class Kind(enum.Enum):
    city = "city"
    river = "river"


class Place(pydantic.BaseModel):
    kind: Kind
    rank: int | None = None
    in_europe: bool


@pytest.fixture(scope="module")
def codec():
    return Codec(ct.make_tokenizer(ct.QWEN25_TOOLS, ct.QWEN_TOKENS, ct.QWEN))


@pytest.fixture(scope="module")
def engine(codec):
    engine = Engine(
        MODEL, transformer.init(MODEL, jax.random.key(0)), version=0, lanes=2, residents=4, capacity=1500,
        view=codec.view, end_ids=codec.end_ids, round_tokens=8, prefill_rows=2, prefill_chunk=64,
    )  # fmt: skip
    yield engine
    engine.close()


def ask(client, **how):
    return client.chat.completions.create(**{"model": NAME, "messages": HI, **how})


def calls_of(choice):
    return [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]


def test_a_tool_that_must_be_called_is(codec, engine, tmp_path):
    with served(engine, codec, record=tmp_path, sessions=4) as (client, _):
        for choice, tools in (("required", [FIND, STOP]), (NAMED, [FIND, STOP]), (NAMED, [FIND])):
            reply = ask(client, tools=tools, tool_choice=choice, n=2, parallel_tool_calls=False)
            for answer in reply.choices:
                ((name, arguments),) = calls_of(answer)
                assert answer.finish_reason == "tool_calls" and not answer.wrong_tool_calls
                assert answer.message.content is None and (choice == "required" or name == "find")
                if name == "find":
                    assert 1 <= arguments["limit"] <= 9 and arguments["kind"] in ("city", "é")
        with client.chat.completions.stream(model=NAME, messages=HI, tools=[FIND], tool_choice=NAMED) as events:
            whole = events.get_final_completion().choices[0]
        assert calls_of(whole)[0][0] == "find" and whole.finish_reason == "tool_calls"
    kept = list(read_episodes(tmp_path))
    assert len(kept) == 7 and all(t.facts["constrained"] == [0] for t in kept)
    for trajectory in kept:  # what was forced is no action
        (row,) = trajectory.rows
        assert 0 < row.action_mask.sum() < (row.turn == 0).sum()


def test_an_answer_in_a_schema(codec, engine):
    with served(engine, codec) as (client, _):
        how = {"model": NAME, "messages": HI, "response_format": Place}
        for _ in range(3):
            choice = client.chat.completions.parse(**how).choices[0]
            assert isinstance(choice.message.parsed, Place) and choice.finish_reason == "stop"
        with client.chat.completions.stream(**how) as events:
            assert isinstance(events.get_final_completion().choices[0].message.parsed, Place)
        cut = ask(client, response_format={"type": "json_object"}, max_tokens=9).choices[0]
        assert cut.message.content.startswith("{") and cut.finish_reason == "length"


def test_strict_tools_are_called_as_their_schemas_say_or_not_at_all(codec, engine):
    strict = [tool("find", True, limit={"type": "integer"}), tool("stop", True)]
    with served(engine, codec) as (client, _):
        answer = ask(client, tools=strict, max_tokens=60, seed=1).choices[0]  # text: nothing begins a call by chance
        assert answer.finish_reason in ("length", "stop") and not answer.wrong_tool_calls
    call = '<tool_call>\n{"name": "find", "arguments": {"limit": "x"}}\n</tool_call>'
    with served(Script(codec, [f"{call}$"] * 2), codec) as (client, _):
        (wrong,) = ask(client, tools=strict).choices[0].wrong_tool_calls
        assert "limit is a string, want integer" in wrong["message"]
        assert ask(client, tools=[tool("find", limit={"type": "integer"})]).choices[0].message.tool_calls


REFUSED = [
    ({"tools": [tool("f", a={"type": "string", "pattern": "x"})], "tool_choice": "required"}, "keyword 'pattern'"),
    ({"tools": [FIND], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "none of the tools"),
    ({"tools": [FIND], "tool_choice": "any"}, "tool_choice: got 'any'"),
    ({"tool_choice": "required"}, "none of the tools"),
    ({"tools": [FIND], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"tools": [FIND, tool("g", True)]}, "all or none"),
    ({"tools": [tool("f", a={"type": "object"})], "tool_choice": "required"}, "an object without properties"),
    ({"response_format": {"type": "json_object"}, "tools": [FIND]}, "leave one out"),
    ({"response_format": {"type": "json_schema"}}, "want a schema with a type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "format": "date"}}}},
     "response_format: schema: the keyword 'format' is not supported"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "maxLength": 10**6}}}},
     "wants more than 4096 states"),
    ({"response_format": {"type": "grammar"}}, "response_format: got"),
]  # fmt: skip


def test_what_no_automaton_covers_is_refused(codec):
    with served(Script(codec, []), codec) as (client, _):
        for how, said in REFUSED:
            with pytest.raises(openai.BadRequestError, match=said):
                ask(client, **how)


def test_a_model_that_always_thinks_first_answers_in_no_schema_but_calls_after_its_thought(codec):
    thinks = Codec(ct.make_tokenizer(ct.QWEN3_OPENS, ct.QWEN_TOKENS + ct.THINK_TOKENS, ct.QWEN))
    assert thinks.opened
    with served(Script(thinks, []), thinks) as (client, _):
        with pytest.raises(openai.BadRequestError, match="begins with a thought"):
            ask(client, response_format={"type": "json_object"})


def test_constraints_are_made_once_and_kept_by_size(codec):
    small = Constraints(codec, kept_bytes=4 * codec.vocab_size * 12)
    first = small.of("a|b")
    assert small.of("a|b") is first and small.of("cc") is small.of("cc")
    small.of("[ab]{9}")  # of ten states: the others go
    assert small.of("a|b") is not first
    made, threads = [], []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: made.append(small.of("x+"))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and len({id(constraint) for constraint in made}) == 1
