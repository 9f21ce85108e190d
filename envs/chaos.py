"""Worlds that fail on purpose: any world of this repository behind faults that are drawn by seed.

Each reset draws anew whether this episode is faulted, how, and at which call of it (reset, or one of the first steps):
a function of (seed, task, how often the task was reset before), so that another try draws again. Resets are counted in
this process, or in a folder, for all processes: one that ends takes no count with it.

| fault | what happens |
|---|---|
| `raise` | the world raises: a broken invariant, a lost connection, no memory, an exit |
| `hang` | the call takes `hang_s`: longer than its caller bears |
| `garbage` | the world answers something else than it must |
| `slow` | the call takes `slow_s`, and is right |
| `exit` | the interpreter ends, at once: for worlds in processes of their own alone |

Of a share `broken` of the tasks every reset raises the same: these fail deterministically.
"""

import dataclasses
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from envs.base import Env, Observation, Step, Task, World

KINDS = ("raise", "hang", "garbage", "slow", "exit")
EXIT_CODE = 13
_ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: ValueError("chaos: the world has lost count"),
    lambda: ConnectionResetError(104, "chaos: the connection was reset"),
    lambda: MemoryError("chaos: no memory"),
    lambda: SystemExit("chaos: the world wants to go"),
)
_GARBAGE = (None, [], "42", Step(None, "yes", None), Step(Observation("?"), False, {"success": "maybe"}))


class Faults:
    """Which episodes are faulted, and how; counts what was injected, by kind ("broken" too). Thread-safe; those with
    one folder `counts` count together.

    Errors (ValueError): a kind that does not exist, shares beyond [0, 1].
    """

    def __init__(
        self, kinds: Sequence[str], share: float, broken: float, calls: int, seed: int, counts: str | Path | None = None
    ):
        unknown = sorted({*kinds} - {*KINDS})
        if unknown or not kinds or calls < 1 or not (0 <= share <= 1 and 0 <= broken <= 1):
            raise ValueError(
                f"chaos: got faults={tuple(kinds)} {share=} {broken=} {calls=}, want some of {', '.join(KINDS)}, "
                "shares from 0 to 1 and at least one call"
            )
        self._kinds, self._share, self._broken, self._calls, self._seed = tuple(kinds), share, broken, calls, seed
        self._counts = None if counts is None else Path(counts)
        if self._counts is not None:
            self._counts.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # guards all below
        self._known: Counter[str] = Counter()

    @property
    def injected(self) -> Counter[str]:
        """How often each kind was injected."""
        with self._lock:
            known = dict(self._known)
        if self._counts is not None:
            known = {file.name: file.stat().st_size for file in self._counts.iterdir()}
        return Counter({name: known[name] for name in (*KINDS, "broken") if name in known})

    def is_broken(self, task: Task) -> bool:
        """Whether every reset of the task fails."""
        return self._rng(task, 0).random() < self._broken

    def draw(self, task: Task) -> tuple[str, int, int]:
        """(kind, call, choice) of the reset that begins now: the fault comes at that call, 0 being reset itself, and
        `choice` picks its form. Kind "": none.
        """
        rng = self._rng(task, self._add(f"reset-{_number(task):08x}"))
        if rng.random() >= self._share:
            return "", 0, 0
        return str(rng.choice(self._kinds)), int(rng.integers(self._calls)), int(rng.integers(1 << 16))

    def count(self, kind: str) -> None:
        self._add(kind)

    def _add(self, name: str) -> int:
        """Counts one more of it: how many there are then. In a folder it is the length of a file."""
        if self._counts is None:
            with self._lock:
                self._known[name] += 1
                return self._known[name]
        fd = os.open(self._counts / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(fd, b".")
            return os.lseek(fd, 0, os.SEEK_CUR)
        finally:
            os.close(fd)

    def _rng(self, task: Task, reset: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, _number(task), reset))


def _number(task: Task) -> int:
    return zlib.crc32(task.task_id.encode())


class ChaosEnv:
    """`env` behind `faults`; snapshots, and whatever else a world can, are its own."""

    def __init__(self, env: Env, faults: Faults, hang_s: float, slow_s: float):
        self._env, self._faults, self._hang_s, self._slow_s = env, faults, hang_s, slow_s
        self._fault, self._call = ("", 0, 0), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, task: Task) -> Observation:
        self._fault, self._call = self._faults.draw(task), -1
        if self._faults.is_broken(task):
            self._faults.count("broken")
            raise KeyError(f"chaos: the data of {task.task_id} lacks a row")
        return self._faulted(lambda: self._env.reset(task))

    def step(self, action: str) -> Step:
        return self._faulted(lambda: self._env.step(action))

    def _faulted(self, call: Callable[[], Any]) -> Any:
        self._call += 1
        kind, at, choice = self._fault
        if not kind or self._call != at:
            return call()
        self._faults.count(kind)
        if kind == "raise":
            raise _ERRORS[choice % len(_ERRORS)]()
        if kind == "garbage":
            return _GARBAGE[choice % len(_GARBAGE)]
        if kind == "exit":
            os._exit(EXIT_CODE)
        time.sleep(self._hang_s if kind == "hang" else self._slow_s)
        return call()


def make_world(
    *,
    world: str = "arith",
    options: Mapping[str, Any] = MappingProxyType({}),
    faults: Sequence[str] = ("raise", "garbage", "slow"),
    share: float = 0.0,
    broken: float = 0.0,
    calls: int = 2,
    hang_s: float = 3600.0,
    slow_s: float = 0.05,
    seed: int = 0,
    counts: str | None = None,
) -> World:
    """The world called `world`, made with `options`, behind faults; with both shares 0 it is as it is.

    Args:
        faults: kinds, each as likely; share: of the episodes that are faulted (where they come to the call at which it
            was to happen); broken: of the tasks that fail at each reset.
        calls: a fault comes at one of the first so many calls of an episode, reset included.
        counts: folder of the counts, where the world is in several processes.
    """
    from envs import make_world as make  # it imports the worlds by name, this one too

    drawn = Faults(faults, share, broken, calls, seed, counts)
    return wrapped(make(world, **options), drawn, hang_s=hang_s, slow_s=slow_s)


def wrapped(world: World, faults: Faults, *, hang_s: float = 3600.0, slow_s: float = 0.05) -> World:
    """`world` behind `faults`."""
    return dataclasses.replace(world, name="chaos", make_env=lambda: ChaosEnv(world.make_env(), faults, hang_s, slow_s))
