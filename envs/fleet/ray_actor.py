"""A Ray actor that serves one world (envs/fleet/host.py): for fleets larger than a host. Needs the extra [ray].

An actor is placed where the cluster has room, and is found dead where Ray says so. A host of the cluster needs this
package and whatever the world reads.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from envs.base import EnvError
from envs.fleet.host import CLOSE_S, Host, answer, opened, warm_world

AT_ONCE = 10_000  # calls of an actor


class NoRay(ValueError):
    """Ray is not installed, or there is no cluster at the address."""


def check_installed() -> None:
    """Errors: NoRay."""
    if importlib.util.find_spec("ray") is None:
        raise NoRay("rollout.worlds='ray': ray is not installed; pip install 'wayfinder-rl[ray]', or use 'processes'")


def connect(address: str = "") -> bool:
    """Join the cluster at `address` ("auto": the one that this host belongs to), or begin one on this host. False: it
    was joined before, and is not this caller's to leave. Errors: NoRay.
    """
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return False
    env = {"env_vars": {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}}
    local = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", runtime_env=env, log_to_driver=False, logging_level=logging.ERROR, **local)
    except ConnectionError as error:
        raise NoRay(f"no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`") from error
    return True


def disconnect() -> None:
    """Leave the cluster; one that `connect` began ends. No fleet may be open in it."""
    import ray

    ray.shutdown()


class _Serving:
    """The actor. Its calls run in one event loop, and are answered by the threads of the instances."""

    def __init__(self, name: str, options: Mapping[str, Any]):
        self._world = (name, dict(options))
        self._waiting: dict[int, asyncio.Future] = {}
        self._number = 0

    async def begin(self) -> tuple[int, bytes]:
        """Make the world: the id of this process, and what came of it."""
        loop, worlds = asyncio.get_running_loop(), []
        name, options = self._world
        body = await asyncio.to_thread(answer, lambda: worlds.append(warm_world(name, options)))

        def reply(call: int, body: bytes) -> None:
            loop.call_soon_threadsafe(self._reply, call, body)

        if worlds:
            self._host = Host(worlds[0].make_env, reply)
        return os.getpid(), body

    async def call(self, instance: int, verb: int, body: bytes) -> bytes:
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._host.call(number, instance, verb, body)
        return await future

    async def live(self) -> None:
        """Never answered: it fails when the actor ends."""
        await asyncio.Event().wait()

    async def ping(self) -> None:
        pass

    async def close(self) -> None:
        await asyncio.to_thread(self._host.close, CLOSE_S)

    def _reply(self, call: int, body: bytes) -> None:
        future = self._waiting.pop(call, None)
        if future is not None and not future.done():
            future.set_result(body)


class RayActor:
    """One actor, as `envs.fleet.fleet.Member`. `connect` comes before it."""

    def __init__(self, name: str, options: Mapping[str, Any]):
        import ray

        self._ray, self._name = ray, name
        serving = ray.remote(num_cpus=0, max_concurrency=AT_ONCE, max_restarts=0, scheduling_strategy="SPREAD")(
            _Serving
        )
        self._actor = serving.remote(name, dict(options))
        self._begun, self._life = self._actor.begin.remote(), self._actor.live.remote()
        self.pid, self.ended, self.why_not = -1, None, None
        self._ready, self._killed = False, ""
        self._ping, self._asked_s = None, 0.0
        self._closing: Any | None = None

    @property
    def ready(self) -> bool:
        if not self._ready and self.ended is None and self.why_not is None and self._is_done(self._begun):
            with contextlib.suppress(self._ray.exceptions.RayError):  # it has ended: `is_gone` says how
                self.pid, body = self._ray.get(self._begun)
                try:
                    opened(body)
                    self._ready = True
                except EnvError as error:
                    self.why_not = error
                    self.kill("its world cannot be made")
        return self._ready

    def call(self, instance: int, verb: int, body: bytes, deadline_s: float) -> bytes:
        """One call of an instance: its answer. Errors: ConnectionError (the actor ends, or Ray fails), TimeoutError."""
        try:
            return self._ray.get(self._actor.call.remote(instance, verb, body), timeout=deadline_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"the world's call ran {deadline_s:.1f} s in actor {self.pid}, its deadline") from error
        except self._ray.exceptions.RayError as error:  # the actor has ended, or the cluster has lost the answer
            self.is_gone()
            raise ConnectionError(f"the actor {self.pid} of the world {self._name!r} {self._how(error)}") from error

    def tell(self, instance: int, verb: int) -> Callable[[], bool]:
        """A call whose answer nobody waits for; what is given says whether it has come."""
        try:
            answer = self._actor.call.remote(instance, verb, b"")
        except self._ray.exceptions.RayError:
            return lambda: False
        return lambda: self._is_done(answer)

    def silent_s(self) -> float:
        """Seconds for which it has not answered that it is there; asks it."""
        if self._ping is None or self._is_done(self._ping):
            self._ping, self._asked_s = self._actor.ping.remote(), time.monotonic()
        return time.monotonic() - self._asked_s

    def kill(self, why: str) -> None:
        """End it now; the calls under way are told."""
        self._killed = f" ({why})"
        self._ray.kill(self._actor)

    def is_gone(self) -> bool:
        """Whether the actor has ended."""
        if self.ended is None and self._is_done(self._life):
            try:
                self._ray.get(self._life)
            except self._ray.exceptions.RayError as error:
                self.ended = self._how(error)
        return self.ended is not None

    def end(self) -> None:
        """Let it close its instances; `join` waits for that, and ends it."""
        self._closing = self._actor.close.remote() if self._ready and not self.is_gone() else None

    def join(self, until_s: float) -> None:
        """End it, after its instances or past `until_s` (monotonic), and wait until Ray knows."""
        if self._closing is not None:
            self._ray.wait([self._closing], timeout=max(0.0, min(until_s - time.monotonic(), CLOSE_S)))
        self.kill("the fleet was closed")
        self._ray.wait([self._life], timeout=CLOSE_S)
        self.is_gone()

    def _is_done(self, ref: Any) -> bool:
        return bool(self._ray.wait([ref], timeout=0)[0])

    def _how(self, error: BaseException) -> str:
        text = " ".join(str(error).split()).partition(" Some common causes")[0]
        return f"ended: {text}{self._killed}"
