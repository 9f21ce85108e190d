"""A served policy as its callers see it: OpenAI's own client, over an engine that says what the test wrote."""

import contextlib
import importlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jax
import openai
import pytest

from launch import chat_api, serve
from launch.cli import ConfigError
from models import hf, transformer
from models.codec import Codec
from models.config import ModelConfig
from rl.episodes import read_episodes
from rl.types import Status
from tests.launch.served import NAME, Script, served, until
from tests.models import chat_templates as ct

HI = [{"role": "user", "content": "capital of Peru ?"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def codec():
    return Codec(ct.make_tokenizer(ct.QWEN25_TOOLS, ct.QWEN_TOKENS, ct.QWEN))


def ask(client, messages=HI, **how):
    return client.chat.completions.create(model=NAME, messages=messages, **how)


def health(url):
    with urllib.request.urlopen(f"{url}/health") as answer:
        return json.load(answer)


# ---- what an answer holds


def test_an_answer_has_its_tokens(codec):
    with served(Script(codec, ["Lima é$"]), codec) as (client, url):
        reply = ask(client, logprobs=True)
        (choice,) = reply.choices
        assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Lima é", "assistant", "stop")
        assert choice.token_ids == [*codec.encode_action("Lima é"), codec.end_ids[0]]
        assert choice.version == [3] * len(choice.token_ids)
        content = choice.logprobs.content
        assert [t.logprob for t in content] == [-0.5 - k for k in range(len(content))]
        assert [t.token for t in content] == [codec.view([i]) for i in choice.token_ids]
        assert [bytes(t.bytes) for t in content[:2]] == [b"Li", b"ma"]
        usage = reply.usage
        assert reply.prompt_token_ids == codec.start([chat_api.Message("user", HI[0]["content"])])
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(reply.prompt_token_ids), len(choice.token_ids))
        assert ask_models(client) == [NAME] and client.models.retrieve(NAME).max_model_len == Script.capacity
        assert health(url)["status"] == "ok" and health(url)["version"] == 3


def ask_models(client):
    return [model.id for model in client.models.list()]


@pytest.mark.parametrize("text", ["Lima é and 🙂 more$", "<tool_call> I mean$", "a ST b STOP c$", "ends with STO$"])
@pytest.mark.parametrize("tools", [False, True])
def test_a_stream_is_the_answer_in_parts(codec, text, tools):
    how = {"stop": ["STOP"], "logprobs": True, **({"tools": TOOLS} if tools else {})}
    with served(Script(codec, [text, text]), codec) as (client, _):
        whole = ask(client, **how)
        with client.chat.completions.stream(
            model=NAME, messages=HI, stream_options={"include_usage": True}, **how
        ) as s:
            events = list(s)
            reply = s.get_final_completion()
    parts = [e.delta for e in events if e.type == "content.delta"]
    assert "".join(parts) == whole.choices[0].message.content == reply.choices[0].message.content
    assert "STOP" not in "".join(parts) and whole.choices[0].finish_reason == reply.choices[0].finish_reason == "stop"
    assert len(parts) > 1 or text.startswith("<tool_call>")
    assert reply.choices[0].logprobs.content == whole.choices[0].logprobs.content
    last = [e.chunk for e in events if e.type == "chunk" and e.chunk.choices][-1].choices[0]
    assert (last.token_ids, last.prompt_token_ids) == (whole.choices[0].token_ids, whole.prompt_token_ids)
    assert reply.usage == whole.usage


def test_several_answers_to_one_request(codec):
    with served(Script(codec, ["a$", "bb$", "ccc$", "dddd$"]), codec) as (client, _):
        choices = ask(client, n=2).choices
        assert sorted(c.message.content for c in choices) == ["a", "bb"] and [c.index for c in choices] == [0, 1]
        said = {0: "", 1: ""}
        for chunk in ask(client, n=2, stream=True):
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
        assert sorted(said.values()) == ["ccc", "dddd"]


# ---- tools


def test_a_call_comes_back_and_its_result_goes_on_in_the_same_ids(codec):
    engine = Script(codec, [f"I look. {CALL}$", "Lima$"])
    with served(engine, codec) as (client, url):
        first = ask(client, tools=TOOLS)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        (call,) = choice.message.tool_calls
        assert call.function.name == "search" and json.loads(call.function.arguments) == {"query": "é"}
        messages = [*HI, choice.message.model_dump(exclude_none=True)]
        for k in (1, 2):  # two results for it; clients may write arguments in their own way
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {k}"})
        messages[1]["tool_calls"][0]["function"]["arguments"] = '{"query":"\\u00e9"}'
        second = ask(client, messages, tools=TOOLS)
        assert health(url)["continued"] == 1 and len(engine.opened) == 1
    (session,) = engine.opened
    assert codec.view(session.given[0]).count('"name": "search"') == 1  # the template told of the tool
    before = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert codec.view(session.given[1]) == (
        "\n<|im_start|>user\n<tool_response>\nresult 1\n</tool_response>\n<tool_response>\nresult 2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.usage.prompt_tokens_details.cached_tokens == len(before)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_call_stays_in_the_content_and_says_why(codec, stream):
    bad = '<tool_call>{"name": "search", "arguments": {"query": "x",}}</tool_call>'
    with served(Script(codec, [f"So {bad}$", f"{CALL} {bad}$", CALL[:30]]), codec) as (client, _):
        if stream:
            with client.chat.completions.stream(model=NAME, messages=HI, tools=TOOLS) as s:
                (choice,) = s.get_final_completion().choices
        else:
            (choice,) = ask(client, tools=TOOLS).choices
            assert choice.wrong_tool_calls[0]["message"].startswith("Tool call 1 was not run: it is not JSON")
        assert (choice.message.content, choice.finish_reason) == (f"So {bad}", "stop") and not choice.message.tool_calls
        (choice,) = ask(client, tools=TOOLS).choices
        assert choice.finish_reason == "tool_calls" and [c["number"] for c in choice.wrong_tool_calls] == [2]
        assert choice.message.content.strip() == bad and len(choice.message.tool_calls) == 1
        (choice,) = ask(client, tools=TOOLS).choices  # cut by length
        assert choice.finish_reason == "length" and choice.message.content == CALL[:30] and not choice.wrong_tool_calls


def test_an_earlier_call_of_somebody_else_is_written_as_the_model_writes_it(codec):
    call = {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"query": "é"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "Lima"}]})
    with served(Script(codec, ["Lima$"]), codec) as (client, _):
        text = codec.view(ask(client, messages, tools=TOOLS).prompt_token_ids)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in text and "<tool_response>\nLima\n</tool_response>" in text


def test_tools_that_the_template_has_no_place_for_are_refused():
    codec = Codec(ct.make_tokenizer(*ct.FAMILIES["smollm2"]))
    with served(Script(codec, []), codec) as (client, _):
        with pytest.raises(openai.BadRequestError, match="chat template has no place for them"):
            ask(client, tools=TOOLS)


# ---- what is refused


BAD = [
    ({"messages": []}, "want a list of one message or more"),
    ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "the last one is the assistant's"),
    ({"messages": [{"role": "critic", "content": "x"}]}, r"messages\[0\]: got role 'critic'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "want text alone"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\]: want a role, and content that is text"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "leave no room|fit|room"),
    ({"temperature": 3}, "temperature: got '3', want a number from 0 to 2"),
    ({"top_p": 0}, "top_p: got 0"),
    ({"max_tokens": 0}, "max_tokens: got '0', want a number from 1"),
    ({"max_tokens": 1.5}, "max_tokens: got '1.5'"),
    ({"seed": -1}, "seed: got"),
    ({"n": 3}, "n: got '3', want a number from 1 to 2"),
    ({"stop": ["a", ""]}, "stop: want"),
    ({"stop": list("abcde")}, "stop: want"),
    ({"logprobs": 5}, "logprobs: got"),
    ({"top_logprobs": 2}, "top_logprobs: this server takes 0 alone"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"response_format": {"type": "xml"}}, "response_format: got .* want type text, json_object or json_schema"),
    ({"tool_choice": "required"}, "tool_choice: got 'required', which is none of the tools"),
    ({"tools": [{"type": "function"}]}, "tools: got"),
    ({"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]}, "control tokens"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"extra_body": {"repetition_penalty": 1.1}}, "unknown parameter 'repetition_penalty'"),
]


class Narrow(Script):
    """Has no room for more than 8000 ids."""

    def open(self, key, sampling, timeout_s=None):
        session = super().open(key, sampling)
        session.generate = self._no_room
        return session

    def _no_room(self, new_ids, **how):
        from rl.rollout.session import CapacityError

        assert len(new_ids) >= self.capacity
        raise CapacityError("9000 ids leave no room")


def test_bad_requests_say_what_is_wrong(codec):
    with served(Narrow(codec, []), codec) as (client, url):
        for how, match in BAD:
            with pytest.raises(openai.BadRequestError, match=match) as error:
                client.chat.completions.create(**{"model": NAME, "messages": HI, **how})
            assert error.value.status_code == 400 and error.value.type == "invalid_request_error"
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, [{"role": "user", "content": "x" * 9000}], stream=True)  # before the first byte
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="want 'tiny'"):
            client.chat.completions.create(model="gpt", messages=HI)
        for data in (b"", b"[1]", b"{", b'{"seed": NaN}', b"[" * 10**5, b'{"model": "\\ud800"}', b"\xff"):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", data))
            assert error.value.code == 400 and json.load(error.value)["error"]["type"] == "invalid_request_error"
        for path, code in (("/v1/nothing", 404), ("/v1/chat/completions", 405), ("/v1/models/x", 404)):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"{url}{path}")
            assert error.value.code == code and json.load(error.value)["error"]["message"]
        assert health(url)["sessions"] == 0


# ---- load, leaving, closing


def test_more_than_may_wait_are_told_so_and_the_others_are_served(codec):
    slow = Script(codec, ["x$"] * 3)
    slow.go.clear()
    with served(slow, codec, sessions=1, waiting=1) as (client, url):
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(ask(client))) for _ in range(2)]
        threads[0].start()
        until(lambda: health(url)["busy"] == 1)
        threads[1].start()
        until(lambda: health(url)["waiting"] == 1)
        with pytest.raises(openai.InternalServerError) as error:
            ask(client)
        assert error.value.status_code == 503 and error.value.code == "overloaded"
        assert error.value.response.headers["retry-after"] == "1"
        slow.go.set()
        for thread in threads:
            thread.join(20)
        assert len(answers) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_cancels_and_may_ask_again(codec, stream, tmp_path):
    engine = Script(codec, ["Lima$", "x" * 3000, "yes$"])
    with served(engine, codec, record=tmp_path) as (client, url):
        first = ask(client).choices[0]
        later = [*HI, {"role": "assistant", "content": "Lima"}, {"role": "user", "content": "sure ?"}]
        if stream:
            with ask(client, later, stream=True) as events:
                assert next(iter(events))
        else:
            with pytest.raises(openai.APITimeoutError):
                ask(client, later, timeout=0.3)
        until(lambda: health(url)["busy"] == 0, 5)
        second = ask(client, later)  # token by token, though the session is gone
        assert second.choices[0].message.content == "yes"
        assert second.prompt_token_ids[len(engine.opened[0].given[0]) :][: len(first.token_ids)] == first.token_ids
    cancelled, done = sorted(read_episodes(tmp_path), key=lambda t: t.ticket)
    assert (cancelled.status, done.status) == (Status.CANCELLED, Status.DONE)
    assert cancelled.rows[0].action_mask.sum() > len(first.token_ids) and done.rows[0].action_mask.sum() == 4


def test_a_waiting_caller_that_leaves_waits_no_more(codec):
    slow = Script(codec, ["x$", "y$"])
    slow.go.clear()
    with served(slow, codec, sessions=1) as (client, url):
        thread = threading.Thread(target=lambda: ask(client))
        thread.start()
        until(lambda: health(url)["busy"] == 1)
        with pytest.raises(openai.APITimeoutError):
            ask(client, timeout=0.1)
        until(lambda: health(url)["waiting"] == 0)
        slow.go.set()
        thread.join(20)
        assert ask(client).choices[0].message.content == "y"


def test_the_server_ends_in_bounded_time_with_requests_in_flight_and_waiting(codec, tmp_path):
    began, errors = [], []

    def call(client, stream):
        try:
            for _ in ask(client, stream=True) if stream else [ask(client)]:
                pass
        except openai.APIError as err:
            errors.append(err)

    with served(Script(codec, ["x" * 100_000] * 4), codec, sessions=2, record=tmp_path) as (client, url):
        threads = [threading.Thread(target=call, args=(client, k % 2)) for k in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: health(url)["busy"] == 2 and health(url)["waiting"] == 2)
        began.append(time.monotonic())
    took = time.monotonic() - began[0]
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert took < 15 and len(errors) == 4, (took, errors)
    assert all("closing" in str(error) for error in errors), errors
    assert [t.status for t in read_episodes(tmp_path)] == [Status.CANCELLED] * 2

    until(lambda: not any(t.name.startswith("serve") for t in threading.enumerate()), 5)


def test_an_engine_that_fails_is_an_error_of_the_server(codec):
    from rl.rollout.session import EngineError

    class Dead(Script):
        def open(self, key, sampling, timeout_s=None):
            raise EngineError("the engine thread died: no memory")

    with served(Dead(codec, []), codec) as (client, url):
        with pytest.raises(openai.InternalServerError, match="the engine thread died: no memory"):
            ask(client)
        with pytest.raises(urllib.error.HTTPError) as error:
            health(url)
        assert error.value.code == 503 and json.load(error.value)["busy"] == 0


def test_two_servers_do_not_record_to_one_folder(codec, tmp_path):
    with served(Script(codec, []), codec, record=tmp_path):
        with pytest.raises(ConfigError, match="in use by process .* give another --record"):
            with serve.serving(Script(codec, []), codec, name="b", temperature=1.0, sessions=1, waiting=1,
                               idle_s=1.0, record=tmp_path):  # fmt: skip
                pass


def test_a_missing_server_library_is_told(monkeypatch):
    importlib.import_module("launch.front")
    monkeypatch.delitem(sys.modules, "launch.front")
    monkeypatch.delattr("launch.front")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"pip install 'wayfinder-rl\[serve\]'"):
        serve._front()


# ---- the program


CONFIG = """
from configs.defaults import defaults

def get_config(arg=""):
    c = defaults()
    c.name, c.model.path = "theirs", {path!r}
    c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 2, 2, 2048, (2048,)
    c.rollout.max_turn_tokens, c.rollout.max_episode_tokens, c.batch.length = 6, 256, 256
    return c
"""


def test_the_program_serves_a_model_and_ends_by_a_signal_in_the_middle_of_a_request(tmp_path):
    tokenizer = ct.make_tokenizer(ct.QWEN25_TOOLS, ct.QWEN_TOKENS, ct.QWEN)
    model = ModelConfig(vocab_size=300, d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8, d_ff=8)
    ends = [tokenizer.eos_token_id]
    hf.save(transformer.init(model, jax.random.key(0)), model, tmp_path / "theirs", tokenizer=tokenizer, end_ids=ends)
    (tmp_path / "config.py").write_text(CONFIG.format(path=str(tmp_path / "theirs")))
    command = [sys.executable, "-m", "launch.serve", f"--config={tmp_path}/config.py", "--port=0"]
    process = subprocess.Popen(
        [*command, f"--record={tmp_path}/record"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving theirs at http://127.0.0.1:"), line or process.stderr.read()
        with openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0, timeout=120) as client:
            how = {"model": "theirs", "messages": HI, "temperature": 2}
            first = client.chat.completions.create(**how, max_tokens=5)
            with client.chat.completions.create(**how, stream=True) as events:
                assert next(iter(events))
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(openai.APIError):
                    for _ in events:
                        pass
        assert process.wait(90) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    kept = sorted(read_episodes(tmp_path / "record"), key=lambda t: t.ticket)
    row = kept[0].rows[0]
    assert row.tokens[row.action_mask].tolist() == first.choices[0].token_ids and len(kept) == 2
