"""Which session holds which row of the KV cache, and whose prompt a row holds already. Pure bookkeeping: nothing here
touches a device, and the engine's lock guards it.

A row is lent for a session's first turn. When all are lent, the session that has been idle for longest loses its own;
its KV is computed again before its next token. Sessions with a turn in flight keep theirs.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rl.rollout.session import Request, Session


class Copy(NamedTuple):
    """KV of one prompt, to be copied from the leader's row to those of sessions that have the same prompt."""

    source: int  # row; its owner may close meanwhile, but nothing is written to it before the copy
    targets: list[Session]
    n_tokens: int


class Residents:
    """The rows, and the sessions that hold them."""

    def __init__(self, rows: int):
        self.rows = rows
        self.evictions = 0
        self._free = list(range(rows))[::-1]
        self._holders: dict[Session, None] = {}
        self._leaders: dict[tuple[int, ...], Session] = {}  # by prompt: who computes its KV, or has

    @property
    def n_free(self) -> int:
        return len(self._free)

    def seat(self, requests: Iterable[Request]) -> None:
        """Lends a row to each request's session that has none, in order, while there are any to be had."""
        for request in requests:
            if not self.lend(request.session):
                return

    def lend(self, session: Session) -> bool:
        """Whether the session has a row now: its own, a free one, or that of the session idle for longest."""
        if session.row is not None:
            return True
        if not self._free:
            idle = [s for s in self._holders if s._request is None and s is not session]
            if not idle:
                return False
            self.release(min(idle, key=lambda s: s._used))
            self.evictions += 1
        session.row = self._free.pop()
        self._holders[session] = None
        return True

    def release(self, session: Session) -> None:
        """Takes back the session's row, if it has one. A program that runs now may still write to it: that is harmless,
        as programs run one after the other and the row's next owner starts from nothing.
        """
        self.forget_prompt(session)
        session._cached = 0
        if session.row is not None:
            self._free.append(session.row)
            session.row = None
            del self._holders[session]

    def forget_prompt(self, session: Session) -> None:
        """Nobody copies from this session any more."""
        self._leaders = {prompt: leader for prompt, leader in self._leaders.items() if leader is not session}

    def forget_prompts(self) -> None:
        """The weights are others: no KV computed so far is anybody else's."""
        self._leaders.clear()

    def share(self, requests: Iterable[Request], *, newest_only: bool) -> tuple[list[Copy], set[Request]]:
        """Prompts to copy, and the requests that wait for a leader that is still computing theirs.

        Only a whole prompt is shared, and only by sessions that have nothing else yet: then a member's KV is the very
        one that it would have computed. `newest_only`: with a key shift a row can be copied only while its newest
        column is the prompt's last.
        """
        copies: dict[Session, Copy] = {}
        wait = set()
        for request in requests:
            session, prompt = request.session, request.prompt
            if not prompt or session.row is None or session._cached or len(session._ids) != len(prompt) + 1:
                continue
            leader = self._leaders.setdefault(prompt, session)
            if leader is session:
                continue
            ready = leader._cached >= len(prompt)
            if newest_only and (leader._cached > len(prompt) or (leader._request and leader._request.unread)):
                ready = False
            if ready:
                copies.setdefault(leader, Copy(leader.row, [], len(prompt))).targets.append(session)
            elif leader._request is not None and leader._cached < len(prompt):
                wait.add(request)
            else:  # it was cancelled half-way, or has gone on: this one computes it again
                self._leaders[prompt] = session
        return list(copies.values()), wait
