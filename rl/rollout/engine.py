"""The engine: one thread that owns the sampling device and decodes for many sessions at once.

R *residents* are sessions whose KV stays in a cache row while their world thinks; S *lanes* are the places of one
decode round. A turn costs its new tokens only: they are prefilled in chunks, then decoded a round of tokens at a time.
Sessions beyond R lend rows to each other (rl/rollout/residents.py), and a group's prompt is computed once.

Same request, same tokens in any batch mix: a token's randomness is fold_in(session key, position), every program has
one fixed number of rows, and the attention width under which a token is computed is a function of its position alone.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt32

from models.config import ModelConfig
from models.constraint import Constraint
from models.generate import Round
from models.sampling import Sampling
from rl.rollout.device import END_IDS, Device, Lanes
from rl.rollout.keys import fold_in, key_data, request_key  # noqa: F401  (request_key is part of this face)
from rl.rollout.residents import Residents
from rl.rollout.schedule import Plan, next_plan
from rl.rollout.session import CapacityError, EngineClosed, EngineError, Request, Session
from rl.rollout.stops import StopIds
from rl.rollout.turns import lane_arrays, take
from rl.rollout.weights import Snapshot, snapshot
from rl.types import Turn


class _Unread(NamedTuple):
    """The round that runs, or that has run and is not read yet."""

    out: Round
    requests: list[Request]
    version: int


class Engine:
    """Continuous batching over a fixed set of compiled shapes (DESIGN sections 4 and 5).

    `view` maps ids to text, for stop strings. `contexts` are the attention widths that are compiled, rising to
    `capacity`. A prefill batch has `prefill_rows` rows of `prefill_chunk` tokens, a decode round up to `round_tokens`
    tokens for each of `lanes`. At most `sessions` (default: as many as `residents`) are open; further callers wait.
    `kv_on_update`: at a weight update live KV is computed again ("recompute": every logp is that of its version alone)
    or kept ("keep": cheaper; the logp of later tokens mixes versions).
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
        kv_on_update: str = "recompute",
    ):
        self.contexts = tuple(contexts) or (capacity,)
        sessions = residents if sessions is None else sessions
        if not 1 <= lanes <= residents <= sessions or min(round_tokens, prefill_rows, prefill_chunk, capacity - 1) < 1:
            raise ValueError(
                f"Engine: got {lanes=} {residents=} {sessions=} {capacity=} {round_tokens=} {prefill_rows=} "
                f"{prefill_chunk=}; want 1 <= lanes <= residents <= sessions, capacity >= 2 and positive shapes"
            )
        if kv_on_update not in ("recompute", "keep"):
            raise ValueError(f"Engine: got {kv_on_update=}, want recompute or keep")
        if list(self.contexts) != sorted(set(self.contexts)) or self.contexts[-1] != capacity or self.contexts[0] < 1:
            raise ValueError(f"Engine: got contexts={self.contexts}, want rising widths that end at {capacity=}")
        self.config, self.lanes, self.residents, self.capacity = config, lanes, residents, capacity
        self.sessions, self.kv_on_update = sessions, kv_on_update
        self._view, self._end_ids = view, tuple(sorted(set(end_ids)))
        self._round_tokens, self._prefill_rows, self._prefill_chunk = round_tokens, prefill_rows, prefill_chunk
        self._device = Device(config, residents, capacity)

        self._lock = threading.RLock()  # guards all below; the thread computes outside it
        self._work = threading.Condition(self._lock)  # the engine thread waits here
        self._places = threading.Condition(self._lock)  # callers wait here to open, and for the engine to drain
        self._snapshot: Snapshot = snapshot(params, version)
        self._next: Snapshot | None = None
        self._requests: dict[Request, None] = {}  # in order of arrival
        self._commands: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._sessions: set[Session] = set()
        self._residents = Residents(residents)
        self._queue: deque[object] = deque()  # callers waiting to open, first come first served
        self._stop_ids = StopIds(view, config.vocab_size)
        self._failure: BaseException | None = None
        self._closing = self._draining = False
        self._published_s: float | None = None  # when weights came that no token has been sampled by yet
        self._unread: _Unread | None = None  # the engine thread's own
        self._busy_lanes = 0
        self._counts: dict[str, float] = dict.fromkeys(
            "prefills rounds swaps copies turns tokens_sampled tokens_kept tokens_prefilled tokens_copied lanes_used "
            "prefill_s decode_s publish_to_token_s".split(),
            0,
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Callers

    def open(self, key: UInt32[np.ndarray, "2"], sampling: Sampling, *, timeout_s: float | None = None) -> Session:
        """A new, empty session; blocks, first come first served, while `sessions` are open.

        Errors: TimeoutError after `timeout_s`; EngineClosed; EngineError.
        """
        return self._admit([key_data(key)], sampling, timeout_s)[0]

    def publish(self, params: Any, version: int) -> None:
        """Serve a copy of `params` from the next round on; returns at once. The caller may donate `params` afterwards.
        Only a round planned before this returned can still sample by the version before.

        Turns in flight go on; each token carries its version.
        Errors: ValueError for a version that goes back; EngineClosed; EngineError.
        """
        fresh = snapshot(params, version)
        with self._lock:
            self._raise_if_ended()
            now = (self._next or self._snapshot).version
            if version < now:
                raise ValueError(
                    f"publish: got version {version}, want at least {now}, the newest; versions never go back"
                )
            self._next = fresh
            self._published_s = time.monotonic()
            self._work.notify()

    def warm_up(self) -> float:
        """Compile every shape by running it on no rows; the seconds it took."""
        began = time.monotonic()
        self._on_thread(self._compile)
        return time.monotonic() - began

    def stats(self) -> dict[str, float]:
        """State now (`version sessions requests busy_lanes free_rows waiting_opens kv_kept`), counts since the start.

        `publish_to_token_s`: from the last publish that has been sampled by to its first token.
        """
        with self._lock:
            places = self.lanes * self._counts["rounds"]
            return {
                "version": self._snapshot.version,
                "sessions": len(self._sessions),
                "requests": len(self._requests),
                "busy_lanes": self._busy_lanes,
                "free_rows": self._residents.n_free,
                "evictions": self._residents.evictions,
                "kv_kept": float(self.kv_on_update == "keep"),
                "waiting_opens": len(self._queue),
                "lane_places": places,
                "lane_occupancy_frac": self._counts["lanes_used"] / max(1, places),
                "compiles": self._device.compiles(),
                **self._counts,
            }

    def drain(self, timeout_s: float) -> None:
        """Let the turns in flight end and begin no others: sessions' further calls are "cancelled", and `open` raises.

        Errors: TimeoutError with turns still in flight after `timeout_s`; EngineClosed; EngineError.
        """
        with self._lock:
            self._raise_if_ended()
            self._draining = True
            self._places.notify_all()
            drained = self._places.wait_for(lambda: self._ended() or not self._requests, timeout_s)
            self._raise_if_failed()
            if not drained:
                raise TimeoutError(f"drain: {len(self._requests)} turns run on after {timeout_s} s; close the engine")

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after its running program, wake every caller ("cancelled" or EngineClosed), free all rows;
        idempotent.

        Errors: TimeoutError if the thread has not ended after `timeout_s`: a device program hangs.
        """
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._places.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"engine: a device program has not returned in {timeout_s} s; the thread is left behind")

    def _generate(
        self,
        session: Session,
        new_ids,
        max_tokens: int,
        stop: tuple[str, ...],
        deadline_s: float | None,
        constraint: Constraint | None,
    ) -> Turn:
        new = np.asarray(new_ids, np.int64).reshape(-1)
        if max_tokens < 1:
            raise ValueError(f"generate: got {max_tokens=}, want at least 1")
        if len(new) and not 0 <= new.min() <= new.max() < self.config.vocab_size:
            raise ValueError(
                f"generate: ids run from {new.min()} to {new.max()}, want 0 to {self.config.vocab_size - 1}"
            )
        if constraint is not None:
            self._check(constraint)
        stop_ids = self._stop_ids(stop)
        with self._lock:
            self._raise_if_failed()
            if session.closed or self._closing or self._draining:
                return Turn([], [], [], "cancelled")
            if session._request is not None:
                raise RuntimeError("generate: the session has a call in flight; one thread may use a session")
            before = len(session._ids)
            first = before + len(new)
            if first == 0:
                raise ValueError("generate: got no ids for an empty session, want at least one to sample after")
            if first >= self.capacity:
                raise CapacityError(
                    f"{first} ids leave no room for a token in {self.capacity=}; shorten the prompt or raise capacity"
                )
            session._ids.extend(new.tolist())
            ends = (self._end_ids + stop_ids)[:END_IDS]
            prompt = () if before else tuple(session._ids[:-1])
            request = Request(session, first, max_tokens, stop, ends, prompt, constraint)
            session._request = request
            self._requests[request] = None
            self._work.notify()
        request.done.wait(deadline_s)
        with self._lock:
            self._interrupt(request, "time")  # unless it is done
            self._raise_if_failed()
            ids = session._ids[first : first + len(request.logp)]
            return Turn(ids, request.logp, request.version, request.reason, tuple(request.forced))

    def _check(self, constraint: Constraint) -> None:
        ids = constraint.next_state.shape[1]
        if ids > self.config.vocab_size or not set(constraint.end_ids) <= set(self._end_ids):
            raise ValueError(
                f"generate: got a constraint of {ids} ids that ends with {constraint.end_ids}, want at most "
                f"{self.config.vocab_size} ids and ends among {self._end_ids}; make it from this engine's codec"
            )

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

    def _admit(
        self, keys: Sequence[UInt32[np.ndarray, "2"]], sampling: Sampling, timeout_s: float | None
    ) -> list[Session]:
        if len(keys) > self.sessions:
            raise ValueError(f"got {len(keys)} sessions at once, want at most {self.sessions} (sessions)")
        me = object()
        with self._lock:
            self._queue.append(me)
            try:
                ready = self._places.wait_for(
                    lambda: (
                        self._ended()
                        or self._draining
                        or (self._queue[0] is me and len(self._sessions) + len(keys) <= self.sessions)
                    ),
                    timeout_s,
                )
                self._raise_if_ended()
                if self._draining:
                    raise EngineClosed("the engine is draining; make a new Engine")
                if not ready:
                    raise TimeoutError(
                        f"open: {len(self._sessions)} of {self.sessions} sessions are open after {timeout_s} s, "
                        f"no place for {len(keys)} more; close sessions"
                    )
                sessions = [Session(self, key, sampling) for key in keys]
                self._sessions.update(sessions)
                return sessions
            finally:
                self._queue.remove(me)
                self._places.notify_all()  # the next in line may fit

    def _fork(self, parent: Session, n: int, keys, timeout_s: float | None) -> list[Session]:
        if keys is None:
            keys = [fold_in(parent.key, 2**31 + i) for i in range(n)]
        if len(keys) != n:
            raise ValueError(f"fork: got {len(keys)} keys, want {n}")
        children = self._admit([key_data(k) for k in keys], parent.sampling, timeout_s)

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
            self._copy(source, seated, cached)

        self._on_thread(copy)
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
            self._places.notify_all()

    def _on_thread(self, command: Callable[[], None]) -> None:
        done = threading.Event()
        with self._lock:
            self._raise_if_ended()
            self._commands.append((command, done))
            self._work.notify()
        done.wait()
        with self._lock:
            self._raise_if_failed()

    def _ended(self) -> bool:
        return self._closing or self._failure is not None

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(
                f"the engine thread died: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def _raise_if_ended(self) -> None:
        self._raise_if_failed()
        if self._closing:
            raise EngineClosed("the engine is closed; make a new Engine")

    def _finish(self, request: Request, reason: str) -> None:
        self._requests.pop(request, None)
        self._counts["turns"] += 1
        request.session._request = None
        request.session._used = int(self._counts["turns"])
        request.reason = reason
        request.done.set()
        if self._draining:
            self._places.notify_all()

    # The engine thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._work.wait_for(
                        lambda: self._closing or self._next or self._commands or self._requests or self._unread
                    )
                    if self._closing:
                        break
                    urgent = self._next is not None or bool(self._commands)
                if urgent:
                    self._read()  # new weights and copies find every session as it is
                if self._unread is None:
                    self._obey()
                with self._lock:
                    if self._next is not None and self._unread is not None:
                        continue
                    self._swap()  # where the plan is made: what is planned after publish() returned has its weights
                    self._residents.seat(self._requests)
                    copies, waiting = self._residents.share(self._requests, newest_only=self.config.key_shift)
                for copy in copies:
                    self._copy(copy.source, copy.targets, copy.n_tokens)
                with self._lock:
                    if self._next is not None:
                        continue
                    plan = self._plan(waiting)
                # A round is read when the next program has begun: the device does not wait for what the host makes
                # of its tokens.
                if plan is None:
                    self._read()
                elif plan.kind == "prefill":
                    self._prefill(plan)
                    self._read()
                else:
                    self._decode(plan)
        except BaseException as error:  # every caller hears of it, now and later
            self._failure = error
            logging.exception("engine thread died")
        finally:
            self._end()

    def _plan(self, waiting: set[Request]) -> Plan | None:
        runnable = [
            request
            for request in self._requests
            if request.session.row is not None and request not in waiting and request.remaining(self.capacity) > 0
        ]
        return next_plan(runnable, self.contexts, prefill_rows=self._prefill_rows, lanes=self.lanes)

    def _obey(self) -> None:
        """Run what callers queued. A command leaves the queue when it has run: one that raises, and those behind it,
        stay there for `_end`, which wakes their callers when the failure is known.
        """
        while True:
            with self._lock:
                if not self._commands:
                    return
                command, done = self._commands[0]
            command()
            with self._lock:
                self._commands.popleft()
                done.set()

    def _end(self) -> None:
        with self._lock:
            for session in list(self._sessions):
                self._close_session(session)
            for _, done in self._commands:
                done.set()
            self._commands.clear()
            self._busy_lanes = 0
            self._device.free()
            self._places.notify_all()

    def _swap(self) -> None:
        if self._next is None:
            return
        self._snapshot, self._next = self._next, None
        self._residents.forget_prompts()
        if self.kv_on_update == "recompute":
            for session in self._sessions:
                session._cached = 0
        self._counts["swaps"] += 1

    def _copy(self, source: int, targets: Sequence[Session], n_tokens: int) -> None:
        """KV of the first `n_tokens` ids from one row to those of `targets`."""
        context = next(c for c in self.contexts if c >= n_tokens)
        with self._lock:
            rows = [target.row for target in targets if target.row is not None]
        for i in range(0, len(rows), self._prefill_rows):
            self._device.copy(source, rows[i : i + self._prefill_rows], width=self._prefill_rows, context=context)
        with self._lock:
            for target in targets:
                if target.row is not None:  # else it was closed meanwhile
                    target._cached = n_tokens
            self._counts["copies"] += len(rows)
            self._counts["tokens_copied"] += len(rows) * n_tokens

    def _prefill(self, plan: Plan) -> None:
        began = time.monotonic()
        rows = np.full(self._prefill_rows, self.residents, np.int32)  # beyond the last row: nothing is written
        tokens = np.zeros((self._prefill_rows, self._prefill_chunk), np.int32)
        start, n_new = np.zeros_like(rows), np.zeros_like(rows)
        with self._lock:
            for i, request in enumerate(plan.requests):
                s = request.session
                if request.reason is not None:  # closed or interrupted since the plan
                    continue
                chunk = s._ids[s._cached : len(s._ids) - 1][: self._prefill_chunk]
                rows[i], start[i], n_new[i] = s.row, s._cached, len(chunk)
                tokens[i, : len(chunk)] = chunk
        self._device.prefill(self._snapshot.params, rows, tokens, start, n_new, context=plan.context)
        with self._lock:
            for i, request in enumerate(plan.requests):
                if request.reason is None:
                    request.session._cached += int(n_new[i])
            self._counts["prefills"] += 1
            self._counts["tokens_prefilled"] += int(n_new.sum())
            self._counts["prefill_s"] += time.monotonic() - began

    def _decode(self, plan: Plan) -> None:
        """Begin a round, then read the one before."""
        began = time.monotonic()
        with self._lock:
            requests = [r for r in plan.requests if r.reason is None]  # not closed or interrupted since the plan
            lanes = lane_arrays(requests, self.lanes, no_row=self.residents, capacity=self.capacity)
        out = self._device.decode(
            self._snapshot.params,
            lanes,
            plan.end_ids,
            context=plan.context,
            n=self._round_tokens,
            truncated=plan.truncated,
            constraint=plan.constraint,
        )
        self._counts["decode_s"] += time.monotonic() - began
        self._read()
        with self._lock:
            for lane, request in enumerate(requests):
                request.lane, request.unread = lane, self._round_tokens
            self._busy_lanes = len(requests)
        self._unread = _Unread(out, requests, self._snapshot.version)

    def _read(self) -> None:
        """Add the tokens of the round that is not read yet to their turns; waits for them."""
        if self._unread is None:
            return
        began = time.monotonic()
        unread, self._unread = self._unread, None
        out = self._device.read(unread.out)
        with self._lock:
            for lane, request in enumerate(unread.requests):
                request.unread = 0
                if request.reason is None:
                    self._take(request, out, lane, unread.version)
            self._busy_lanes = 0
            self._counts["rounds"] += 1
            self._counts["lanes_used"] += int(np.count_nonzero(out.n_done))
            self._counts["tokens_sampled"] += int(out.n_done.sum())
            now = time.monotonic()
            self._counts["decode_s"] += now - began
            if self._published_s is not None and unread.version == (self._next or self._snapshot).version:
                self._counts["publish_to_token_s"], self._published_s = now - self._published_s, None

    def _take(self, request: Request, out: Round, lane: int, version: int) -> None:
        session = request.session
        kept, reason = take(request, out, lane, version, view=self._view, end_ids=self._end_ids, capacity=self.capacity)
        session._cached += int(out.n_done[lane])
        self._counts["tokens_kept"] += kept
        # Ids beyond a stop string that the host alone sees are forgotten. The shifted key of the next id needs the raw
        # key of the one before, and the cache has the newest one's only: that of a round which runs on, maybe.
        runs_on = reason is not None and bool(out.alive[lane])
        if session._cached > len(session._ids) - 1 or runs_on:
            session._cached = 0 if self.config.key_shift else min(session._cached, len(session._ids) - 1)
        if reason is not None:
            self._finish(request, reason)

    def _compile(self) -> None:
        rows = np.full(self._prefill_rows, self.residents, np.int32)
        tokens = np.zeros((self._prefill_rows, self._prefill_chunk), np.int32)
        none = np.zeros_like(rows)
        lanes = Lanes.idle(self.lanes, no_row=self.residents)
        for context in (0, *self.contexts):
            self._device.prefill(self._snapshot.params, rows, tokens, none, none, context=context)
        for context in self.contexts:
            self._device.copy(0, [], width=self._prefill_rows, context=context)
            self._device.decode(
                self._snapshot.params, lanes, (), context=context, n=self._round_tokens, truncated=False
            )
