"""The engine: one thread that owns the sampling device and decodes for many sessions at once.

R *residents* are sessions whose KV stays in a cache row while their world thinks; S *lanes* are the places of one
decode round. A turn costs its new tokens only: they are prefilled in chunks, then decoded a round of tokens at a time.

Same request, same tokens in any batch mix: a token's randomness is fold_in(session key, position), every program has
one fixed number of rows, and the attention width under which a token is computed is a function of its position alone.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32

from models.config import ModelConfig
from models.constraint import Constraint
from models.sampling import Sampling
from rl.rollout.device import END_IDS, Device, Lanes
from rl.rollout.keys import fold_in, request_key  # noqa: F401  (request_key is part of this face)
from rl.rollout.schedule import Plan, next_plan
from rl.rollout.session import CapacityError, EngineClosed, EngineError, Request, Session, first_stop
from rl.rollout.weights import Snapshot, snapshot
from rl.types import Turn


class Engine:
    """Continuous batching over a fixed set of compiled shapes (DESIGN sections 4 and 5).

    `view` maps ids to text, for stop strings. `contexts` are the attention widths that are compiled, rising to
    `capacity`. A prefill batch has `prefill_rows` rows of `prefill_chunk` tokens, a decode round up to `round_tokens`
    tokens for each of `lanes`.
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
    ):
        self.contexts = tuple(contexts) or (capacity,)
        if not 1 <= lanes <= residents or capacity < 2 or min(round_tokens, prefill_rows, prefill_chunk) < 1:
            raise ValueError(
                f"Engine: got {lanes=} {residents=} {capacity=} {round_tokens=} {prefill_rows=} {prefill_chunk=}; "
                "want 1 <= lanes <= residents, capacity >= 2 and positive shapes"
            )
        if list(self.contexts) != sorted(set(self.contexts)) or self.contexts[-1] != capacity or self.contexts[0] < 1:
            raise ValueError(f"Engine: got contexts={self.contexts}, want rising widths that end at {capacity=}")
        self.config, self.lanes, self.residents, self.capacity = config, lanes, residents, capacity
        self._view, self._end_ids = view, tuple(sorted(set(end_ids)))
        self._round_tokens, self._prefill_rows, self._prefill_chunk = round_tokens, prefill_rows, prefill_chunk
        self._device = Device(config, residents, capacity)

        self._lock = threading.RLock()  # guards all below; the thread computes outside it
        self._work = threading.Condition(self._lock)  # the engine thread waits here
        self._rows = threading.Condition(self._lock)  # callers wait here for rows
        self._snapshot: Snapshot = snapshot(params, version)
        self._next: Snapshot | None = None
        self._requests: dict[Request, None] = {}  # in order of arrival
        self._commands: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._sessions: set[Session] = set()
        self._free = list(range(residents))[::-1]
        self._queue: deque[object] = deque()  # callers waiting for rows, first come first served
        self._stop_lock = threading.Lock()
        self._stop_ids: dict[tuple[str, ...], tuple[int, ...]] = {}  # guarded by its own lock
        self._failure: BaseException | None = None
        self._closing = False
        self._busy_lanes = 0
        self._counts: dict[str, float] = dict.fromkeys(
            "prefills rounds swaps tokens_sampled tokens_kept tokens_prefilled lanes_used prefill_s decode_s".split(), 0
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Callers

    def open(self, key: UInt32[np.ndarray, "2"], sampling: Sampling, *, timeout_s: float | None = None) -> Session:
        """A new, empty session; blocks, first come first served, while all rows are held.

        Errors: TimeoutError after `timeout_s`; EngineClosed; EngineError.
        """
        return self._admit([_key_data(key)], sampling, timeout_s)[0]

    def publish(self, params: Any, version: int) -> None:
        """Serve a copy of `params` from the next round on; returns at once. The caller may donate `params` afterwards.
        Only a round planned before this returned can still sample by the version before.

        Live KV is computed again before the session's next token, so every token's logp is that of its version alone.
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
            self._work.notify()

    def warm_up(self) -> float:
        """Compile every shape by running it on no rows; the seconds it took."""
        began = time.monotonic()
        self._on_thread(self._compile)
        return time.monotonic() - began

    def stats(self) -> dict[str, float]:
        """State now (`version sessions requests busy_lanes free_rows waiting_opens`) and counts since the start."""
        with self._lock:
            counts = dict(self._counts)
            lanes_used = counts.pop("lanes_used")
            return {
                "version": self._snapshot.version,
                "sessions": len(self._sessions),
                "requests": len(self._requests),
                "busy_lanes": self._busy_lanes,
                "free_rows": len(self._free),
                "waiting_opens": len(self._queue),
                "lane_occupancy_frac": lanes_used / max(1, self.lanes * counts["rounds"]),
                "compiles": self._device.compiles(),
                **counts,
            }

    def close(self, timeout_s: float = 30.0) -> None:
        """End the thread after its running program, wake every caller ("closed" or EngineClosed), free all rows;
        idempotent.

        Errors: TimeoutError if the thread has not ended after `timeout_s`: a device program hangs.
        """
        with self._lock:
            self._closing = True
            self._work.notify_all()
            self._rows.notify_all()
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
        stop_ids = self._ids_that_stop(stop)
        with self._lock:
            self._raise_if_failed()
            if session.closed or self._closing:
                return Turn([], [], [], "closed")
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
            request = Request(
                session, before, first, max_tokens, stop, (self._end_ids + stop_ids)[:END_IDS], constraint
            )
            session._request = request
            self._requests[request] = None
            self._work.notify()
        finished = request.done.wait(deadline_s)
        with self._lock:
            if not finished and not request.done.is_set():
                self._finish(request, "timeout")
                del session._ids[before:]
                # A program that runs now may still write to the row: with a key shift also over the last key.
                session._cached = 0 if self.config.key_shift else min(session._cached, before)
                raise TimeoutError(
                    f"generate: no complete turn in {deadline_s} s; raise deadline_s, or use fewer sessions"
                )
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

    def _ids_that_stop(self, stop: tuple[str, ...]) -> tuple[int, ...]:
        """Ids whose own text holds a stop string. With tags as single tokens nearly every turn ends at one, on the
        device; where a tag is several tokens there are none, and turns end on the host, after the round.
        """
        if not stop:
            return ()
        if any(not s for s in stop):
            raise ValueError(f"generate: got stop={stop}, want non-empty strings")
        with self._stop_lock:  # one caller looks and the others wait: a large vocabulary takes a second
            if stop not in self._stop_ids:
                texts = (self._view([i]) for i in range(self.config.vocab_size))
                self._stop_ids[stop] = tuple(i for i, text in enumerate(texts) if any(s in text for s in stop))
            return self._stop_ids[stop]

    def _admit(
        self, keys: Sequence[UInt32[np.ndarray, "2"]], sampling: Sampling, timeout_s: float | None
    ) -> list[Session]:
        if len(keys) > self.residents:
            raise ValueError(f"got {len(keys)} sessions at once, want at most {self.residents} (residents)")
        me = object()
        with self._lock:
            self._queue.append(me)
            try:
                ready = self._rows.wait_for(
                    lambda: self._ended() or (self._queue[0] is me and len(self._free) >= len(keys)), timeout_s
                )
                self._raise_if_ended()
                if not ready:
                    raise TimeoutError(
                        f"open: no {len(keys)} free rows of {self.residents} in {timeout_s} s; close sessions"
                    )
                sessions = [Session(self, self._free.pop(), key, sampling) for key in keys]
                self._sessions.update(sessions)
                return sessions
            finally:
                self._queue.remove(me)
                self._rows.notify_all()  # the next in line may fit

    def _fork(self, parent: Session, n: int, keys, timeout_s: float | None) -> list[Session]:
        if keys is None:
            keys = [fold_in(parent.key, 2**31 + i) for i in range(n)]
        if len(keys) != n:
            raise ValueError(f"fork: got {len(keys)} keys, want {n}")
        children = self._admit([_key_data(k) for k in keys], parent.sampling, timeout_s)

        def copy() -> None:
            for child in children:
                child._ids = list(parent._ids)
                if parent._cached and not parent.closed:
                    self._device.copy(parent.row, child.row)
                    child._cached = parent._cached

        self._on_thread(copy)
        return children

    def _restart(self, session: Session, turn: int) -> None:
        if not 1 <= turn < 2**30:
            raise ValueError(f"restart: got {turn=}, want 1 <= turn < 2**30: the first row begins at turn 0")
        with self._lock:
            if session._request is not None:
                raise RuntimeError("restart: the session has a call in flight; one thread may use a session")
            session.key = fold_in(session._first_key, 2**30 + turn)
            session._ids, session._cached = [], 0  # as for a row's next owner: it starts from nothing

    def _close_session(self, session: Session) -> None:
        with self._lock:
            if session.closed:
                return
            session.closed = True
            if session._request is not None:
                self._finish(session._request, "closed")
            self._sessions.discard(session)
            # At once, even in the middle of a round: programs run one after the other, and the row's next
            # owner starts from nothing.
            self._free.append(session.row)
            self._rows.notify_all()

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
        request.session._request = None
        request.reason = reason
        request.done.set()

    # The engine thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._work.wait_for(lambda: self._closing or self._next or self._commands or self._requests)
                    if self._closing:
                        break
                self._obey()
                with self._lock:
                    self._swap()  # where the plan is made: what is planned after publish() returned has its weights
                    plan = next_plan(self._requests, self.contexts, prefill_rows=self._prefill_rows, lanes=self.lanes)
                    self._busy_lanes = len(plan.requests) if plan is not None and plan.kind == "decode" else 0
                if plan is not None:
                    (self._prefill if plan.kind == "prefill" else self._decode)(plan)
        except BaseException as error:  # every caller hears of it, now and later
            self._failure = error
            logging.exception("engine thread died")
        finally:
            self._end()

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
            self._rows.notify_all()

    def _swap(self) -> None:
        if self._next is None:
            return
        self._snapshot, self._next = self._next, None
        for session in self._sessions:
            session._cached = 0
        self._counts["swaps"] += 1

    def _prefill(self, plan: Plan) -> None:
        began = time.monotonic()
        rows = np.full(self._prefill_rows, self.residents, np.int32)  # beyond the last row: nothing is written
        tokens = np.zeros((self._prefill_rows, self._prefill_chunk), np.int32)
        start, n_new = np.zeros_like(rows), np.zeros_like(rows)
        with self._lock:
            for i, request in enumerate(plan.requests):
                s = request.session
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
        began = time.monotonic()
        with self._lock:
            requests = [r for r in plan.requests if r.reason is None]  # not closed or timed out since the plan
            lanes = self._lane_arrays(requests)
        out = self._device.decode(
            self._snapshot.params,
            lanes,
            plan.end_ids,
            context=plan.context,
            n=self._round_tokens,
            truncated=plan.truncated,
            constraint=plan.constraint,
        )
        with self._lock:
            for i, request in enumerate(requests):
                if request.reason is None:
                    n = int(out.n_done[i])
                    forced = () if out.forced is None else np.flatnonzero(out.forced[i]).tolist()
                    self._take(request, out.tokens[i, :n].tolist(), out.logp[i, :n].tolist(), forced)
            self._busy_lanes = 0
            self._counts["rounds"] += 1
            self._counts["lanes_used"] += len(requests)
            self._counts["tokens_sampled"] += int(out.n_done[: len(requests)].sum())
            self._counts["decode_s"] += time.monotonic() - began

    def _lane_arrays(self, requests: Sequence[Request]) -> Lanes:
        """One lane a request, the others idle."""
        lanes = Lanes.idle(self.lanes, no_row=self.residents)
        for i, request in enumerate(requests):
            s, how = request.session, request.session.sampling
            lanes.rows[i], lanes.last[i], lanes.lengths[i], lanes.keys[i] = s.row, s._ids[-1], s._cached, s.key
            lanes.remaining[i] = min(request.max_tokens - len(request.logp), self.capacity - len(s._ids))
            lanes.temperature[i], lanes.greedy[i] = how.temperature, how.greedy
            lanes.top_k[i], lanes.top_p[i], lanes.min_p[i] = how.top_k, how.top_p, how.min_p
            if request.constraint is not None:
                lanes.state[i] = request.constraint.after(s._ids[request.first :])
        return lanes

    def _take(self, request: Request, tokens: list[int], logp: list[float], forced: Sequence[int]) -> None:
        """Add a round's tokens to the turn, up to where it ends."""
        session = request.session
        old = len(request.logp)
        n, reason = len(tokens), None
        ends = [i for i, t in enumerate(tokens) if t in self._end_ids]
        if ends:
            n, reason = ends[0] + 1, "end"
        turn = session._ids[request.first :] + tokens[:n]
        crossing = first_stop(self._view, turn, old, request.stop)
        if crossing is not None and (reason is None or crossing < old + n):
            n, reason = crossing - old, "stop"
        session._ids.extend(tokens[:n])
        session._cached += len(tokens)
        self._rewind(session, len(session._ids) - 1)
        request.logp.extend(logp[:n])
        request.forced.extend(old + i for i in forced if i < n)
        request.version.extend([self._snapshot.version] * n)
        self._counts["tokens_kept"] += n
        if reason is None and (len(request.logp) >= request.max_tokens or len(session._ids) >= self.capacity):
            reason = "length"
        if reason is not None:
            self._finish(request, reason)

    def _rewind(self, session: Session, length: int) -> None:
        """Forget cached ids from `length` on."""
        if session._cached > length:
            # The shifted key of the next id needs the raw key of the one before, and the cache has the
            # newest one's only.
            session._cached = 0 if self.config.key_shift else length

    def _compile(self) -> None:
        rows = np.full(self._prefill_rows, self.residents, np.int32)
        tokens = np.zeros((self._prefill_rows, self._prefill_chunk), np.int32)
        none = np.zeros_like(rows)
        lanes = Lanes.idle(self.lanes, no_row=self.residents)
        for context in (0, *self.contexts):
            self._device.prefill(self._snapshot.params, rows, tokens, none, none, context=context)
        for context in self.contexts:
            self._device.decode(
                self._snapshot.params, lanes, (), context=context, n=self._round_tokens, truncated=False
            )
        self._device.copy(0, 0)


def _key_data(key: Any) -> UInt32[np.ndarray, "2"]:
    """Key data of a jax key (typed or raw) or of a NumPy one."""
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    key = np.asarray(key)
    if key.shape != (2,) or key.dtype != np.uint32:
        raise ValueError(f"key: got {key.dtype}{list(key.shape)}, want uint32[2]; see request_key")
    return key
