"""One world in other places: the instances of `Fleet.make_env` are those of its members, local processes or Ray
actors.

A member that ends takes with it the episodes that its instances play, which end as ENV_ERROR, and no others: an
instance between two episodes moves to another member at its next `reset`. The place of a member is filled again, after
a pause that doubles with each member in a row that came to nothing; who wants to begin an episode meanwhile waits in
`ready`, which is no call of the world. A call past its deadline is given up with its instance. A member that has lost
many instances so, or no longer answers at all, is replaced too.
"""

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from envs.base import Env, EnvError, EnvLost, EnvSpec, Observation, Step, Task
from envs.fleet.host import CALL, CLOSE, OPEN, opened, request

FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 30.0
HEALTHY_S = 30.0  # a member that lived so long leaves no pause behind
MOST_HUNG = 4  # calls of one member that do not return: each holds a thread of it, and perhaps a core
REST_S = 60.0  # in which nobody called a retired member: the episodes in it are over, though they did not say so
TICK_S = 0.25


class FleetError(RuntimeError):
    """The fleet cannot begin; the message says why."""


class Member(Protocol):
    """Where instances are: a `Process`, a `RayActor`. Errors of `call`: ConnectionError where the member ends,
    TimeoutError.
    """

    pid: int
    ready: bool  # its world is made
    ended: str | None  # how; None while it lives
    why_not: EnvError | None  # what kept it from making its world

    def call(self, instance: int, verb: int, body: bytes, deadline_s: float) -> bytes: ...

    def tell(self, instance: int, verb: int) -> Callable[[], bool]: ...  # whether it has answered

    def silent_s(self) -> float: ...

    def kill(self, why: str) -> None: ...

    def is_gone(self) -> bool: ...

    def end(self) -> None: ...

    def join(self, until_s: float) -> None: ...


def pause_s(failures: int) -> float:
    """Seconds before a member is made in place of the last of `failures` in a row: min(30, .1 · 2^(failures - 1))."""
    return min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 60)) if failures else 0.0


@dataclasses.dataclass(eq=False)
class _Running:
    """A member and what is known of it."""

    member: Member
    began_s: float
    instances: set[int] = dataclasses.field(default_factory=set)
    playing: set[int] = dataclasses.field(default_factory=set)  # of them: in an episode
    called_s: float = 0.0  # when a call began last
    late: list[Callable[[], bool]] = dataclasses.field(default_factory=list)  # given up: whether they have ended

    @property
    def hung(self) -> int:
        """Calls that were given up and have not ended."""
        return len(self.late)

    @property
    def takes_more(self) -> bool:
        """Whether an episode may begin here."""
        return self.member.ready and self.member.ended is None and self.hung < MOST_HUNG


@dataclasses.dataclass(eq=False)
class _Place:
    """Where one member at a time is."""

    running: _Running | None = None
    failures: int = 0  # in a row
    not_before_s: float = 0.0


class Fleet:
    """`n` members, made by `start` in a thread of the fleet, and made again when they end. All are ready when the
    constructor returns, and none is left when `close` does.

    `deadline_s` bounds a call; a member that has answered no ping for `silence_s` (None: as long) is killed. Errors
    (FleetError): a member is not ready after `start_s`, or says why it never will be.
    """

    def __init__(
        self,
        start: Callable[[], Member],
        n: int,
        *,
        deadline_s: float,
        silence_s: float | None = None,
        start_s: float = 600.0,
    ):
        silence_s = deadline_s if silence_s is None else silence_s
        if n < 1 or min(deadline_s, silence_s, start_s) <= 0:
            raise ValueError(
                f"Fleet: got {n=} {deadline_s=} {silence_s=} {start_s=}; want a member at least, and positive seconds"
            )
        self._start, self._deadline_s, self._silence_s, self._start_s = start, deadline_s, silence_s, start_s
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()  # guards all below
        self._places = [_Place() for _ in range(n)]
        self._retired: list[_Running] = []  # no episode begins in them any more
        self._closed, self._close_s = False, 0.0
        self._ready_s = time.monotonic()  # when there was a ready member last
        self._failure: BaseException | None = None
        self._last = "none"  # how the last one ended
        self._began = False  # all were ready once
        self._counts = dict.fromkeys(["started", "died", "hung_calls", "retired"], 0)
        self._supervisor = threading.Thread(target=self._supervise, name="fleet-supervisor", daemon=True)
        self._supervisor.start()
        try:
            self._wait_until_ready()
            self._began = True
        except BaseException:
            self.close()
            raise

    def make_env(self) -> "RemoteEnv":
        """One instance, in the ready member that has the fewest. Errors (EnvError): there is none, also not within
        `deadline_s`; the world's own.
        """
        running, instance, spec, has_snapshot = self._open(time.monotonic() + self._deadline_s)
        return (_Restorable if has_snapshot else RemoteEnv)(self, running, instance, spec)

    def ready(self, timeout_s: float) -> bool:
        """Waits for a member in which an episode can begin. True also where nobody should wait any longer, and a call
        fails at once: the fleet is closed, or has failed, or none of its members was ready for as long as one may take.
        """
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout_s)

    @property
    def patience_s(self) -> float:
        """Seconds without a ready member after which nobody waits any longer, and a call says why there is none."""
        return self._start_s + MOST_PAUSE_S

    def stats(self) -> dict[str, int]:
        """Members started, died and retired, and calls that hung, since the start; instances and members now."""
        with self._changed:
            return {
                **self._counts,
                "members": sum(r.takes_more for r in self._running()),
                "instances": sum(len(r.instances) for r in [*self._running(), *self._retired]),
            }

    def pids(self) -> list[int]:
        """Of the members now, those with it that only end their episodes."""
        with self._changed:
            pids = [r.member.pid for r in [*self._running(), *self._retired]]
            return [pid for pid in pids if pid > 0]  # an actor's is not known before it has begun

    def close(self, timeout_s: float = 10.0) -> None:
        """End every member, also one that hangs; idempotent. Calls under way end as EnvError."""
        with self._changed:
            self._closed, self._close_s = True, timeout_s
            self._changed.notify_all()
        self._supervisor.join()

    # Instances

    def _open(self, until_s: float) -> tuple[_Running, int, EnvSpec, bool]:
        instance = next(self._numbers)
        with self._changed:
            self._changed.wait_for(self._is_settled, max(0.0, until_s - time.monotonic()))
            running = None if self._closed or self._failure else self._free()
            if running is None:
                raise EnvLost(f"no member of the fleet is ready: {self._why()}") from self._failure
            running.instances.add(instance)
        try:
            spec, has_snapshot = self._call(running, instance, OPEN, b"", until_s)
        except EnvError:
            self._forget(running, instance)
            running.member.tell(instance, CLOSE)  # what it began there
            raise
        return running, instance, spec, has_snapshot

    def _running(self) -> list[_Running]:
        return [place.running for place in self._places if place.running is not None]

    def _free(self) -> _Running | None:
        return min(
            (r for r in self._running() if r.takes_more), key=lambda running: len(running.instances), default=None
        )

    def _is_settled(self) -> bool:
        overdue = time.monotonic() - self._ready_s > self.patience_s
        return self._closed or self._failure is not None or overdue or self._free() is not None

    def _call(self, running: _Running, instance: int, verb: int, body: bytes, until_s: float | None = None) -> Any:
        """Until `until_s` (monotonic; None: for one deadline). Errors: EnvError, whatever it is. After one that is not
        the world's own the instance is gone.
        """
        running.called_s = now = time.monotonic()
        left_s = self._deadline_s if until_s is None else max(0.01, until_s - now)
        try:
            return opened(running.member.call(instance, verb, body, left_s))
        except TimeoutError as error:
            self._forget(running, instance)
            has_ended = running.member.tell(instance, CLOSE)  # should its call ever end
            with self._changed:
                running.late.append(has_ended)
                self._counts["hung_calls"] += 1
            raise EnvError(str(error)) from error
        except ConnectionError as error:
            self._forget(running, instance)
            if running.member.ended is None:  # the answer alone was lost
                running.member.tell(instance, CLOSE)
            raise EnvError(str(error)) from error

    def _forget(self, running: _Running, instance: int) -> None:
        with self._changed:
            running.instances.discard(instance)
            running.playing.discard(instance)

    def _begins(self, running: _Running, instance: int) -> bool:
        """Whether an episode can begin in this instance; if so it has begun."""
        with self._changed:
            fine = instance in running.instances and running.takes_more
            if fine:
                running.playing.add(instance)
            return fine

    # The supervisor

    def _supervise(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, TICK_S if self._all_ready() else TICK_S / 10)
                    if self._closed:
                        return
                    if self._free() is not None:
                        self._ready_s = time.monotonic()
                for place in self._places:
                    self._look_at(place)
                for running in list(self._retired):
                    self._let_end(running)
        except BaseException as error:  # a fault of the program: whoever wants an instance hears of it
            logging.error("fleet: %s: %s", type(error).__name__, error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:  # here, because a process ends with the thread that began it
            members = [running.member for running in [*self._running(), *self._retired]]
            for member in members:
                member.end()
            until_s = time.monotonic() + self._close_s
            for member in members:
                member.join(until_s)

    def _look_at(self, place: _Place) -> None:
        now, running = time.monotonic(), place.running
        if running is None:
            if now >= place.not_before_s:
                try:
                    member = self._start()
                except OSError as error:  # no memory, no descriptors: the others play on
                    if not self._began:
                        raise
                    self._fails(place, now, f"none could be started: {type(error).__name__}: {error}")
                    return
                with self._changed:
                    place.running = _Running(member, now)
                    self._counts["started"] += 1
            return
        member = running.member
        self._look_at_late(running)
        if not member.ready and member.ended is None and now - running.began_s > self._start_s:
            member.kill(f"its world was not made within {self._start_s:.0f} s")
        elif member.ready and member.silent_s() > self._silence_s:
            member.kill(f"it has not answered for {self._silence_s:.1f} s")
        if member.is_gone():
            self._replace(place, running, now)
        elif running.hung >= MOST_HUNG:
            logging.warning("fleet: %d calls of the process %d hang; another takes its place", running.hung, member.pid)
            with self._changed:
                self._retired.append(running)
                self._counts["retired"] += 1
                place.running = None
        elif member.ready:
            with self._changed:
                self._changed.notify_all()
                if now - running.began_s > HEALTHY_S:
                    place.failures = 0

    def _replace(self, place: _Place, running: _Running, now: float) -> None:
        member = running.member
        why = f": {member.why_not}" if member.why_not else ""
        self._fails(place, now, f"the process {member.pid} {member.ended}{why}")

    def _fails(self, place: _Place, now: float, how: str) -> None:
        with self._changed:
            place.running = None
            self._counts["died"] += 1
            place.failures += 1
            place.not_before_s = now + pause_s(place.failures)
            self._last = how
            self._changed.notify_all()
        logging.warning("fleet: %s; another takes its place in %.1f s", how, place.not_before_s - now)

    def _look_at_late(self, running: _Running) -> None:
        if any(has_ended() for has_ended in running.late):
            with self._changed:
                running.late = [has_ended for has_ended in running.late if not has_ended()]

    def _let_end(self, running: _Running) -> None:
        """A retired member goes with the last episode that it plays, or when none has asked for anything for long."""
        rests = time.monotonic() - running.called_s > max(REST_S, 2 * self._deadline_s)
        if not running.playing or rests or running.member.silent_s() > self._silence_s:
            running.member.kill(f"{running.hung} of its calls hung")
        if running.member.is_gone():
            with self._changed:
                self._retired.remove(running)

    def _all_ready(self) -> bool:
        return all(place.running is not None and place.running.member.ready for place in self._places)

    def _wait_until_ready(self) -> None:
        """The first members are the user's to hear of: one that ends, or cannot make its world, is no back-off."""

        def failed() -> bool:
            return self._failure is not None or self._counts["died"] > 0

        with self._changed:
            self._changed.wait_for(lambda: self._all_ready() or failed())
            if failed():
                raise FleetError(f"the worlds of the fleet cannot be made: {self._why()}") from self._failure

    def _why(self) -> str:
        if self._closed:
            return "the fleet is closed"
        if self._failure is not None:
            return f"the fleet has failed: {type(self._failure).__name__}: {self._failure}"
        return f"{self._counts['died']} of {self._counts['started']} have died; the last: {self._last}"


class RemoteEnv(Env):
    """An instance of the fleet's world. One thread at a time."""

    def __init__(self, fleet: Fleet, running: _Running, instance: int, spec: EnvSpec):
        self._fleet, self._running, self._instance, self.spec = fleet, running, instance, spec

    @property
    def pid(self) -> int:
        """Of the process that it is in."""
        return self._running.member.pid

    def reset(self, task: Task) -> Observation:
        """In another instance where this one is gone; making it and the call itself have one deadline together."""
        body, until_s = request("reset", task), time.monotonic() + self._fleet._deadline_s
        while not self._fleet._begins(self._running, self._instance):
            self._fleet._forget(self._running, self._instance)
            self._running.member.tell(self._instance, CLOSE)  # where it still is
            self._running, self._instance, self.spec, _ = self._fleet._open(until_s)
        observation, spec = self._call(body, until_s)
        self.spec = spec or self.spec
        return observation

    def step(self, action: str) -> Step:
        step = self._call(request("step", action))
        if getattr(step, "done", True):
            self._running.playing.discard(self._instance)
        return step

    def close(self) -> None:
        """Close the instance, if it is still there."""
        running, instance = self._running, self._instance
        if instance in running.instances and running.member.ended is None:
            self._fleet._forget(running, instance)
            self._fleet._call(running, instance, CLOSE, b"")

    def _call(self, body: bytes, until_s: float | None = None) -> Any:
        return self._fleet._call(self._running, self._instance, CALL, body, until_s)


class _Restorable(RemoteEnv):
    """Of a world that has snapshots."""

    def snapshot(self) -> bytes:
        return self._call(request("snapshot"))

    def restore(self, snapshot: bytes) -> None:
        """Also into another instance than that of the snapshot."""
        self._call(request("restore", snapshot))
