"""A session, as its one user sees it, and the turn that it waits for. Made by rl/rollout/engine.py."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt32

from models.constraint import Constraint
from models.sampling import Sampling
from rl.types import Turn

if TYPE_CHECKING:
    from rl.rollout.engine import Engine


class EngineError(RuntimeError):
    """The engine's thread has died; the message and `__cause__` say of what."""


class EngineClosed(RuntimeError):
    """A session was asked of an engine that drains or is closed, or did so while the caller waited."""


class EngineBusy(RuntimeError):
    """As many callers wait for a session as may: the caller is to come again later, or to be told so."""


class CapacityError(ValueError):
    """The ids do not fit the cache row of a session."""


@dataclasses.dataclass(eq=False)
class Request:
    """One turn in flight. `first` is the index of its first sampled token in the session's ids."""

    session: "Session"
    first: int
    max_tokens: int
    stop: tuple[str, ...]
    end_ids: tuple[int, ...]  # sampling one of these ends the lane on the device
    prompt: tuple[int, ...]  # a session's first request: its ids but the last, whose KV members of a group share
    constraint: Constraint | None = None
    logp: list[float] = dataclasses.field(default_factory=list)
    version: list[int] = dataclasses.field(default_factory=list)
    forced: list[int] = dataclasses.field(default_factory=list)
    waited: int = 0  # device programs that ran without it
    lane: int = -1  # its lane in the round that is not read yet
    unread: int = 0  # tokens which that round samples for it, unless it ends there
    reason: str | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def cached(self) -> int:
        """Ids in the session's row, the unread ones included."""
        return self.session._cached + self.unread

    def remaining(self, capacity: int) -> int:
        """Tokens that it may still sample after the unread ones."""
        return min(self.max_tokens - len(self.logp), capacity - len(self.session._ids)) - self.unread


class Session:
    """A sequence of ids that the engine continues; made by `Engine.open`, used by one thread at a time."""

    def __init__(self, engine: "Engine", key: UInt32[np.ndarray, "2"], sampling: Sampling, used: int):
        self._engine, self.key, self.sampling = engine, key, sampling
        self._first_key = key
        self.closed = False
        self.row: int | None = None  # of the cache: lent for the first turn, lost again when others need it more
        self._ids: list[int] = []
        self._cached = 0  # leading ids whose KV is in the row
        # When it was opened or its last turn ended, in turns of the engine: the longest idle loses its row first.
        self._used = used
        self._request: Request | None = None

    @property
    def ids(self) -> list[int]:
        """Everything consumed and sampled so far."""
        return list(self._ids)

    def generate(
        self,
        new_ids: Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        deadline_s: float | None = None,
        constraint: Constraint | None = None,
    ) -> Turn:
        """Consume `new_ids`, then sample up to `max_tokens` tokens, of those alone that `constraint` allows in this
        turn.

        The turn ends with "stop" at an end id, or at the token whose text completes a stop string (either is kept; the
        text is that of the turn's ids alone), with "length" at `max_tokens` or a full row, with "time" after
        `deadline_s` seconds, with "cancelled" when it is cancelled or session or engine are closed meanwhile. Whatever
        the reason, the session holds `new_ids` and the turn's ids, and can go on.
        Errors: CapacityError if `new_ids` leave no room for a token: the session is as it was before the call.
        ValueError for ids or a constraint of another vocabulary.
        EngineError when the engine's thread died.
        """
        return self._engine._generate(self, new_ids, max_tokens, tuple(stop), deadline_s, constraint)

    def cancel(self) -> None:
        """End a call in flight, from another thread, with what it has sampled; the session stays open."""
        self._engine._cancel(self)

    def fork(
        self, n: int, *, keys: Sequence[UInt32[np.ndarray, "2"]] | None = None, timeout_s: float | None = None
    ) -> "list[Session]":
        """`n` new sessions with these ids and a copy of this KV, in rows that are free or whose sessions are idle for
        longest (one that gets none computes it again); session i samples with keys[i], or fold_in(key, 2³¹ + i).

        Blocks until `n` more sessions may be open: threads that all hold sessions and wait for forks wait for each
        other, so give `timeout_s` where that can be. Errors: as `Engine.open`.
        """
        return self._engine._fork(self, n, keys, timeout_s)

    def restart(self, turn: int) -> None:
        """Begin again as an empty session, as if it were closed and opened with the key of the row of ids that begins
        at `turn`: fold_in(first key, 2³⁰ + turn).

        Errors: ValueError for a turn outside [1, 2³⁰); RuntimeError with a call in flight.
        """
        self._engine._restart(self, turn)

    def close(self) -> None:
        """Free the row and end a call in flight with "cancelled"; idempotent."""
        self._engine._close_session(self)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()
