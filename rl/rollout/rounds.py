"""The programs that the engine's thread begins, and what they do to sessions.

A round is read one late: the next program has begun by then, so the device does not wait for what the host makes of its
tokens.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from models.config import ModelConfig
from models.constraint import Constraint
from models.generate import Round
from rl.rollout.device import Device, Lanes, Shapes
from rl.rollout.schedule import Plan
from rl.rollout.session import Request, Session
from rl.rollout.turns import lane_arrays, take
from rl.rollout.weights import Snapshot
from rl.timeline import Recorder, unrecorded


class _Unread(NamedTuple):
    """The round that runs, or that has run and is not read yet."""

    out: Round
    requests: list[Request]
    version: int
    crowded: bool


class Rounds:
    """The device's programs, begun by one thread. `lock` guards the sessions and `counts`; `finish` ends a request."""

    def __init__(
        self,
        config: ModelConfig,
        shapes: Shapes,
        mesh: Mesh | None,
        *,
        lock: threading.RLock,
        counts: dict[str, float],
        view: Callable[[list[int]], str],
        end_ids: Sequence[int],
        finish: Callable[[Request, str], None],
        span: Recorder = unrecorded,
    ):
        self.device = Device(config, shapes.residents, shapes.capacity, mesh)
        self.unread: _Unread | None = None
        self.busy_lanes = 0
        self._timed: tuple[int, float] | None = None  # a version by which no token was read yet, since when
        self._shapes, self._key_shift = shapes, config.key_shift
        self._lock, self._counts, self._finish = lock, counts, finish
        self._view, self._end_ids, self._span = view, end_ids, span

    def copy(self, source: int, targets: Sequence[Session], n_tokens: int) -> None:
        """KV of the first `n_tokens` ids from one row to those of `targets`."""
        context = next(c for c in self._shapes.contexts if c >= n_tokens)
        with self._lock:
            rows = [target.row for target in targets if target.row is not None]
        for i in range(0, len(rows), self._shapes.prefill_rows):
            some = rows[i : i + self._shapes.prefill_rows]
            self.device.copy(source, some, width=self._shapes.prefill_rows, context=context)
        with self._lock:
            for target in targets:
                if target.row is not None:  # else it was closed meanwhile
                    target._cached = n_tokens
            self._counts["copies"] += len(rows)
            self._counts["tokens_copied"] += len(rows) * n_tokens

    def prefill(self, plan: Plan, weights: Snapshot) -> None:
        """Begin the next chunk of each request's ids."""
        began, shapes = time.monotonic(), self._shapes
        rows = np.full(shapes.prefill_rows, shapes.residents, np.int32)  # beyond the last row: nothing is written
        tokens = np.zeros((shapes.prefill_rows, shapes.prefill_chunk), np.int32)
        start, n_new = np.zeros_like(rows), np.zeros_like(rows)
        with self._lock:
            for i, request in enumerate(plan.requests):
                s = request.session
                if request.reason is not None:  # closed or interrupted since the plan
                    continue
                chunk = s._ids[s._cached : len(s._ids) - 1][: self._shapes.prefill_chunk]
                rows[i], start[i], n_new[i] = s.row, s._cached, len(chunk)
                tokens[i, : len(chunk)] = chunk
        self.device.prefill(weights.params, rows, tokens, start, n_new, context=plan.context)
        with self._lock:
            for i, request in enumerate(plan.requests):
                if request.reason is None:
                    request.session._cached += int(n_new[i])
            self._counts["prefills"] += 1
            self._counts["tokens_prefilled"] += int(n_new.sum())
            now = time.monotonic()
            self._counts["prefill_s"] += now - began
            self._span("prefill", began, now)

    def decode(self, plan: Plan, weights: Snapshot) -> None:
        """Begin a round, then read the one before."""
        began = time.monotonic()
        with self._lock:
            requests = [r for r in plan.requests if r.reason is None]  # not closed or interrupted since the plan
            lanes = lane_arrays(requests, self._shapes)
        out = self.device.decode(
            weights.params,
            lanes,
            context=plan.context,
            n=self._shapes.round_tokens,
            truncated=plan.truncated,
            constraint=plan.constraint,
        )
        begun = time.monotonic()
        self._counts["decode_s"] += begun - began
        self._span("decode", began, begun)
        self.read()
        with self._lock:
            for lane, request in enumerate(requests):
                request.lane, request.unread = lane, self._shapes.round_tokens
            self.busy_lanes = len(requests)
        self.unread = _Unread(out, requests, weights.version, plan.crowded)

    def read(self) -> None:
        """Add the tokens of the round that is not read yet to their turns; waits for them."""
        if self.unread is None:
            return
        began = time.monotonic()
        unread, self.unread = self.unread, None
        out = self.device.read(unread.out)
        with self._lock:
            for lane, request in enumerate(unread.requests):
                request.unread = 0
                if request.reason is None:
                    self._take(request, out, lane, unread.version)
            self.busy_lanes = 0
            self._counts["rounds"] += 1
            used = int(np.count_nonzero(out.n_done))
            self._counts["lanes_used"] += used
            if unread.crowded:
                self._counts["crowded_rounds"] += 1
                self._counts["crowded_lanes_used"] += used
            self._counts["tokens_sampled"] += int(out.n_done.sum())
            now = time.monotonic()
            self._counts["decode_s"] += now - began
            self._span("decode", began, now)
            if self._timed is not None and unread.version >= self._timed[0]:
                self._counts["publishes"] += 1
                self._counts["publish_to_token_s"] += now - self._timed[1]
                self._timed = None

    def time_until_read(self, version: int) -> None:
        """Count how long it is from now to the first token of `version`; of versions that overtake it, to theirs."""
        with self._lock:
            self._timed = version, time.monotonic()

    def _take(self, request: Request, out: Round, lane: int, version: int) -> None:
        session = request.session
        kept, reason = take(request, out, lane, version, self._view, self._end_ids, self._shapes.capacity)
        session._cached += int(out.n_done[lane])
        self._counts["tokens_kept"] += kept
        # Ids beyond a stop string that the host alone sees are forgotten. The shifted key of the next id needs the raw
        # key of the one before, and the cache has the newest one's only: that of a round which runs on, maybe.
        runs_on = reason is not None and bool(out.alive[lane])
        if session._cached > len(session._ids) - 1 or runs_on:
            session._cached = 0 if self._key_shift else min(session._cached, len(session._ids) - 1)
        if reason is not None:
            self._finish(request, reason)

    def compile(self, params: Any, truncated: bool, constraints: Sequence[Constraint]) -> None:
        """Run every shape on no rows: rounds free and under each of `constraints`, and if asked truncated ones too."""
        rows = np.full(self._shapes.prefill_rows, self._shapes.residents, np.int32)
        tokens = np.zeros((self._shapes.prefill_rows, self._shapes.prefill_chunk), np.int32)
        none = np.zeros_like(rows)
        lanes = Lanes.idle(self._shapes.lanes, no_row=self._shapes.residents)
        for context in (0, *self._shapes.contexts):
            self.device.prefill(params, rows, tokens, none, none, context=context)
        for context in self._shapes.contexts:
            self.device.copy(0, [], width=self._shapes.prefill_rows, context=context)
            for cut in (False, True) if truncated else (False,):
                for constraint in (None, *constraints):
                    self.device.decode(
                        params,
                        lanes,
                        context=context,
                        n=self._shapes.round_tokens,
                        truncated=cut,
                        constraint=constraint,
                    )
