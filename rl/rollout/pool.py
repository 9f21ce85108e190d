"""Environment threads around one engine: groups in, finished groups out.

A job is one episode: (ticket, task, member). Each thread `env-i` owns one world. A group leaves the table whichever way
its members end: scored, left out as ENV_ERROR after the retry budget, or CANCELLED by `close`. A world that raises,
answers garbage or hangs past its deadline is data; anything else that raises is a fault of the program and reaches
whoever waits for groups.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from envs.base import Env, EnvError, Task
from models.sampling import Sampling
from rl.rollout.concurrency import CallLimit
from rl.rollout.engine import request_key
from rl.rollout.session import EngineBusy, EngineClosed
from rl.rollout.watched import Watch, WatchedEnv
from rl.rollout.worker import run_episode
from rl.types import Status, Trajectory

MIN_SCORED = 2  # members of a group, for there to be a comparison
_EPISODE_COUNTS = ("episodes", "env_errors", "retries", "lost_threads")


class PoolError(RuntimeError):
    """The pool cannot go on; the message and `__cause__` say why."""


class PoolClosed(PoolError):
    """The pool was closed, or the engine under it drained or closed, while the caller waited or before."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The episodes of one ticket, by member. `dropped`: too few were scored to compare; the ticket's place goes to the
    next.
    """

    ticket: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    dropped: bool
    retries: int


@dataclasses.dataclass(eq=False)
class _Open:
    """A group on the table."""

    ticket: int
    task: Task
    sampling: Sampling
    seed: int
    inbox: deque  # where the finished group goes
    ended: dict[int, Trajectory | None]
    attempts: list[int]
    retries: int = 0


@dataclasses.dataclass(eq=False)
class _Slot(Watch):
    """One environment thread and what it is doing now."""

    thread: threading.Thread | None = None
    job: tuple[_Open, int] | None = None
    session: Any = None
    env: WatchedEnv | None = None  # kept from episode to episode
    lost: bool = False


class Pool:
    """`threads` worlds playing episodes against one engine.

    `make_env` makes one world, in the thread that plays it. `episode` is `rl.rollout.worker.run_episode`, called as
    `episode(env, task, codec, session, ticket=, member=, **limits)`. A world call longer than `call_deadline_s` costs
    the world its thread. A member that ended as ENV_ERROR is tried `retries` times more, a group `group_retries` times
    in all; with fewer than `min_scored` scored members the group is dropped. `failures_in_row` world
    errors without one scored episode between, or `watchdog_s` without any progress, are fatal. `calls` bounds the calls
    of the world at once; a call that waits for its turn has not begun.
    """

    def __init__(
        self,
        engine,
        make_env: Callable[[], Env],
        codec,
        *,
        threads: int,
        seed: int,
        sampling: Sampling,
        call_deadline_s: float,
        retries: int = 2,
        group_retries: int = 8,
        min_scored: int = MIN_SCORED,
        failures_in_row: int = 256,
        watchdog_s: float = 600.0,
        episode: Callable[..., Trajectory] = run_episode,
        calls: CallLimit | None = None,
        **limits: Any,
    ):
        if threads < 1 or retries < 0 or group_retries < 0 or min_scored < 1 or call_deadline_s <= 0 or watchdog_s <= 0:
            raise ValueError(
                f"Pool: got {threads=} {retries=} {group_retries=} {min_scored=} {call_deadline_s=} {watchdog_s=}; "
                "want at least one thread, one scored member, no negative budget and positive seconds"
            )
        self._engine, self.make_env, self._codec, self.calls = engine, make_env, codec, calls
        self._seed, self._sampling = seed, sampling
        self._call_deadline_s, self._watchdog_s = call_deadline_s, watchdog_s
        self._retries, self._group_retries, self._min_scored = retries, group_retries, min_scored
        self._failures_in_row = failures_in_row
        self._episode, self._limits = episode, limits

        self._most_in_flight, self._in_flight = threads, 0  # episodes
        guard = (
            threading.RLock()
        )  # of all below. Who waits for a group is not woken for a job, nor every thread for one
        self._lock, self._work_there = threading.Condition(guard), threading.Condition(guard)
        self._jobs: deque[tuple[_Open, int]] = deque()
        self._groups: set[_Open] = set()
        self._results: deque[Group] = deque()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._left: EngineClosed | None = None  # why it has no engine any more
        self._progress_s = time.monotonic()
        self._failed_in_row = 0
        self._counts = dict.fromkeys(
            ["groups_submitted", "groups_done", "groups_dropped", "groups_cancelled", *_EPISODE_COUNTS], 0
        )
        self._slots: list[_Slot] = []
        self._lost: list[_Slot] = []
        with self._lock:
            for index in range(threads):
                self._start_slot(index)
        self._supervisor = threading.Thread(target=self._supervise, name="pool-supervisor", daemon=True)
        self._supervisor.start()

    # Callers

    def submit_group(self, ticket: int, task: Task, size: int) -> None:
        """Queue `size` episodes of `task`, to train on.

        Member m samples with `request_key(seed, ticket, m)`. Errors: ValueError for sampling or a constraint of which
        the learner knows nothing; PoolClosed after `close`; PoolError when the pool has failed.
        """
        if self._sampling.greedy or self._sampling.truncated:
            raise ValueError(
                f"group {ticket}: got {self._sampling}, want temperature alone: the learner's logp is that of the full "
                "softmax; top_k, top_p, min_p and greedy are for evaluation (run_many)"
            )
        if self._limits.get("constraint") is not None:
            raise ValueError(
                f"group {ticket}: got a constraint, want none: the learner's logp is of the full softmax, not of "
                "what is allowed; constrained episodes are for evaluation (run_many)"
            )
        self._submit(ticket, task, size, self._sampling, self._seed, self._results)

    def next_group(self, timeout_s: float | None = None) -> Group:
        """The next finished group, in order of completion; after `close`, those that had finished before.

        Errors: TimeoutError after `timeout_s`; PoolClosed after `close`; PoolError, with its cause, when the pool has
        failed or when nothing was submitted that could still finish.
        """
        return self._take(self._results, timeout_s)

    def run_many(
        self,
        tasks: Sequence[Task],
        *,
        samples: int = 1,
        sampling: Sampling | None = None,
        seed: int | None = None,
        first_ticket: int = 0,
        ticket_step: int = 1,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> list[Group]:
        """Play each task `samples` times, in the order of `tasks`: for evaluation. Its groups never mix with
        `next_group`'s.

        Task i has ticket `first_ticket + i · ticket_step` under `seed` (the pool's own by default). `on_group` is
        called at each completion.
        Errors: as `next_group`.
        """
        inbox: deque[Group] = deque()
        for i, task in enumerate(tasks):
            self._submit(
                first_ticket + i * ticket_step,
                task,
                samples,
                sampling or self._sampling,
                self._seed if seed is None else seed,
                inbox,
            )
        groups: dict[int, Group] = {}
        for _ in tasks:
            group = self._take(inbox, None)
            groups[group.ticket] = group
            on_group(group)
        return [groups[ticket] for ticket in sorted(groups)]

    def stats(self) -> dict[str, int]:
        """Counts since the start (groups, episodes, errors, retries, lost threads) and the state now."""
        with self._lock:
            waiting = len(self._results)
            threads = sum(s.thread is not None and s.thread.is_alive() for s in self._slots)
            hung = sum(s.thread is not None and s.thread.is_alive() for s in self._lost)
            return {
                **self._counts,
                "groups_open": len(self._groups),
                "groups_waiting": waiting,
                "in_flight": self._in_flight,
                "world_calls": sum(slot.calls for slot in self._slots + self._lost),
                "world_s": sum(slot.call_s for slot in self._slots + self._lost),
                "live_threads": threads,
                "hung_threads": hung,
            }

    def limit_in_flight(self, most: int) -> None:
        """From now on no episode begins where `most` are in flight; those that are go on."""
        with self._lock:
            self._most_in_flight = most
            self._work_there.notify_all()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Cancel what runs, wake whoever waits, join every thread; idempotent. True when no thread but a hung one is
        left.

        The engine is not the pool's and stays open, with no session of this pool.
        """
        until = time.monotonic() + timeout_s
        self._stop.set()
        if self.calls is not None:
            self.calls.refuse(self._slots)
        with self._lock:
            sessions = [s.session for s in self._slots + self._lost if s.session is not None]
            self._jobs.clear()
            self._lock.notify_all()
            self._work_there.notify_all()
        for session in sessions:
            session.close()  # wakes a thread that waits for tokens
        for slot in list(self._slots):
            slot.thread.join(max(0.0, until - time.monotonic()))
        self._supervisor.join(max(0.1, until - time.monotonic()))
        with self._lock:
            for slot in [s for s in self._slots if s.thread.is_alive()]:
                self._lose(slot)  # still inside a world's call: nothing can interrupt it
            for group in list(self._groups):
                for member in [m for m, t in group.ended.items() if t is None]:
                    self._end(group, member, _empty(group, member, Status.CANCELLED, "the pool was closed"))
            return not self._supervisor.is_alive()

    # The table of groups (all under the lock)

    def _submit(self, ticket, task, size, sampling, seed, inbox) -> None:
        if size < 1:
            raise ValueError(f"group {ticket}: got size {size}, want at least 1")
        with self._lock:
            self._raise_if_ended()
            group = _Open(ticket, task, sampling, seed, inbox, dict.fromkeys(range(size)), [0] * size)
            if not self._groups:
                self._progress_s = time.monotonic()  # an idle pool is not a stuck one
            self._groups.add(group)
            self._counts["groups_submitted"] += 1
            self._jobs.extend((group, member) for member in range(size))
            self._work_there.notify(size)

    def _take(self, inbox: deque, timeout_s: float | None) -> Group:
        with self._lock:
            if not inbox and not self._groups and not self._ended():
                raise PoolError(
                    "next_group: no group is open and none is waiting, so none can come; call submit_group first"
                )
            if not self._lock.wait_for(lambda: inbox or self._ended(), timeout_s):
                raise TimeoutError(f"next_group: none of {len(self._groups)} open groups finished in {timeout_s} s")
            if self._failure is not None or not inbox:
                self._raise_if_ended()
            return inbox.popleft()

    def _ended(self) -> bool:
        return self._failure is not None or self._stop.is_set()

    def _raise_if_ended(self) -> None:
        if self._failure is not None:
            raise PoolError(
                f"the rollout pool has failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        if self._left is not None:
            raise PoolClosed(f"the rollout pool has ended: {self._left}, and a new Pool") from self._left
        if self._stop.is_set():
            raise PoolClosed("the rollout pool is closed; make a new Pool")

    def _end(self, group: _Open, member: int, trajectory: Trajectory) -> None:
        """One attempt of a member is over: retry it, or record it and, with the last one, deliver the group."""
        if group.ended[member] is not None:
            return
        self._progress_s = time.monotonic()
        self._counts["episodes"] += 1
        if trajectory.status is Status.ENV_ERROR:
            self._counts["env_errors"] += 1
            self._failed_in_row += 1
            if self._failed_in_row >= self._failures_in_row and self._failure is None:
                note = trajectory.facts.get("error", "no note")
                self._fail(EnvError(f"{self._failed_in_row} episodes in a row ended as ENV_ERROR; the last: {note}"))
            group.attempts[member] += 1
            if group.attempts[member] <= self._retries and group.retries < self._group_retries and not self._ended():
                group.retries += 1
                self._counts["retries"] += 1
                self._jobs.appendleft((group, member))  # first in line: the rest of its group waits for it
                self._work_there.notify()
                return
        elif trajectory.status.scored:
            self._failed_in_row = 0
        group.ended[member] = trajectory
        if all(t is not None for t in group.ended.values()):
            self._deliver(group)

    def _deliver(self, group: _Open) -> None:
        self._groups.discard(group)
        trajectories = tuple(group.ended.values())
        cancelled = any(t.status is Status.CANCELLED for t in trajectories)
        dropped = sum(t.status.scored for t in trajectories) < min(self._min_scored, len(trajectories))
        self._counts["groups_cancelled" if cancelled else "groups_dropped" if dropped else "groups_done"] += 1
        if not (cancelled and self._stop.is_set()):  # nobody waits for what close() cut: it is only counted
            group.inbox.append(Group(group.ticket, group.task, trajectories, dropped or cancelled, group.retries))
        self._lock.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            logging.error("rollout pool: %s: %s", type(error).__name__, error)
        self._jobs.clear()
        self._lock.notify_all()
        self._work_there.notify_all()

    # Environment threads

    def _start_slot(self, index: int) -> None:
        slot = _Slot(index)
        slot.thread = threading.Thread(target=self._work, args=(slot,), name=f"env-{index}", daemon=True)
        self._slots.append(slot)
        slot.thread.start()

    def _work(self, slot: _Slot) -> None:
        try:
            while True:
                with self._lock:
                    self._work_there.wait_for(
                        lambda: self._ended() or slot.lost or (self._jobs and self._in_flight < self._most_in_flight)
                    )
                    if self._ended() or slot.lost:
                        return
                    slot.job = self._jobs.popleft()
                    self._in_flight += 1
                group, member = slot.job
                trajectory = self._play(slot, group, member)
                with self._lock:
                    if slot.lost:  # its member was ended by the supervisor, and another thread has its place
                        return
                    slot.job = None
                    self._in_flight -= 1
                    self._end(group, member, trajectory)
        except EngineClosed as closed:  # its owner drains or closes it: no fault, but nothing can be played any more
            with self._lock:
                if not self._ended():
                    self._left = closed
                    logging.info("rollout pool: %s", closed)
                self._stop.set()
                self._jobs.clear()
                self._lock.notify_all()
                self._work_there.notify_all()
        except BaseException as error:  # a fault of the program: whoever waits must hear of it
            with self._lock:
                if not slot.lost and not self._stop.is_set():
                    self._fail(error)
        finally:
            self._discard(slot)

    def _play(self, slot: _Slot, group: _Open, member: int) -> Trajectory:
        """One attempt of one episode. The world is kept for the next one only when this one ended well."""
        try:
            if slot.env is None:
                slot.env = WatchedEnv(slot, self.make_env, self.calls)
        except EnvError as error:
            return _empty(group, member, Status.ENV_ERROR, repr(error))
        session = self._open(slot, group, member)
        if session is None:
            return _empty(group, member, Status.CANCELLED, "the pool was closed")
        try:
            limits = {**self._limits, "call_deadline_s": self._call_deadline_s}
            trajectory = self._episode(
                slot.env, group.task, self._codec, session, ticket=group.ticket, member=member, **limits
            )
        except EnvError as error:
            trajectory = _empty(group, member, Status.ENV_ERROR, repr(error))
        finally:
            session.close()
            slot.session = None
        if not isinstance(trajectory, Trajectory):
            raise TypeError(
                f"episode of task {group.task.task_id!r}: got {type(trajectory).__name__}, want a Trajectory"
            )
        if trajectory.status is Status.ENV_ERROR:
            self._discard(slot)  # whatever broke may have left it half-way
        return trajectory

    def _discard(self, slot: _Slot) -> None:
        env, slot.env = slot.env, None
        if env is not None:
            env.discard()

    def _open(self, slot: _Slot, group: _Open, member: int):
        key = request_key(group.seed, group.ticket, member)
        while not self._ended() and not slot.lost:
            try:
                session = self._engine.open(key, group.sampling, timeout_s=0.5)  # bounded, so that close() is noticed
            except TimeoutError:
                continue
            except EngineBusy:
                self._stop.wait(0.05)
                continue
            except EngineClosed:
                if self._ended():
                    return None
                raise
            with self._lock:
                slot.session = session
                late = self._ended() or slot.lost  # whoever ended them may have looked for sessions just before
            if not late:
                return session
            session.close()
        return None

    # The supervisor

    def _supervise(self) -> None:
        """Replace threads whose world hangs; notice when nothing moves any more."""
        try:
            while not self._stop.is_set():
                self._stop.wait(self._inspect())
        except BaseException as error:
            with self._lock:
                self._fail(error)

    def _inspect(self) -> float:
        """Look at every running call once; the seconds until the next look."""
        with self._lock:
            now = time.monotonic()
            # The environment threads write `call_since` without the lock: one read, one truth.
            running = [(slot, now - since) for slot in self._slots if (since := slot.call_since) is not None]
            hung = [(slot, seconds) for slot, seconds in running if seconds > self._call_deadline_s]
            sessions = [self._replace(slot, seconds) for slot, seconds in hung]
            if self._groups and self._failure is None and now - self._progress_s > self._watchdog_s:
                engine = self._engine.stats()
                self._fail(
                    PoolError(
                        f"no episode ended in {self._watchdog_s} s, {len(self._groups)} groups open; engine: {engine}"
                    )
                )
            # A call that begins later has a later deadline: the earliest of those running now is the next to look at.
            due = [since + self._call_deadline_s for s in self._slots if (since := s.call_since) is not None]
            pause = min([*due, now + self._call_deadline_s, now + self._watchdog_s]) - now
        for session in sessions:
            if session is not None:
                session.close()
        return max(pause, 0.0) + 0.01

    def _replace(self, slot: _Slot, seconds: float):
        job, session = slot.job, slot.session
        self._lose(slot)
        logging.warning("env-%d: a world call hangs for %.1f s; its thread is replaced", slot.index, seconds)
        if not self._ended():
            self._start_slot(slot.index)
        if job is not None:
            note = f"the world's call ran {seconds:.1f} s, deadline {self._call_deadline_s} s"
            self._end(*job, _empty(*job, Status.ENV_ERROR, note))
        return session

    def _lose(self, slot: _Slot) -> None:
        slot.lost = True
        self._in_flight -= slot.job is not None
        if self.calls is not None:
            self.calls.refuse([slot])  # a call that never ends holds nobody up
        self._slots.remove(slot)
        self._lost.append(slot)
        self._counts["lost_threads"] += 1


def _empty(group: _Open, member: int, status: Status, note: str) -> Trajectory:
    return Trajectory(group.task.task_id, group.ticket, member, status, (), {"success": False, "error": note}, {})
