"""Environment threads around one engine: groups in, finished groups out.

Each thread `env-i` owns one world and takes jobs from the table (rl/rollout/table.py), which says what is tried again.
A world that raises, answers garbage or hangs past its deadline is data; anything else that raises is a fault of the
program and reaches whoever waits for groups.
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.base import Env, EnvError, EnvLost, Task
from models.sampling import Sampling
from rl.rollout.concurrency import CallLimit
from rl.rollout.engine import request_key
from rl.rollout.failures import BUDGET, Budget, failure_facts
from rl.rollout.session import EngineBusy, EngineClosed
from rl.rollout.table import MIN_SCORED, Group, Job, OpenGroup, Table
from rl.rollout.watched import Watch, WatchedEnv
from rl.rollout.worker import run_episode
from rl.types import Status, Trajectory

_DID = ("tokens_kept", "tokens_prefilled")  # of an engine's counts


class PoolError(RuntimeError):
    """The pool cannot go on; the message and `__cause__` say why."""


class PoolClosed(PoolError):
    """The pool was closed, or the engine under it drained or closed, while the caller waited or before."""


@dataclasses.dataclass(eq=False)
class _Slot(Watch):
    """One environment thread and what it is doing now."""

    thread: threading.Thread | None = None
    job: Job | None = None
    session: Any = None
    env: WatchedEnv | None = None  # kept from episode to episode
    lost: bool = False


class Pool:
    """`threads` worlds playing episodes against one engine.

    `make_env` makes one world, in the thread that plays it. `episode` is `rl.rollout.worker.run_episode`, called as
    `episode(env, task, codec, session, ticket=, member=, **limits)`. A world call longer than `call_deadline_s` costs
    the world its thread. `budget` says how often a member that ended as ENV_ERROR is tried again; with fewer than
    `min_scored` scored members the group is dropped. While the infrastructure fails, pauses that double come before
    further attempts. Fatal are `failures_in_row` world errors without one scored episode between, those of the
    infrastructure among them where that has lasted `outage_s`; and `watchdog_s` in which nothing moved: no call of a
    world ran or ended, no token came, and no pause was waited for. (A call that runs may take its deadline.) `calls`
    bounds the calls of the world at once; a call that waits for its turn has not begun.
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
        budget: Budget = BUDGET,
        min_scored: int = MIN_SCORED,
        failures_in_row: int = 256,
        outage_s: float = 60.0,
        watchdog_s: float = 600.0,
        episode: Callable[..., Trajectory] = run_episode,
        calls: CallLimit | None = None,
        counts: Callable[[], Mapping[str, int]] = dict,
        **limits: Any,
    ):
        if threads < 1 or call_deadline_s <= 0 or watchdog_s <= 0:
            raise ValueError(
                f"Pool: got {threads=} {call_deadline_s=} {watchdog_s=}; want at least one thread and positive seconds"
            )
        self._engine, self.make_env, self._codec, self.calls = engine, make_env, codec, calls
        self._counts = counts  # of the places that worlds are in
        self._seed, self._sampling = seed, sampling
        self._call_deadline_s, self._watchdog_s = call_deadline_s, watchdog_s
        self._failures_in_row, self._outage_s = failures_in_row, outage_s
        self._episode, self._limits = episode, limits

        self._most_in_flight, self._in_flight = threads, 0  # episodes
        guard = threading.RLock()  # of all below
        # Who waits for a group is not woken for a job, nor every thread for one.
        self._lock, self._work_there = threading.Condition(guard), threading.Condition(guard)
        self._table = Table(budget, min_scored=min_scored)
        self._results: deque[Group] = deque()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._left: EngineClosed | None = None  # why it has no engine any more
        self._progress_s, self._moved = time.monotonic(), None  # when something moved last, and the counts of then
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
        """Counts since the start (groups, episodes, errors, retries, lost threads) and the state now; of a fleet as
        fleet_NAME.
        """
        fleet = {f"fleet_{name}": count for name, count in self._counts().items()}
        with self._lock:
            waiting = len(self._results)
            threads = sum(s.thread is not None and s.thread.is_alive() for s in self._slots)
            hung = sum(s.thread is not None and s.thread.is_alive() for s in self._lost)
            return {
                **self._table.counts,
                "lost_threads": len(self._lost),
                "groups_open": len(self._table.groups),
                "members_open": sum(t is None for group in self._table.groups for t in group.ended.values()),
                "groups_waiting": waiting,
                "in_flight": self._in_flight,
                "world_calls": self._ended_calls(),
                "world_steps": sum(slot.steps for slot in self._slots + self._lost),
                "world_step_s": sum(slot.step_s for slot in self._slots + self._lost),
                "live_threads": threads,
                "hung_threads": hung,
                **fleet,
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
        with self._lock:
            sessions = [s.session for s in self._slots + self._lost if s.session is not None]
            self._end_all()
        if self.calls is not None:
            self.calls.refuse(self._slots)
        for session in sessions:
            session.close()  # wakes a thread that waits for tokens
        for slot in list(self._slots):
            slot.thread.join(max(0.0, until - time.monotonic()))
        self._supervisor.join(max(0.1, until - time.monotonic()))
        with self._lock:
            for slot in [s for s in self._slots if s.thread.is_alive()]:
                self._lose(slot)  # still inside a world's call: nothing can interrupt it
            self._table.cancel("the pool was closed")
            return not self._supervisor.is_alive()

    # The table of groups (all under the lock)

    def _submit(self, ticket, task, size, sampling, seed, inbox) -> None:
        if size < 1:
            raise ValueError(f"group {ticket}: got size {size}, want at least 1")
        with self._lock:
            self._raise_if_ended()
            if not self._table.groups:
                self._progress_s = time.monotonic()  # an idle pool is not a stuck one
            ended, failures = dict.fromkeys(range(size)), [[] for _ in range(size)]
            self._table.add(OpenGroup(ticket, task, sampling, seed, inbox, ended, failures))
            self._work_there.notify(size)

    def _take(self, inbox: deque, timeout_s: float | None) -> Group:
        with self._lock:
            if not inbox and not self._table.groups and not self._ended():
                raise PoolError(
                    "next_group: no group is open and none is waiting, so none can come; call submit_group first"
                )
            if not self._lock.wait_for(lambda: inbox or self._ended(), timeout_s):
                raise TimeoutError(
                    f"next_group: none of {len(self._table.groups)} open groups finished in {timeout_s} s"
                )
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

    def _end(self, job: Job, trajectory: Trajectory) -> None:
        """One attempt is over."""
        now, table = time.monotonic(), self._table
        if not table.end(job, trajectory, now):
            return
        self._progress_s = now
        lasted_s = now - table.failing_since_s if table.failed_in_row else 0.0
        in_row = table.failed_in_row if lasted_s >= self._outage_s else table.data_in_row
        if in_row >= self._failures_in_row:
            note = trajectory.facts.get("error", "no note")
            self._fail(EnvError(f"{in_row} episodes in a row ended as ENV_ERROR in {lasted_s:.0f} s; the last: {note}"))
        if table.jobs:  # it may be tried again
            self._work_there.notify()
        self._lock.notify_all()

    def _end_all(self) -> None:
        """Nothing is played any more."""
        self._table.closing = True
        self._table.jobs.clear()
        self._lock.notify_all()
        self._work_there.notify_all()

    def _ended_calls(self) -> int:
        return sum(slot.calls for slot in self._slots + self._lost)

    def _may_begin(self) -> bool:
        in_pause = time.monotonic() < self._table.not_before_s
        return bool(self._table.jobs) and not in_pause and self._in_flight < self._most_in_flight

    def _await_job(self, slot: _Slot) -> Job | None:
        """The next job, counted as in flight; None: there is none any more for this thread."""
        while not (self._ended() or slot.lost or self._may_begin()):
            left_s = self._table.not_before_s - time.monotonic()
            self._work_there.wait(left_s if self._table.jobs and left_s > 0 else None)
        if self._ended() or slot.lost:
            return None
        self._in_flight += 1
        job = self._table.jobs.popleft()
        if self._may_begin():  # whoever was woken for the next one may have waited for the end of a pause
            self._work_there.notify()
        return job

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            logging.error("rollout pool: %s: %s", type(error).__name__, error)
        self._end_all()

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
                    slot.job = job = self._await_job(slot)
                    if job is None:
                        return
                trajectory = self._play(slot, job)
                with self._lock:
                    slot.job = None
                    self._in_flight -= not slot.lost  # `_lose` has counted it out
                    self._end(job, trajectory)
                    if slot.lost:  # its member was ended by the supervisor, and another thread has its place
                        return
        except EngineClosed as closed:  # its owner drains or closes it: no fault, but nothing can be played any more
            with self._lock:
                if not self._ended():
                    self._left = closed
                    logging.info("rollout pool: %s", closed)
                self._stop.set()
                self._end_all()
        except BaseException as error:  # a fault of the program: whoever waits must hear of it
            with self._lock:
                if not slot.lost and not self._stop.is_set():
                    self._fail(error)
        finally:
            self._discard(slot)

    def _play(self, slot: _Slot, job: Job) -> Trajectory:
        """One attempt of one episode. The world is kept for the next one only when this one ended well."""
        group = job.group
        if job.attempt:
            self._discard(slot)  # what fails again must do so on a fresh world
        try:
            if slot.env is None:
                slot.env = WatchedEnv(slot, self.make_env, self.calls)
        except EnvError as error:
            return job.empty(Status.ENV_ERROR, **failure_facts(error))
        session = self._open(slot, job)
        if session is None:
            return job.empty(Status.CANCELLED, error="the pool was closed")
        try:
            limits = {**self._limits, "call_deadline_s": self._call_deadline_s}
            trajectory = self._episode(
                slot.env, group.task, self._codec, session, ticket=group.ticket, member=job.member, **limits
            )
        except EnvError as error:
            trajectory = job.empty(Status.ENV_ERROR, **failure_facts(error))
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

    def _open(self, slot: _Slot, job: Job):
        group = job.group
        key = request_key(group.seed, group.ticket, job.member)
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
        engine = self._engine.stats()
        with self._lock:
            now = time.monotonic()
            # The environment threads write `call_since` without the lock: one read, one truth.
            running = [(slot, now - since) for slot in self._slots if (since := slot.call_since) is not None]
            hung = [(slot, seconds) for slot, seconds in running if seconds > self._call_deadline_s]
            sessions = [self._replace(slot, seconds) for slot, seconds in hung]
            moved = (self._ended_calls(), *(engine.get(name) for name in _DID))
            if running or moved != self._moved or now < self._table.not_before_s:
                self._progress_s, self._moved = now, moved
            if self._table.groups and self._failure is None and now - self._progress_s > self._watchdog_s:
                left = f"{len(self._table.groups)} groups open; engine: {engine}"
                self._fail(PoolError(f"no call of a world ended and no token came in {self._watchdog_s} s, {left}"))
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
            hung = EnvLost(f"the world's call ran {seconds:.1f} s, deadline {self._call_deadline_s} s")
            self._end(job, job.empty(Status.ENV_ERROR, **failure_facts(hung)))
        return session

    def _lose(self, slot: _Slot) -> None:
        slot.lost = True
        self._in_flight -= slot.job is not None
        if self.calls is not None:
            self.calls.refuse([slot])  # a call that never ends holds nobody up
        self._slots.remove(slot)
        self._lost.append(slot)
