"""Groups on their way from the gate to a batch: submitted whenever the gate lets one in, also while the learner
computes; judged as they finish, in whatever order; cut into batches in ticket order.

A group that finishes before one of an earlier ticket waits here, on the host, for its turn: nothing is left out for
having been slow, and which groups form a batch does not depend on timing. How far sampling runs ahead is the gate's
affair alone: with max_staleness 0 it lets in what the next batch still lacks, and this is the synchronous loop.
"""

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from envs.base import Task
from rl.rollout.pool import Group
from rl.rollout.staleness import StalenessGate
from rl.types import Trajectory

MOST_REFUSED = 8  # batches' worth of refused groups in a row: then the policy has nothing to learn from
POLL_S = 0.2  # how late a closing feeder notices, where groups are still being played


class AllRefused(RuntimeError):
    """So many groups in a row were refused that there is nothing to learn from; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """A finished group, scored, and whether it will be trained on. A refused one takes no place in a batch."""

    group: Group
    admitted: bool


class Feeder:
    """Between `pool` and the loop: one thread, "feeder", takes what finishes, and submits what the gate lets in.

    `tickets` are those of this process that are not settled, in order, without end; `draw(ticket)` is the task of one,
    `judge(group)` scores and decides. At most `batches` batches of `batch` groups of `size` episodes are let in: what
    no batch would hold is not played, nor is a task that `passes`: its draw goes to the next ticket. `waiting` is what
    `waiting()` said when the run was saved: these groups are not played again. Errors of the thread (the pool's, a
    judge's, refusals without end) are raised by `next_batch`.
    Use it as a context: at its end the thread is joined, and groups under way are left to the pool.
    """

    def __init__(
        self,
        pool: Any,
        gate: StalenessGate,
        draw: Callable[[int], Task],
        judge: Callable[[Group], Judged],
        tickets: Iterable[int],
        *,
        size: int,
        batch: int,
        batches: int,
        waiting: Sequence[Mapping[str, Any]] = (),
        passes: Callable[[Task], bool] = lambda task: False,
    ):
        self._pool, self._gate, self._draw, self._judge, self._passes = pool, gate, draw, judge, passes
        self._size, self._batch = size, batch
        self._changed = threading.Condition(threading.RLock())  # guards all below
        self._wanted = batches * batch  # groups that may still be let in, or that run now and may be refused
        self._running = 0
        self._refused = 0  # since the last cut
        self._finished: dict[int, Judged] = {}
        self._ready: list[Judged] = []  # those before which nothing is missing, in ticket order
        self._stop = False
        self._error: BaseException | None = None
        to_draw, to_keep, self._uncut = itertools.tee(tickets, 3)
        self._head = next(self._uncut)  # the first ticket that is not in `_ready`
        for judged in _restored(waiting, draw, to_keep, gate, batches * batch, passes):
            if judged.admitted:
                if not gate.acquire(timeout_s=0):
                    raise RuntimeError(f"{len(waiting)} groups wait, more than the gate lets in: {gate.stats()}")
                gate.accept()
                self._wanted -= 1
            self._finished[judged.group.ticket] = judged
        kept = frozenset(self._finished)
        self._undrawn = (ticket for ticket in to_draw if ticket not in kept)
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._thread.start()

    def let_in(self, version: int) -> None:
        """Tells the gate that batches before `version` are trained, and submits what it lets in by that."""
        self._gate.on_publish(version)
        self._fill()

    def wait(self, stop: Callable[[], bool] = lambda: False, timeout_s: float = math.inf) -> bool:
        """Waits until the next batch is complete, or nothing is under way that would complete it. False: `stop()` or
        the end of `timeout_s` came first, and whatever finishes meanwhile waits. Errors: what ended the thread.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            while not stop() and time.monotonic() < until:
                if self._changed.wait_for(lambda: self._error or self._complete() or not self._running, POLL_S):
                    if self._error is not None:
                        raise self._error
                    return True
            return False

    def next_batch(self) -> tuple[list[Group], list[Group]]:
        """The next `batch` admitted groups, and those refused among them, both in ticket order; waits for the slowest.

        Errors: what ended the thread; RuntimeError where nothing is under way that would complete it.
        """
        with self._changed:
            self.wait()
            if not self._complete():
                raise RuntimeError(
                    f"got no group under way and {len(self._ready)} ready, want {self._batch} admitted ones for a "
                    f"batch; call let_in first, and once for each; the gate: {self._gate.stats()}"
                )
            places = [i for i, judged in enumerate(self._ready) if judged.admitted]
            end = places[self._batch - 1] + 1
            cut, self._ready = self._ready[:end], self._ready[end:]
            self._refused = 0
            return [j.group for j in cut if j.admitted], [j.group for j in cut if not j.admitted]

    def waiting(self) -> list[dict[str, Any]]:
        """The groups that have finished and are in no batch yet, in ticket order, as plain data."""
        with self._changed:
            judged = [*self._ready, *(self._finished[ticket] for ticket in sorted(self._finished))]
        return [
            {
                "ticket": j.group.ticket,
                "admitted": j.admitted,
                "dropped": j.group.dropped,
                "retries": j.group.retries,
                "episodes": [t.to_bytes() for t in j.group.trajectories],
            }
            for j in judged
        ]

    def close(self) -> None:
        """Ends the thread; idempotent."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Feeder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fill(self) -> None:
        """Submit the next tickets, as many as the gate lets in; from any thread."""
        with self._changed:
            while self._wanted > 0 and self._gate.acquire(timeout_s=0):
                ticket, task = self._next()
                self._pool.submit_group(ticket, task, self._size)
                self._wanted -= 1
                self._running += 1
            self._changed.notify_all()

    def _next(self) -> tuple[int, Task]:
        """The next ticket that is played. Those before it that are not are finished, without an episode.

        It ends: some task is not passed (rl/quarantine.py), and every task is drawn again and again.
        """
        for ticket in self._undrawn:
            task = self._draw(ticket)
            if not self._passes(task):
                return ticket, task
            self._finished[ticket] = Judged(Group(ticket, task, (), dropped=True, retries=0), admitted=False)
        raise AssertionError("tickets have an end")

    def _complete(self) -> bool:
        while self._head in self._finished:
            self._ready.append(self._finished.pop(self._head))
            self._head = next(self._uncut)
        return sum(judged.admitted for judged in self._ready) >= self._batch

    def _run(self) -> None:
        try:
            while self._await_running():
                try:
                    group = self._pool.next_group(POLL_S)
                except TimeoutError:
                    continue
                judged = self._judge(group)  # outside the lock: it may ask somebody, and take long
                with self._changed:  # one less runs when all that follows from it is done: then 0 means 0
                    self._take(judged)
                    self._fill()
                    self._running -= 1
        except BaseException as error:  # the loop hears of it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _await_running(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._running)
            return not self._stop

    def _take(self, judged: Judged) -> None:
        self._finished[judged.group.ticket] = judged
        if judged.admitted:
            self._gate.accept()
        else:
            self._gate.drop()
            self._wanted += 1
            self._refused += 1
        admitted = sum(j.admitted for j in [*self._ready, *self._finished.values()])
        if self._refused >= MOST_REFUSED * self._batch and admitted < self._batch:
            raise AllRefused(
                f"got {self._refused} refused and {admitted} admitted groups for a batch of {self._batch}: "
                "the world fails, no term of the reward can judge, or every episode of a group ends alike; see "
                "episodes/, mend the world or the judge, or start from a policy that sometimes succeeds "
                "(rl.drop_equal_groups=False and curriculum.admit_low=0, admit_high=1 train all the same)"
            )


def _restored(
    waiting: Sequence[Mapping[str, Any]],
    draw: Callable[[int], Task],
    tickets: Iterable[int],
    gate: StalenessGate,
    room: int,
    passes: Callable[[Task], bool],
) -> Iterator[Judged]:
    """The groups of `waiting`, but for those that must be played again: of a data set that is not drawn from any more,
    or with tokens that would be too old by their turn (there are more processes now, or fewer), or beyond the `room`
    groups that are trained at all.
    """
    kept = {}
    for saved in waiting:
        ticket, trajectories = saved["ticket"], tuple(map(Trajectory.from_bytes, saved["episodes"]))
        task = draw(ticket)
        if all(t.task_id == task.task_id for t in trajectories) and (trajectories or passes(task)):
            group = Group(ticket, task, trajectories, saved["dropped"], saved["retries"])
            kept[ticket] = Judged(group, saved["admitted"])
    # The place of each ticket among those that are trained, if whatever is still to be played is.
    upto = itertools.takewhile(lambda ticket: ticket <= max(kept, default=-1), tickets)
    places = {ticket: i for i, ticket in enumerate(t for t in upto if t not in kept or kept[t].admitted)}
    for ticket, judged in kept.items():
        rows = [row for t in judged.group.trajectories for row in t.rows]
        oldest = min((int(v) for row in rows for v in row.version[row.action_mask]), default=None)
        if not judged.admitted or (places[ticket] < room and gate.allows(oldest, places[ticket])):
            yield judged
