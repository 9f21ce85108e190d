"""A server on a free port of this machine, over an engine that is real or a script, and the client of `openai`."""

import contextlib
import socket
import threading
import time

import openai

from launch import serve
from rl.types import Turn

NAME = "tiny"


class Script:
    """An engine whose every session says what is in `turns`, in the order asked; `$` is the end of turn.

    Keeps `Session.ids`, stops and `close`. Nothing is said while `go` is clear.
    """

    capacity = 4000

    def __init__(self, codec, turns):
        self.codec, self.turns, self.opened, self.lock = codec, list(turns), [], threading.Lock()
        self.go = threading.Event()
        self.go.set()

    def open(self, key, sampling, timeout_s=None):
        self.opened.append(ScriptSession(self, key, sampling))
        return self.opened[-1]

    def stats(self):
        return {"version": 3}

    def close(self):
        pass


class ScriptSession:
    def __init__(self, engine, key, sampling):
        self.engine, self.key, self.sampling = engine, key, sampling
        self.ids, self.given, self.gone, self.restarts = [], [], threading.Event(), []

    def restart(self, turn):
        self.restarts.append(turn)
        self.ids = []

    @property
    def closed(self):
        return self.gone.is_set()

    def close(self):
        self.gone.set()

    def generate(self, new_ids, *, max_tokens, stop=(), deadline_s=None, constraint=None):
        codec = self.engine.codec
        self.given.append(list(new_ids))
        self.ids = [*self.ids, *new_ids]
        with self.engine.lock:
            text = self.engine.turns.pop(0)
        ids = codec.encode_action(text.rstrip("$")) + [codec.end_ids[0]] * text.endswith("$")
        said, reason = [], "length"
        while not self.engine.go.wait(0.005) and not self.gone.is_set():
            pass
        for i in ids[:max_tokens]:
            if self.gone.wait(0.002):
                reason = "cancelled"
                break
            said.append(i)
            self.ids = [*self.ids, i]
            if i in codec.end_ids:
                reason = "stop"
            elif any(s in codec.view(said) for s in stop):
                reason = "stop"
                break
        return Turn(said, [-0.5 - k for k in range(len(said))], [3] * len(said), reason)


def until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def served(engine, codec, **how):
    """(client, url) for as long as the block runs."""
    how = {"name": NAME, "temperature": 1.0, "sessions": 2, "waiting": 2, "idle_s": 600.0} | how
    with serve.serving(engine, codec, **how) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            try:
                until(lambda: server.started)
                yield client, url
            finally:
                server.should_exit = True
                thread.join(30)
                assert not thread.is_alive()
