"""A world that breaks where its tasks say so, for the tests of what must survive it."""

import ctypes
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import MappingProxyType

from envs.base import EnvError, EnvSpec, Message, Observation, Step, Task, World

TURNS = 3


class Unreadable:
    """It can be sent, and not be read."""

    def __reduce__(self):
        return _unreadable, ()


def _unreadable():
    raise RuntimeError("nobody reads me")


def exit_code():
    os._exit(7)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def unnamed_signal():
    os.kill(os.getpid(), signal.SIGRTMIN + 1)


def short_frame():
    """Into the socket by which its process answers (envs/fleet/process.py); then nothing more comes."""
    Connection(os.dup(int(sys.argv[1]))).send_bytes(b"no")
    time.sleep(3600)


def raise_error():
    raise RuntimeError("boom")


def raise_env_error():
    raise EnvError("no answer from there")


def raise_full_disk():
    raise OSError(28, "No space left on device")


def leave():
    sys.exit("leaving")


def hold_interpreter():
    ctypes.PyDLL(None).sleep(3600)  # with the GIL: no thread of the process runs any more


# each returns the answer of `step`, if it returns
FAULTS = {
    "exit": exit_code,
    "segfault": segfault,
    "unnamed": unnamed_signal,
    "frame": short_frame,
    "raise": raise_error,
    "env_error": raise_env_error,
    "full": raise_full_disk,
    "leave": leave,
    "hang": lambda: time.sleep(3600),
    "hold": hold_interpreter,
    "lambda": lambda: lambda: None,
    "unreadable": Unreadable,
    "garbage": lambda: 42,
    "print": lambda: print("a world prints"),
}


class BreakingEnv:
    """TURNS turns, in each of which the world says what it has heard; `task.data` names a fault and its turn."""

    def __init__(self):
        self.spec = EnvSpec("breaking", (".",), TURNS + 1)
        self._thread, self.closed = threading.get_ident(), False

    def reset(self, task):
        self._task, self._heard, self._names = task, [], set()
        self._note()
        return Observation(f"begin {task.seed}")

    def step(self, action):
        self._note()
        self._heard.append(action)
        fault, turn = self._task.data.get("fault"), self._task.data.get("turn", 1)
        if fault and len(self._heard) == turn and self._first(self._task.data.get("once")):
            answer = FAULTS[fault]()
            if fault != "print":
                return answer
        facts = {
            "success": len(action) % 2 == 0,
            "heard": list(self._heard),
            "threads": len(self._names),
        }
        if self._task.data.get("where"):
            facts |= {"pid": os.getpid(), "modules": sorted(sys.modules)}
        time.sleep(self._task.data.get("seconds", 0.0))
        done = len(self._heard) == TURNS
        return Step(Observation(f"heard {len(action)} of {self._task.seed}"), done, MappingProxyType(facts))

    def snapshot(self):
        return repr(self._heard).encode()

    def restore(self, snapshot):
        self._heard = eval(snapshot)

    def close(self):
        self.closed = True

    def _first(self, path):
        """Whether this is the first fault of them all, where there is to be but one."""
        try:
            return path is None or os.close(os.open(path, os.O_CREAT | os.O_EXCL)) is None
        except FileExistsError:
            return False

    def _note(self):
        self._names.add(threading.get_ident() == self._thread)


def task(seed, **data):
    return Task(f"breaking/{seed}", "toy", "train", seed, (Message("user", f"task {seed}"),), data)


def make_world(*, refuse: bool = False, die: bool = False, slow_s: float = 0.0) -> World:
    """The world, after `slow_s`; or none at all."""
    time.sleep(slow_s)
    if refuse:
        raise ValueError("refused: there is no such world")
    if die:
        os._exit(3)
    texts = ["begin task 0123456789 heard", "the quick brown fox jumps over the lazy dog ."]
    return World("breaking", BreakingEnv, lambda split: [task(i) for i in range(8)], {}, lambda: iter(texts))
