"""Calls of a world, by which the program is protected from it: what it raises is an EnvError, and how long it runs can
be seen.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from envs.base import Env, EnvError, Task
from envs.failures import said
from rl.rollout.concurrency import CallLimit


@dataclasses.dataclass(eq=False)
class Watch:
    """What the supervisor reads of one environment thread."""

    index: int
    call_since: float | None = None  # monotonic seconds at which the running call of the world began
    calls: int = 0  # that have ended
    steps: int = 0  # those of them that are `step`, and their seconds
    step_s: float = 0.0


def guarded(name: str, function: Callable, *args) -> Any:
    """One call of a world. Whatever it raises comes out as an EnvError, with the world's own error as its cause."""
    try:
        return function(*args)
    except EnvError:
        raise
    # in an environment thread SystemExit, or a panic of foreign code, is the world's too
    except BaseException as error:
        raise EnvError(f"{name}: {type(error).__name__}: {said(error)}") from error


class WatchedEnv:
    """A world whose calls are on the clock. What reset and step raise goes through: it is guarded where the episode is
    played; making and closing a world are guarded here.
    """

    def __init__(self, watch: Watch, make_env: Callable[[], Env], calls: CallLimit | None = None):
        self._watch, self._calls = watch, calls
        self._env = guarded("make_env", partial(self._timed, begins=True), make_env)

    @property
    def spec(self):
        return self._env.spec

    def reset(self, task: Task):
        return self._timed(self._env.reset, task, begins=True)

    def step(self, action: str):
        return self._timed(self._step, action)

    def _step(self, action: str):
        began_s = time.monotonic()
        try:
            return self._env.step(action)
        finally:
            self._watch.steps += 1
            self._watch.step_s += time.monotonic() - began_s

    def close(self) -> None:
        """Nothing: the thread closes its world, with `discard`."""

    def discard(self) -> None:
        """Close the world; a world that fails even at this is only logged."""
        try:
            guarded("close", self._clocked, self._env.close)
        except EnvError as error:
            logging.warning("env-%d: %s", self._watch.index, error)

    def _timed(self, function: Callable, *args, begins: bool = False):
        if self._calls is None:
            return self._clocked(function, *args)
        with self._calls.turn(self._watch, begins=begins):
            return self._clocked(function, *args)

    def _clocked(self, function: Callable, *args):
        self._watch.call_since = time.monotonic()
        try:
            return function(*args)
        finally:
            self._watch.call_since = None
            self._watch.calls += 1
