"""The engine: one thread that owns the sampling device and decodes for many sessions at once.

R *residents* are sessions whose KV stays in a cache row while their world thinks; S *lanes* are the places of one
decode round. A turn costs its new tokens only: they are prefilled in chunks, then decoded a round of tokens at a time.
Sessions beyond R lend rows to each other (rl/rollout/residents.py), and a group's prompt is computed once.

Same request, same tokens in any batch mix: a token's randomness is fold_in(session key, position), every program has
one fixed number of rows, and the attention width under which a token is computed is a function of its position alone.
KV that is computed again (after an eviction, an interruption or an update) is the same to float noise only.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt32

from models.config import ModelConfig
from models.constraint import Constraint
from models.sampling import Sampling
from rl.rollout.admission import Admission, Ticket
from rl.rollout.commands import Commands
from rl.rollout.device import END_IDS, Shapes
from rl.rollout.keys import fold_in, key_data, request_key  # noqa: F401  (request_key is part of this face)
from rl.rollout.residents import Residents
from rl.rollout.rounds import Rounds
from rl.rollout.schedule import Plan, next_plan
from rl.rollout.session import CapacityError, EngineClosed, EngineError, Request, Session
from rl.rollout.stops import StopIds
from rl.rollout.turns import check_asked, check_constraint
from rl.rollout.weights import Snapshot, snapshot
from rl.timeline import Recorder, unrecorded
from rl.types import Turn

ASKING_S = 0.002  # how long it is waited for one more session to ask, where some were answered or asked just now


class Engine:
    """Continuous batching over a fixed set of compiled shapes.

    `view` maps ids to text, for stop strings. `contexts` are the attention widths that are compiled, rising to
    `capacity`. A prefill batch has `prefill_rows` rows of `prefill_chunk` tokens, a decode round up to `round_tokens`
    tokens for each of `lanes`. At most `sessions` (default: as many as `residents`) are open, and at most `waiting`
    callers (default: 8 a session) wait for one.
    `kv_on_update`: at a weight update live KV is computed again ("recompute": every logp is that of its version alone)
    or kept ("keep": cheaper; the logp of later tokens mixes versions). With a `mesh` (1, 1, tensor) heads, mlp and
    vocabulary are split over its devices; without one the policy lies whole on the first device of the process. `span`
    records what the thread does when (rl/timeline.py): idle, prefill, decode (rounds begun and read: whatever the
    device had to do is waited for there).
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        *,
        version: int,
        lanes: int,
        residents: int,
        capacity: int,
        view: Callable[[list[int]], str],
        end_ids: Sequence[int],
        round_tokens: int = 8,
        prefill_rows: int = 16,
        prefill_chunk: int = 64,
        contexts: Sequence[int] = (),
        sessions: int | None = None,
        waiting: int | None = None,
        kv_on_update: str = "recompute",
        mesh: Mesh | None = None,
        span: Recorder = unrecorded,
    ):
        shapes = Shapes(
            lanes, residents, capacity, round_tokens, prefill_rows, prefill_chunk, tuple(contexts) or (capacity,)
        )
        sessions = residents if sessions is None else sessions
        if sessions < residents:
            raise ValueError(f"Engine: got {sessions=}, want at least {residents=}")
        if kv_on_update not in ("recompute", "keep"):
            raise ValueError(f"Engine: got {kv_on_update=}, want recompute or keep")
        self.config, self.shapes, self.sessions, self.kv_on_update = config, shapes, sessions, kv_on_update
        self.capacity = capacity  # most ids of a session

        self._lock = threading.RLock()  # guards all below; the thread computes outside it
        self._work = threading.Condition(self._lock)  # the engine thread waits here
        waiting = 8 * sessions if waiting is None else waiting
        self.admission = Admission(sessions, waiting, lock=self._lock, ended=self._ended)
        self._mesh = mesh
        self._snapshot: Snapshot = snapshot(params, version, config, mesh)
        self._next: Snapshot | None = None
        self._requests: dict[Request, None] = {}  # in order of arrival
        self._commands = Commands(lock=self._lock, wake=self._work.notify, ended=self._ended)
        self._sessions: set[Session] = set()
        self._residents = Residents(residents)
        self._end_ids = tuple(sorted(set(end_ids)))
        self._stop_ids = StopIds(view, config.vocab_size, most=END_IDS)
        self._failure: BaseException | None = None
        self._closing = False
        self._span = span
        self._idle_since: float | None = None  # when the thread began to wait for work
        self._answered = 0  # turns that ended since work was last looked for: their worlds may ask again at once
        self._counts: dict[str, float] = dict.fromkeys(
            "prefills rounds swaps copies turns tokens_sampled tokens_kept tokens_prefilled tokens_copied lanes_used "
            "crowded_rounds crowded_lanes_used prefill_s decode_s idle_s publishes publish_to_token_s".split(),
            0,
        )
        self._rounds = Rounds(
            config, shapes, mesh,
            lock=self._lock, counts=self._counts, view=view, end_ids=self._end_ids, finish=self._finish, span=span,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Callers

    def open(self, key: UInt32[np.ndarray, "2"], sampling: Sampling, *, timeout_s: float | None = None) -> Session:
        """A new, empty session; blocks, first come first served, while `sessions` are open.

        Errors: EngineBusy at once where `waiting` callers wait already; TimeoutError after `timeout_s`; EngineClosed;
        EngineError.
        """
        keys = [key_data(key)]
        return self.admit(self.admission.join(1), keys, sampling, timeout_s)[0]

    def admit(
        self, ticket: Ticket, keys: Sequence[UInt32[np.ndarray, "2"]], sampling: Sampling, timeout_s: float | None
    ) -> list[Session]:
        """A session for each key, for whoever has joined the queue of `admission` for so many. Errors: as `open`."""
        with self._lock:
            self.admission.wait(ticket, timeout_s)
            sessions = [Session(self, key, sampling, int(self._counts["turns"])) for key in keys]
            self._sessions.update(sessions)
            return sessions

    def publish(self, params: Any, version: int) -> None:
        """Serve a copy of `params` from the next round on; returns at once. The caller may donate `params` afterwards.
        Only a round planned before this returned can still sample by the version before.

        Turns in flight go on; each token carries its version.
        Errors: ValueError for a version that does not rise; EngineClosed; EngineError.
        """
        fresh = snapshot(params, version, self.config, self._mesh)
        with self._lock:
            self._raise_if_ended()
            now = (self._next or self._snapshot).version
            if version <= now:
                raise ValueError(
                    f"publish: got version {version}, want more than {now}, the newest; a version names one set of "
                    "weights"
                )
            self._next = fresh
            self._rounds.time_until_read(version)
            self._work.notify()

    def warm_up(self, *, truncated: bool = True, constraints: Sequence[Constraint] = ()) -> float:
        """Compile by running on no rows; the seconds it took. Afterwards nothing compiles but what was left out: rounds
        of truncated sessions, where told so, and of constraints of another size than those given (their states, at
        least 8, rounded up to a power of two).

        Errors: ValueError for a constraint of another vocabulary; EngineClosed; EngineError.
        """
        for constraint in constraints:
            check_constraint(constraint, self.config.vocab_size, self._end_ids)
        began = time.monotonic()
        self._commands.run(lambda: self._rounds.compile(self._snapshot.params, truncated, constraints))
        return time.monotonic() - began

    def stats(self) -> dict[str, float]:
        """State now (`version sessions requests busy_lanes free_rows waiting_opens kv_kept`), counts since the start.
        `idle_s`: seconds in which nobody asked for anything.

        `publish_to_token_s`: from a publish to the first token of its weights, summed over the `publishes` that have
        been sampled by.
        """
        with self._lock:
            places = self.shapes.lanes * self._counts["rounds"]
            waited_s = 0.0 if self._idle_since is None else time.monotonic() - self._idle_since
            return {
                "version": self._snapshot.version,
                "sessions": len(self._sessions),
                "requests": len(self._requests),
                "busy_lanes": self._rounds.busy_lanes,
                "free_rows": self._residents.n_free,
                "evictions": self._residents.evictions,
                "kv_kept": float(self.kv_on_update == "keep"),
                "waiting_opens": self.admission.n_waiting,
                "lane_places": places,
                "lane_occupancy_frac": self._counts["lanes_used"] / max(1, places),
                "compiles": self._rounds.device.compiles(),
                **self._counts,
                "idle_s": self._counts["idle_s"] + waited_s,
            }

    def drain(self, timeout_s: float) -> None:
        """Let the turns in flight end and begin no others, for good: sessions' further calls are "cancelled", and
        `open` raises EngineClosed.

        Errors: TimeoutError with turns still in flight after `timeout_s`: they run on and the engine still drains, so
        drain it again to wait longer, or close it; EngineClosed; EngineError.
        """
        self.admission.drain(lambda: len(self._requests), timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Wake every caller at once ("cancelled" or EngineClosed), free all rows, and end the thread after its running
        program; idempotent.

        Errors: TimeoutError if the thread has not ended after `timeout_s`: a device program hangs.
        """
        with self._lock:
            self._closing = True
            # Here, not by the thread, which may be inside a program for long.
            for session in list(self._sessions):
                self._close_session(session)
            self._commands.drop()
            self._work.notify_all()
            self.admission.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"engine: a device program has not returned in {timeout_s} s; the thread is left behind")

    def _generate(
        self, session: Session, new_ids, max_tokens: int, stop: tuple[str, ...], deadline_s: float | None,
        constraint: Constraint | None,
    ) -> Turn:  # fmt: skip
        new = np.asarray(new_ids, np.int64).reshape(-1)
        check_asked(new, max_tokens, self.config.vocab_size)
        if constraint is not None:
            check_constraint(constraint, self.config.vocab_size, self._end_ids)
        stop_ids = self._stop_ids(stop)
        with self._lock:
            self._raise_if_failed()
            if session.closed or self._closing or self.admission.draining:
                return Turn([], [], [], "cancelled")
            if session._request is not None:
                raise RuntimeError("generate: the session has a call in flight; one thread may use a session")
            before = len(session._ids)
            first = before + len(new)
            if first == 0:
                raise ValueError("generate: got no ids for an empty session, want at least one to sample after")
            if first >= self.capacity:
                raise CapacityError(
                    f"{first} ids leave no room for a token in capacity={self.capacity}; shorten the prompt or "
                    "raise capacity"
                )
            session._ids.extend(new.tolist())
            ends = (self._end_ids + stop_ids)[:END_IDS]
            prompt = () if before else tuple(session._ids[:-1])
            request = Request(session, first, max_tokens, stop, ends, prompt, constraint)
            session._request = request
            self._requests[request] = None
            self._answered = max(0, self._answered - 1)
            self._work.notify()
        request.done.wait(deadline_s)
        with self._lock:
            self._interrupt(request, "time")  # unless it is done
            self._raise_if_failed()
            ids = session._ids[first : first + len(request.logp)]
            return Turn(ids, request.logp, request.version, request.reason, tuple(request.forced))

    def _cancel(self, session: Session) -> None:
        with self._lock:
            if session._request is not None:
                self._interrupt(session._request, "cancelled")

    def _interrupt(self, request: Request, reason: str) -> None:
        """End a turn between two rounds; what a running program still samples for it is not read."""
        if request.reason is not None:
            return
        session = request.session
        # That program may write beyond the ids that are kept: with a key shift also over the last key.
        session._cached = 0 if self.config.key_shift else min(session._cached, len(session._ids) - 1)
        self._finish(request, reason)

    def _fork(self, parent: Session, n: int, keys, timeout_s: float | None) -> list[Session]:
        if keys is None:
            keys = [fold_in(parent.key, 2**31 + i) for i in range(n)]
        if len(keys) != n:
            raise ValueError(f"fork: got {len(keys)} keys, want {n}")
        keys = [key_data(k) for k in keys]
        children = self.admit(self.admission.join(n), keys, parent.sampling, timeout_s)

        def copy() -> None:
            with self._lock:
                for child in children:
                    child._ids = list(parent._ids)
                source, cached = parent.row, parent._cached
                if source is None or not cached:
                    return
                seated = [child for child in children if self._residents.lend(child)]
                # The parent's own row may have been lent to one of them, which then has nothing to copy.
                seated = [child for child in seated if child.row != source]
            self._rounds.copy(source, seated, cached)

        self._commands.run(copy)
        return children

    def _restart(self, session: Session, turn: int) -> None:
        if not 1 <= turn < 2**30:
            raise ValueError(f"restart: got {turn=}, want 1 <= turn < 2**30: the first row begins at turn 0")
        with self._lock:
            if session._request is not None:
                raise RuntimeError("restart: the session has a call in flight; one thread may use a session")
            session.key = fold_in(session._first_key, 2**30 + turn)
            session._ids = []
            self._residents.release(session)

    def _close_session(self, session: Session) -> None:
        with self._lock:
            if session.closed:
                return
            session.closed = True
            if session._request is not None:
                self._finish(session._request, "cancelled")
            self._sessions.discard(session)
            self._residents.release(session)
            self.admission.leave(1)

    def _ended(self) -> Exception | None:
        if self._failure is None:
            return EngineClosed("the engine is closed; make a new Engine") if self._closing else None
        error = EngineError(f"the engine thread died: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._ended()

    def _raise_if_ended(self) -> None:
        if (error := self._ended()) is not None:
            raise error

    def _finish(self, request: Request, reason: str) -> None:
        self._requests.pop(request, None)
        self._counts["turns"] += 1
        request.session._request = None
        request.session._used = int(self._counts["turns"])
        request.reason = reason
        request.done.set()
        self._answered += reason in ("stop", "length")
        if self.admission.draining:
            self.admission.wake()

    # The engine thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._await_work()
                    if self._closing:
                        break
                    urgent = self._next is not None or bool(self._commands)
                if urgent:
                    self._rounds.read()  # new weights and copies find every session as it is
                if self._rounds.unread is None:
                    self._commands.obey()
                with self._lock:
                    if self._next is not None and self._rounds.unread is not None:
                        continue
                    self._swap()  # where the plan is made: what is planned after publish() returned has its weights
                    self._residents.seat(self._requests)
                    copies, waiting = self._residents.share(self._requests, newest_only=self.config.key_shift)
                for copy in copies:
                    self._rounds.copy(copy.source, copy.targets, copy.n_tokens)
                with self._lock:
                    if self._next is not None:
                        continue
                    plan = self._plan(waiting)
                # A round is read when the next program has begun: the device does not wait for what the host makes
                # of its tokens.
                if plan is None:
                    self._rounds.read()
                elif plan.kind == "prefill":
                    self._rounds.prefill(plan, self._snapshot)
                    self._rounds.read()
                else:
                    self._rounds.decode(plan, self._snapshot)
        except BaseException as error:  # every caller hears of it, now and later
            self._failure = error
            logging.exception("engine thread died")
        finally:
            self._end()

    def _await_work(self) -> None:
        def urgent() -> bool:
            return bool(self._closing or self._next or self._commands)

        idle = not self._requests and not self._rounds.unread
        self._idle_since = time.monotonic()
        self._work.wait_for(lambda: urgent() or self._requests or self._rounds.unread)
        now = time.monotonic()
        self._counts["idle_s"] += now - self._idle_since
        self._span("idle", self._idle_since, now)
        self._idle_since = None
        # Worlds that were answered together ask together, and a program for the first costs what one for all does.
        # Where a round is not read yet, the device runs on meanwhile.
        asked, most = -1, self.shapes.lanes if len(self._sessions) > 1 else 0  # nobody waits for itself
        while (idle or self._answered) and not urgent() and asked < len(self._requests) < most:
            asked = len(self._requests)
            self._work.wait(ASKING_S)
        self._answered = 0

    def _plan(self, waiting: set[Request]) -> Plan | None:
        runnable = [r for r in self._requests if r.session.row is not None and r not in waiting]
        return next_plan([r for r in runnable if r.remaining(self.capacity) > 0], self.shapes)

    def _end(self) -> None:
        with self._lock:
            for session in list(self._sessions):
                self._close_session(session)
            self._commands.drop()
            self._rounds.busy_lanes = 0
            self._rounds.device.free()
            self.admission.wake()

    def _swap(self) -> None:
        if self._next is None:
            return
        self._snapshot, self._next = self._next, None
        self._residents.forget_prompts()
        if self.kv_on_update == "recompute":
            for session in self._sessions:
                session._cached = 0
        self._counts["swaps"] += 1
