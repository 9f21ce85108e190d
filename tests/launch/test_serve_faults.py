"""What goes wrong beside a served policy: a disk that is full, an engine without a place, fifty callers at once."""

import concurrent.futures
import dataclasses
import logging

import openai
import pytest

from configs.defaults import defaults
from launch import serve
from launch.cli import ConfigError
from launch.plan import make_plan
from models.codec import Codec
from rl.episodes import EpisodeLog, read_episodes
from tests.launch.served import NAME, Script, served, until
from tests.launch.test_serve import ask, health
from tests.models import chat_templates as ct


@pytest.fixture(scope="module")
def codec():
    return Codec(ct.make_tokenizer(ct.QWEN25_TOOLS, ct.QWEN_TOKENS, ct.QWEN))


class Disk:
    """EpisodeLog.append and close of a disk that may be full."""

    def __init__(self, monkeypatch):
        self.full, self.tried = "", 0
        for name in ("append", "close"):
            monkeypatch.setattr(EpisodeLog, name, self._guarded(name, getattr(EpisodeLog, name)))

    def _guarded(self, name, function):
        def call(log, *args):
            if self.full == name:
                self.tried += 1
                raise OSError(28, "No space left on device")
            return function(log, *args)

        return call


@pytest.mark.parametrize("where", ["append", "close"])
def test_a_full_disk_is_told_and_loses_no_conversation(codec, tmp_path, monkeypatch, caplog, where):
    disk = Disk(monkeypatch)
    disk.full = where
    with caplog.at_level(logging.ERROR):
        with served(Script(codec, ["a$", "b$"]), codec, record=tmp_path, idle_s=0.1) as (client, url):
            ask(client)
            until(lambda: disk.tried >= 3)  # it goes on trying
            assert ask(client).choices[0].message.content == "b" and health(url)["unkept"] >= 1
            until(lambda: health(url)["unkept"] == 2)
            assert not list(read_episodes(tmp_path))
            disk.full = ""
            until(lambda: health(url)["unkept"] == 0)
            assert len({t.task_id for t in read_episodes(tmp_path)}) == 2
    assert "tidying failed; it is tried again" in caplog.text and "No space left on device" in caplog.text
    assert "Traceback" in caplog.text
    assert len(list(read_episodes(tmp_path))) == 2  # each once


def test_what_cannot_be_recorded_at_the_end_is_an_error(codec, tmp_path, monkeypatch, caplog):
    disk = Disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        with served(Script(codec, ["a$"]), codec, record=tmp_path) as (client, _):
            ask(client)
            disk.full = "append"
    assert "1 conversations could not be recorded and are lost" in caplog.text


def test_an_engine_without_a_place_is_429(codec):
    class Crowded(Script):
        free = False

        def open(self, key, sampling, timeout_s=None):
            assert timeout_s == 0
            if not self.free:
                raise TimeoutError("open: 4 of 4 sessions are open after 0.0 s, no place for 1 more; close sessions")
            return super().open(key, sampling)

    engine = Crowded(codec, ["a$"])
    with served(engine, codec) as (client, url):
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="4 of 4 sessions are open") as error:
                ask(client, stream=stream)
            assert error.value.response.headers["retry-after"] == "1"
            assert (error.value.status_code, error.value.code, error.value.type) == (
                429,
                "engine_busy",
                "rate_limit_error",
            )
        assert health(url)["sessions"] == 0 and health(url)["waiting"] == 0
        engine.free = True
        assert ask(client).choices[0].message.content == "a"


def test_sessions_are_those_of_all_replicas():
    plan = make_plan(defaults())
    plan = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, residents=6, replicas=3))
    assert serve.sessions_of(plan, None) == 18 and serve.sessions_of(plan, 17) == 17
    with pytest.raises(ConfigError, match="--sessions: got 19, want at most .* = 6 x 3 = 18"):
        serve.sessions_of(plan, 19)


def test_fifty_callers_at_once_are_all_answered(codec):
    engine = Script(codec, [f"answer {i}$" for i in range(50)])
    with served(engine, codec, sessions=4, waiting=50) as (client, url):
        with concurrent.futures.ThreadPoolExecutor(50) as threads:
            said = list(threads.map(lambda i: ask(client, stream=bool(i % 2), user=str(i)), range(50)))
            texts = [
                "".join(c.choices[0].delta.content or "" for c in reply) if i % 2 else reply.choices[0].message.content
                for i, reply in enumerate(said)
            ]
        assert sorted(texts) == sorted(f"answer {i}" for i in range(50))
        stats = health(url)
        assert (stats["busy"], stats["waiting"], stats["requests"]) == (0, 0, 50) and stats["sessions"] <= 4


def test_limits_stops_and_parameters_as_clients_give_them(codec):
    with served(Script(codec, ["one two three$"] * 6), codec) as (client, _):
        for how in ({"stop": "two"}, {"stop": ["zzz", "two"]}):
            choice = ask(client, **how).choices[0]
            assert (choice.message.content, choice.finish_reason) == ("one ", "stop")
        for how in ({"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 9}):
            choice = ask(client, **how).choices[0]
            assert len(choice.token_ids) == 2 and choice.finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="top_logprobs: this server takes 0 alone"):
            ask(client, logprobs=True, top_logprobs=3)
        assert ask(client, logprobs=True, top_logprobs=0).choices[0].logprobs.content
        with pytest.raises(openai.NotFoundError) as error:
            client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
        assert error.value.code == "model_not_found" and NAME in str(error.value)
