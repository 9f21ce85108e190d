"""Instances of one world behind bytes: what runs at the far side of a fleet (envs/fleet/fleet.py), and what crosses.

Each instance has a thread of its own, so that slow worlds overlap and no instance ever changes its thread. An answer is
pickled where it was given: one that cannot be is an EnvError, and the connection lives on.
"""

import copyreg
import ctypes
import faulthandler
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from envs import make_world
from envs.base import Env, EnvError, EnvLost, World
from envs.failures import DATA, INFRASTRUCTURE, kind_of, placed, said
from envs.interpreter import switch_interval_s

HEAD = struct.Struct("<QIB")  # number of the call, of the instance, verb
OPEN, CALL, CLOSE, PING = range(4)
CLOSE_S = 2.0  # for instances to close, once the other side has gone
_GIVEN, _FAILED = range(2)
_PR_SET_PDEATHSIG = 1

# Read-only views are plain data to a world, but not to pickle.
copyreg.pickle(MappingProxyType, lambda view: (dict, (dict(view),)))


def request(method: str, *args: Any) -> bytes:
    """The body of a CALL. Errors (EnvError): an argument that cannot be pickled."""
    try:
        return pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise EnvError(f"{method}: cannot be sent ({type(error).__name__}: {error}); want plain data") from error


def answer(function: Callable, *args: Any) -> bytes:
    """What `function(*args)` gives or raises, as bytes. Never raises."""
    try:
        value = function(*args)
    except EnvError as error:
        return _failed(said(error), kind_of(error))
    except BaseException as error:  # SystemExit, or a panic of foreign code, is the world's too
        return _failed(placed(error), kind_of(error))
    try:
        return pickle.dumps((_GIVEN, value), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kind = f"{type(error).__name__}: {error}"
        return _failed(f"the world gave a {type(value).__name__} that cannot be sent ({kind}); want plain data", DATA)


def opened(body: bytes) -> Any:
    """What `answer` packed. Errors: of what it raised, with the place, an EnvLost or a plain EnvError, which is of the
    same kind here as there (envs/failures.py); EnvError for bytes that cannot be read.
    """
    try:
        what, *rest = pickle.loads(body)
    except Exception as error:
        raise EnvError(f"the world's answer cannot be read here ({type(error).__name__}: {error})") from error
    if what == _GIVEN:
        return rest[0]
    text, kind = rest
    raise (EnvLost if kind == INFRASTRUCTURE else EnvError)(text)


def _failed(text: str, kind: str) -> bytes:
    return pickle.dumps((_FAILED, text, kind), pickle.HIGHEST_PROTOCOL)


class Host:
    """The instances, by number. `reply(call, body)` is called in the thread of the instance that answers."""

    def __init__(self, make_env: Callable[[], Env], reply: Callable[[int, bytes], None]):
        self._make_env, self._reply = make_env, reply
        self._inboxes: dict[int, SimpleQueue] = {}
        self._threads: set[threading.Thread] = set()

    def call(self, call: int, instance: int, verb: int, body: bytes) -> None:
        """Hand a call to its instance, whose first is OPEN and whose last is CLOSE. From one thread only."""
        if verb == OPEN:
            inbox = self._inboxes[instance] = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(inbox,), name=f"world-{instance}", daemon=True)
            self._threads.add(thread)
            sys.setswitchinterval(switch_interval_s(len(self._threads)))
            thread.start()
        inbox = self._inboxes.pop(instance, None) if verb == CLOSE else self._inboxes.get(instance)
        if inbox is None:
            self._reply(call, _failed(f"instance {instance} is not open", INFRASTRUCTURE))
        else:
            inbox.put((call, verb, body))

    def close(self, timeout_s: float) -> None:
        """Close the instances that are not in a call for longer than this."""
        until = time.monotonic() + timeout_s
        for instance in list(self._inboxes):
            self._inboxes.pop(instance).put((0, CLOSE, b""))
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    def _serve(self, inbox: SimpleQueue) -> None:
        instance, verb = _Instance(self._make_env), OPEN
        while verb != CLOSE:
            call, verb, body = inbox.get()
            self._reply(call, answer(instance.do, verb, body))
        self._threads.discard(threading.current_thread())


class _Instance:
    def __init__(self, make_env: Callable[[], Env]):
        self._make_env, self._env, self._spec = make_env, None, None

    def do(self, verb: int, body: bytes) -> Any:
        """OPEN: (spec, whether it has snapshots). `reset`: (observation, spec where it is another now)."""
        if verb == OPEN:
            self._env = self._make_env()
            self._spec = self._env.spec
            return self._spec, hasattr(self._env, "snapshot")
        if self._env is None:
            raise EnvError("this instance could not be made")
        if verb == CLOSE:
            return self._env.close()
        method, args = pickle.loads(body)
        given = getattr(self._env, method)(*args)
        if method != "reset":
            return given
        changed, self._spec = self._env.spec is not self._spec, self._env.spec
        return given, self._spec if changed else None


def warm_world(name: str, options: Mapping[str, Any]) -> World:
    """The world, and what its instances share opened by making one."""
    world = make_world(name, **options)
    world.make_env().close()
    return world


def main(fd: int, parent: int) -> None:
    """Serve one world over the socket `fd` until it ends: the program of a process (envs/fleet/process.py)."""
    os.set_inheritable(fd, False)
    os.dup2(2, 1)  # a world that prints writes into nobody's report
    faulthandler.enable()
    _end_with(parent)
    # The parent ends its processes itself: a signal to the whole group must not cut the episodes that it lets end.
    # Handlers, not SIG_IGN, which programs that a world starts would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    connection, sending = Connection(fd), threading.Lock()

    def reply(call: int, body: bytes) -> None:
        try:
            with sending:
                connection.send_bytes(HEAD.pack(call, 0, 0) + body)
        except OSError:  # nobody waits any more: the loop below ends too
            pass

    host = None
    try:
        name, options = pickle.loads(connection.recv_bytes())
        worlds: list[World] = []
        reply(0, answer(lambda: worlds.append(warm_world(name, options))))
        if worlds:
            host = Host(worlds[0].make_env, reply)
        while host:
            message = connection.recv_bytes()
            call, instance, verb = HEAD.unpack_from(message)
            if verb == PING:
                reply(call, b"")
            else:
                host.call(call, instance, verb, message[HEAD.size :])
    except (EOFError, OSError):
        if host:
            host.close(CLOSE_S)
    finally:
        sys.stderr.flush()
        os._exit(0)  # an instance that hangs has a thread that nothing can end


def _end_with(parent: int) -> None:
    """Linux: this process is killed with its parent, also where the world keeps the interpreter to itself. Elsewhere
    the end of the socket has to do.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(0)
