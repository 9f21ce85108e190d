"""Who may hold a session: a bounded queue before a bounded number of places. Host bookkeeping alone."""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable

from rl.rollout.session import EngineBusy, EngineClosed


@dataclasses.dataclass(eq=False)
class Ticket:
    """One caller: in the queue for `n` places, or past it."""

    n: int
    granted: bool = False


class Admission:
    """`sessions` places, and at most `waiting` callers that wait for some, first come first served.

    `lock` is the engine's and reentrant; every method takes it, and lets go of it while it waits. `ended` is the error
    that everybody is told once the engine is closed or dead, None before.
    """

    def __init__(self, sessions: int, waiting: int, *, lock: threading.RLock, ended: Callable[[], Exception | None]):
        if waiting < 0:
            raise ValueError(f"Engine: got {waiting=}, want 0 or more callers that may wait for a session")
        self.sessions, self.waiting = sessions, waiting
        self._lock, self._ended = lock, ended
        self._changed = threading.Condition(lock)  # waited for to open, and for the last turn of a drained engine
        self._taken = 0  # places of open sessions, and of callers that are about to make theirs
        self._queue: deque[Ticket] = deque()
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def n_waiting(self) -> int:
        """Callers in the queue."""
        return len(self._queue)

    def load(self) -> int:
        """Places that are taken or waited for."""
        with self._lock:
            return self._taken + sum(ticket.n for ticket in self._queue)

    def join(self, n: int) -> Ticket:
        """A place in the queue, which counts as load from now on; whoever joined has to `wait`.

        Errors: ValueError for more places than there are; EngineBusy, EngineClosed and EngineError: nobody has joined.
        """
        if n > self.sessions:
            raise ValueError(f"got {n} sessions at once, want at most {self.sessions} (sessions)")
        with self._lock:
            if (refusal := self._refusal()) is not None:
                raise refusal
            ticket = Ticket(n)
            self._queue.append(ticket)
            self._grant()
            if len(self._queue) > self.waiting and not ticket.granted:
                self._queue.pop()
                raise EngineBusy(
                    f"{self._taken} of {self.sessions} sessions are open and {len(self._queue)} callers wait for one, "
                    f"want fewer than {self.waiting} (waiting); try again later"
                )
            return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Until the places of `ticket` are the caller's, to be given back with `leave`.

        Errors: TimeoutError, EngineClosed and EngineError: the caller is out of the queue.
        """
        with self._lock:
            try:
                self._changed.wait_for(lambda: ticket.granted or self._refusal() is not None, timeout_s)
                if (refusal := self._refusal()) is not None:
                    raise refusal
                if not ticket.granted:
                    raise TimeoutError(
                        f"open: {self._taken} of {self.sessions} sessions are open after {timeout_s} s, "
                        f"no place for {ticket.n} more; close sessions"
                    )
            except BaseException:
                if ticket.granted:
                    self.leave(ticket.n)
                else:
                    self._queue.remove(ticket)
                    self._grant()  # the next in line may fit
                raise

    def leave(self, n: int) -> None:
        """`n` places are free again."""
        with self._lock:
            self._taken -= n
            self._grant()

    def drain(self, in_flight: Callable[[], int], timeout_s: float) -> None:
        """Refuse whoever waits or comes, for good, and wait until nothing is in flight; see `Engine.drain`."""
        with self._lock:
            self._draining = True
            self.wake()
            self._changed.wait_for(lambda: self._ended() is not None or not in_flight(), timeout_s)
            if (ended := self._ended()) is not None:
                raise ended
            if in_flight():
                raise TimeoutError(
                    f"drain: {in_flight()} turns run on after {timeout_s} s, and no others begin; drain again to wait "
                    "on, or close the engine"
                )

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self._lock:
            self._changed.notify_all()

    def _grant(self) -> None:
        while self._queue and self._taken + self._queue[0].n <= self.sessions:
            ticket = self._queue.popleft()
            ticket.granted = True
            self._taken += ticket.n
        self._changed.notify_all()

    def _refusal(self) -> Exception | None:
        if (ended := self._ended()) is not None:
            return ended
        return EngineClosed("the engine is draining; make a new Engine") if self._draining else None
