"""A world under watch: whoever holds the `Watch` sees since when a call has been running."""

import dataclasses
import logging
import time
from collections.abc import Callable

from envs.base import Env, EnvError, Task


@dataclasses.dataclass(eq=False)
class Watch:
    """What the supervisor reads of one environment thread."""

    index: int
    call_since: float | None = None  # monotonic seconds at which the running call of the world began


class WatchedEnv:
    """A world whose calls are on the clock and whose failures, of whatever type, come out as EnvError."""

    def __init__(self, watch: Watch, make_env: Callable[[], Env]):
        self._watch = watch
        self._env = self._call("make_env", make_env)

    @property
    def spec(self):
        return self._env.spec

    def reset(self, task: Task):
        return self._call("reset", self._env.reset, task)

    def step(self, action: str):
        return self._call("step", self._env.step, action)

    def close(self) -> None:
        """Nothing: the thread closes its world, with `discard`."""

    def discard(self) -> None:
        """Close the world; a world that fails even at this is only logged."""
        try:
            self._call("close", self._env.close)
        except EnvError as error:
            logging.warning("env-%d: %s", self._watch.index, error)

    def _call(self, name: str, fn: Callable, *args):
        self._watch.call_since = time.monotonic()
        try:
            return fn(*args)
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(f"{name}: {type(error).__name__}: {error}") from error
        finally:
            self._watch.call_since = None
