"""Calls of a world, by which the program is protected from it: what it raises is an EnvError, and how long it runs can
be seen.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from envs.base import Env, EnvError, Task
from envs.failures import said


@dataclasses.dataclass(eq=False)
class Watch:
    """What the supervisor reads of one environment thread."""

    index: int
    call_since: float | None = None  # monotonic seconds at which the running call of the world began


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

    def __init__(self, watch: Watch, make_env: Callable[[], Env]):
        self._watch = watch
        self._env = guarded("make_env", self._timed, make_env)

    @property
    def spec(self):
        return self._env.spec

    def reset(self, task: Task):
        return self._timed(self._env.reset, task)

    def step(self, action: str):
        return self._timed(self._env.step, action)

    def close(self) -> None:
        """Nothing: the thread closes its world, with `discard`."""

    def discard(self) -> None:
        """Close the world; a world that fails even at this is only logged."""
        try:
            guarded("close", self._timed, self._env.close)
        except EnvError as error:
            logging.warning("env-%d: %s", self._watch.index, error)

    def _timed(self, function: Callable, *args):
        self._watch.call_since = time.monotonic()
        try:
            return function(*args)
        finally:
            self._watch.call_since = None
