"""A local process that serves one world (envs/fleet/host.py), from the side of its parent.

It is a new interpreter, never a fork: a fork of a process in which jax runs may hang. What crosses the socket between
them is told in envs/fleet/host.py; any number of threads call at once.
"""

import contextlib
import itertools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from envs.base import EnvError
from envs.fleet import host
from envs.fleet.host import CLOSE_S, HEAD, PING

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from envs.fleet.host import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_REAP_S = 1.0  # from the end of its socket to that of the process
_READY = 0  # the number that the first answer has


class _Waiter:
    """Who waits for one answer."""

    __slots__ = ("body", "came")

    def __init__(self):
        self.body: bytes | None = None
        self.came = threading.Lock()
        self.came.acquire()


class Process:
    """One process, which makes the world called `name` with its own hands.

    `ready`: it has; `ended`: how the process ended, and None while it lives. On Linux it ends with the thread that made
    it.
    """

    def __init__(self, name: str, options: Mapping[str, Any]):
        self._name = name
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            program = [sys.executable, "-c", _PROGRAM, str(fd), str(os.getpid()), json.dumps(sys.path)]
            self._popen = subprocess.Popen(program, pass_fds=(fd,), stdin=subprocess.DEVNULL)
        self.pid, self.ready, self.ended = self._popen.pid, False, None
        self.why_not: EnvError | None = None  # what kept it from making its world
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._sending, self._numbers = threading.Lock(), itertools.count(_READY + 1)
        self._waiting: dict[int, _Waiter] = {}
        self._ping: _Waiter | None = None  # sent, and not known to be answered
        self._asked_s: float | None = None  # when that ping was wanted
        self._killed = ""
        self._reader = threading.Thread(target=self._read, name=f"fleet-{self.pid}", daemon=True)
        self._reader.start()
        with contextlib.suppress(OSError):  # it has ended already: the reader says how
            self._connection.send_bytes(pickle.dumps((name, dict(options))))

    def call(self, instance: int, verb: int, body: bytes, deadline_s: float) -> bytes:
        """One call of an instance: its answer. Errors: ConnectionError where the process ends, TimeoutError."""
        number, waiter, until_s = next(self._numbers), _Waiter(), time.monotonic() + deadline_s
        self._waiting[number] = waiter
        try:
            if self.ended is None:
                self._send(HEAD.pack(number, instance, verb) + body, deadline_s)
                if not waiter.came.acquire(timeout=max(0.0, until_s - time.monotonic())):
                    raise TimeoutError(f"the world's call ran {deadline_s:.1f} s in process {self.pid}, its deadline")
        finally:
            self._waiting.pop(number, None)
        if waiter.body is None:
            raise self._lost()
        return waiter.body

    def tell(self, instance: int, verb: int) -> Callable[[], bool]:
        """A call whose answer nobody waits for; what is given says whether it has come."""
        number, waiter = next(self._numbers), _Waiter()
        self._waiting[number] = waiter
        try:
            self._send(HEAD.pack(number, instance, verb), _REAP_S)
        except OSError:
            self._waiting.pop(number, None)
        return lambda: waiter.body is not None

    def silent_s(self) -> float:
        """Seconds for which it has not answered that it is there; asks it."""
        now = time.monotonic()
        if self._ping is not None and not self._ping.came.locked():
            self._ping = self._asked_s = None
        if self._asked_s is None:
            self._asked_s = now
        if self._ping is None and self._sending.acquire(timeout=0.05):
            try:
                self._ping = self._pinged()
            finally:
                self._sending.release()
        return now - self._asked_s

    def kill(self, why: str) -> None:
        """End it now; the calls under way are told."""
        self._killed = f" ({why})"
        self._popen.kill()

    def is_gone(self) -> bool:
        """Whether the process has ended, which its socket may not show while a child of its own holds it."""
        if self._popen.poll() is not None and self.ended is None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return self.ended is not None

    def end(self) -> None:
        """Let it close its instances and end; `join` waits for that."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def join(self, until_s: float) -> None:
        """Wait for its end; past `until_s` (monotonic), or past what its instances have for closing, it is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, min(until_s - time.monotonic(), CLOSE_S + _REAP_S)))
        if self._popen.poll() is None:
            self.kill("it did not end by itself")
        self._popen.wait()
        self.is_gone()
        self._reader.join()

    def _lost(self) -> ConnectionError:
        return ConnectionError(f"the process {self.pid} of the world {self._name!r} {self.ended}")

    def _pinged(self) -> _Waiter | None:
        """Who waits for the answer to a ping. None: none could be sent without waiting."""
        poll = select.poll()
        if self.ended is not None:
            return None
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(0):
            return None
        number, waiter = next(self._numbers), _Waiter()
        self._waiting[number] = waiter
        with contextlib.suppress(OSError):
            self._connection.send_bytes(HEAD.pack(number, 0, PING))
        return waiter

    def _send(self, message: bytes, deadline_s: float) -> None:
        if not self._sending.acquire(timeout=deadline_s):
            raise TimeoutError(f"process {self.pid} has read nothing for {deadline_s:.1f} s")
        try:
            self._connection.send_bytes(message)
            return
        except OSError:
            pass
        finally:
            self._sending.release()  # the reader needs it to come to its end
        self._reader.join(2 * _REAP_S)  # it knows more than a broken pipe
        raise self._lost()

    def _read(self) -> None:
        """Hand out answers until there are no more; then say how the process ended. It comes to that whatever the other
        side sends: a process that nobody reads, and that has not `ended`, would hold its place for ever.
        """
        try:
            self._hand_out()
        except (EOFError, OSError):
            pass  # it has ended, or closed its socket: how is found out below
        except Exception as error:  # the world's own code can write to any descriptor of its process
            self.kill(f"it sent what is no answer: {type(error).__name__}: {error}")
        finally:
            how = self._reaped()
            self.ended = how + self._killed
            with self._sending:  # nobody writes to a number that may be another file's by then
                self._connection.close()
                self._socket.close()
            while self._waiting:
                _, waiter = self._waiting.popitem()
                waiter.came.release()

    def _hand_out(self) -> None:
        """Errors: EOFError and OSError where there is nothing more; others for what is no answer."""
        while True:
            message = self._connection.recv_bytes()
            number, _, _ = HEAD.unpack_from(message)
            body, waiter = message[HEAD.size :], self._waiting.pop(number, None)
            if number == _READY:
                self._begun(body)
            elif waiter is not None:  # else it came too late
                waiter.body = body
                waiter.came.release()

    def _reaped(self) -> str:
        """How the process ended, which it has when this returns."""
        try:
            code = self._popen.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self.kill("it closed its socket")
            code = self._popen.wait()
        return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def _begun(self, body: bytes) -> None:
        try:
            host.opened(body)
        except EnvError as error:
            self.why_not = error
        else:
            self.ready = True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals only the first and the last have names
        return f"signal {number}"
