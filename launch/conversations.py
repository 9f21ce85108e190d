"""The conversations of a served policy: each keeps its session, and goes on with the ids that were sampled.

A request whose messages begin with those of a conversation, its last answer included, *extends* it: the session goes
on, KV kept, and only what is new is read. One that begins with an earlier answer, or with one of a conversation whose
session is gone, or samples in another way, starts a conversation of its own from the ids as they were sampled: text is
never tokenised again as long as its conversation is remembered. In its rows what was sampled elsewhere is prompt, so
each sampled token is an action once.

A conversation ends when it idles, when its place is needed (the one that idles longest), when a turn fails or its
caller leaves, and at shutdown. It is kept here as a Trajectory until `keep_ended` has handed it over. Its outcome is
not known: there is no `success` among its facts. `constrained` are the turns whose log-probabilities are of the ids
that were allowed, not of all.
"""

import collections
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from envs.base import Message
from launch.chat_api import Answer, Chat, write_answer
from models.codec import Codec
from models.constraint import Constraint
from models.sampling import Sampling
from rl.rollout.engine import Engine
from rl.rollout.keys import request_key
from rl.rollout.session import CapacityError, EngineBusy, Session
from rl.rollout.worker import Record, Talk
from rl.types import Row, Status, Trajectory, Turn

_REMEMBERED = 4096  # answers from which a request may go on


BUSY = (TimeoutError, EngineBusy)  # how an engine says that it has no place for another session


class Full(Exception):
    """More requests wait than may."""


class Busy(Exception):
    """The engine, which others may use too, has no place for another session now."""


class Cancelled(Exception):
    """The caller left, or the server closes, before the turn was over."""


class Refused(ValueError):
    """Messages that the codec cannot render."""


@dataclasses.dataclass(eq=False)
class Asked:
    """A request while it is answered."""

    chat: Chat
    constraint: Constraint | None = None  # of what chat.pattern says
    left: bool = False  # its caller is gone


@dataclasses.dataclass(frozen=True)
class Reply:
    """A turn, as sampled and as its caller reads it."""

    conversation: str
    prompt_ids: list[int]  # everything before the turn
    kept: int  # how many of them the session had before
    turn: Turn
    answer: Answer


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """The end of a turn that was served: the first `length` ids of `tokens`, a row that may have grown since."""

    conversation: "Conversation"
    tokens: list[int]
    length: int
    messages: tuple[Message, ...]  # before the turn
    turn: list[int]


@dataclasses.dataclass(eq=False)
class Conversation:
    """Turns with their session. Its fields change under the store's lock, or in its one turn."""

    ticket: int  # numbers the requests that began conversations; the `n` answers to one are its members
    member: int
    seed: int | None
    session: Session
    asked: Asked | None  # what is being answered
    place: _Place | None  # its own last answer; before the first one, where it goes on from
    used_s: float
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    record: Record = dataclasses.field(default_factory=Record)
    messages: tuple[Message, ...] = ()  # before the last turn
    turns: int = 0
    constrained: list[int] = dataclasses.field(default_factory=list)  # which of them were
    kept: int = 0  # ids that the session had before the turn
    first: int | None = None  # where in the session's ids the turn begins that is being sampled
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)


class Conversations:
    """At most `limit` sessions of `engine`, and `waiting` requests for one. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        *,
        limit: int,
        waiting: int,
        idle_s: float,
        seed: int = 0,
        keep: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine, self._codec, self._limit, self._waiting = engine, codec, limit, waiting
        self._idle_s, self._seed, self._keep, self._clock = idle_s, seed, keep, clock
        self._changed = threading.Condition()  # guards all below
        self._live: dict[Conversation, None] = {}  # those with a session, the longest unused first
        self._queue: collections.deque[Asked] = collections.deque()
        self._places: collections.OrderedDict[bytes, _Place] = collections.OrderedDict()
        self._ended: list[Trajectory] = []  # and not handed over yet
        self._keeping = threading.Lock()
        self._counts = dict.fromkeys(["requests", "began", "continued", "branched", "ended"], 0)
        self._closing = False

    def begin(self, asked: Asked) -> list[Conversation]:
        """The conversations, one for each answer that is asked for, whose next turns answer; waits for sessions.

        Errors: Full, Busy, Cancelled, and what else `Engine.open` raises.
        """
        n = asked.chat.n
        with self._changed:
            if len(self._queue) >= self._waiting and (self._queue or not self._free(n)):
                raise Full(f"{len(self._queue)} requests wait already")
            self._queue.append(asked)
            try:
                self._changed.wait_for(
                    lambda: self._closing or asked.left or (self._queue[0] is asked and self._free(n))
                )
                if self._closing or asked.left:
                    raise Cancelled
                return self._start(asked)
            finally:
                self._queue.remove(asked)
                self._changed.notify_all()  # the next in line may fit

    def generate(self, conversation: Conversation) -> Reply:
        """The turn that answers. To be called once for each conversation that `begin` gave, whatever happens.

        Errors: Refused, CapacityError, Cancelled and what the engine raises; each of them ends the conversation.
        """
        asked, chat = conversation.asked, conversation.asked.chat
        try:
            turn = self._turn(conversation, asked)
            answer = write_answer(self._codec, turn, chat, f"{conversation.id}_{conversation.turns}")
            before = conversation.session.ids[: conversation.first]
        except CapacityError:
            self._end([conversation], Status.TOKEN_LIMIT)
            raise
        except BaseException:
            self._end([conversation], Status.CANCELLED)
            raise
        with self._changed:
            if conversation.session.closed:  # after its last token: nobody can go on
                self._end([conversation], Status.CANCELLED)
                raise Cancelled
            conversation.asked, conversation.first, conversation.used_s = None, None, self._clock()
            del self._live[conversation]
            self._live[conversation] = None  # last in line to make place
            prefix = answer.after(chat.prefixes[-1])
            self._places[prefix] = conversation.place
            self._places.move_to_end(prefix)
            if len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)
            self._changed.notify_all()
        return Reply(conversation.id, before, conversation.kept, turn, answer)

    def sampled_so_far(self, conversation: Conversation, asked: Asked) -> list[int]:
        """Ids of the turn that answers, while it is sampled."""
        with self._changed:
            if conversation.asked is not asked or conversation.first is None:
                return []
            return conversation.session.ids[conversation.first :]

    def cancel(self, asked: Asked) -> None:
        """The caller left: what is done for the request ends, with Cancelled."""
        with self._changed:
            asked.left = True
            for conversation in self._live:
                if conversation.asked is asked:
                    conversation.session.close()
            self._changed.notify_all()

    def end_idle(self) -> None:
        """End the conversations that nobody went on with for `idle_s`."""
        with self._changed:
            since = self._clock() - self._idle_s
            self._end([c for c in self._live if c.asked is None and c.used_s <= since], Status.DONE)

    def keep_ended(self) -> None:
        """Hand over every conversation that ended and sampled anything, all or none: where `keep` raises, so does this,
        and they stay for the next call.
        """
        with self._keeping:
            with self._changed:
                ended = list(self._ended)
            if ended:
                self._keep(ended)
            with self._changed:
                del self._ended[: len(ended)]

    def stats(self) -> dict[str, int]:
        """`sessions busy waiting` and the conversations `unkept` now; counts since the start, `branched` the
        conversations that began from another.
        """
        with self._changed:
            return {
                "sessions": len(self._live),
                "busy": self._busy(),
                "waiting": len(self._queue),
                "unkept": len(self._ended),
                **self._counts,
            }

    def close(self, timeout_s: float = 10.0) -> None:
        """End every conversation, one in a turn as CANCELLED; idempotent. A turn that does not return is left."""
        with self._changed:
            self._closing = True
            for conversation in self._live:
                if conversation.asked is not None:
                    conversation.session.close()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._busy(), timeout_s):
                logging.error("%d turns have not ended in %s s and are not kept", self._busy(), timeout_s)
            self._end([c for c in self._live if c.asked is None], Status.DONE)

    def _busy(self) -> int:
        return sum(conversation.asked is not None for conversation in self._live)

    def _free(self, n: int) -> bool:
        return self._busy() + n <= self._limit  # the others can be ended

    def _start(self, asked: Asked) -> list[Conversation]:
        chat, told = asked.chat, _told(asked.chat)
        self._counts["requests"] += 1
        place = self._places.get(chat.prefixes[told]) if told else None
        if place is not None and chat.n == 1 and self._goes_on(place, chat):
            self._counts["continued"] += 1
            place.conversation.asked = asked
            return [place.conversation]
        self._counts["began" if place is None else "branched"] += chat.n
        idle = [c for c in self._live if c.asked is None]
        self._end(idle[: max(0, len(self._live) + chat.n - self._limit)], Status.DONE)
        ticket, started = self._counts["requests"] - 1, []
        try:
            for member in range(chat.n):
                own = chat.seed is None
                key = request_key(self._seed, ticket, member) if own else request_key(chat.seed, 0, member)
                session = self._open(key, chat.sampling)
                started.append(Conversation(ticket, member, chat.seed, session, asked, place, self._clock()))
                self._live[started[-1]] = None
        except BaseException:
            self._end(started, Status.CANCELLED)
            raise
        return started

    def _open(self, key: UInt32[np.ndarray, "2"], sampling: Sampling) -> Session:
        """At once: whoever waits here would hold the lock."""
        try:
            return self._engine.open(key, sampling, timeout_s=0.0)
        except BUSY as err:
            raise Busy(str(err)) from err

    def _goes_on(self, place: _Place, chat: Chat) -> bool:
        """Whether the session that sampled this answer has sampled none since, is free, and samples as is asked."""
        own = place.conversation
        alike = (own.session.sampling, own.seed) == (chat.sampling, chat.seed)
        return own.place is place and own in self._live and own.asked is None and alike

    def _turn(self, conversation: Conversation, asked: Asked) -> Turn:
        """Give the session what is new, sample, and write both down."""
        session, record, place, chat = conversation.session, conversation.record, conversation.place, asked.chat
        try:
            talk = Talk(self._codec, chat.messages if place is None else place.messages, chat.tools)
            answers = chat.messages[_told(chat) :]
            new, breaks = (talk.start(), False) if place is None else talk.answer(place.turn, answers)
        except ValueError as err:
            raise Refused(str(err)) from err
        if conversation.turns and breaks:
            record.begin_row()
            session.restart(conversation.turns)
        elif not conversation.turns and place is not None and not breaks:
            new = [*place.tokens[: place.length], *new]
        conversation.metadata |= chat.metadata
        conversation.messages = talk.messages
        conversation.kept = len(session.ids)
        conversation.first = conversation.kept + len(new)
        room = max(1, self._engine.capacity - conversation.first)  # where there is none the engine says so
        limits = {"max_tokens": min(chat.max_tokens or room, room), "stop": chat.stop}
        turn = session.generate(new, **limits, constraint=asked.constraint)
        if turn.ids:
            conversation.constrained += [conversation.turns] * (asked.constraint is not None)
            record.given(new, conversation.turns - 1)
            record.sampled(turn, conversation.turns)
        if turn.reason == "cancelled":  # by `cancel` or `close`, or with the engine
            raise Cancelled
        conversation.turns += 1
        conversation.place = _Place(conversation, record.tokens, len(record), talk.messages, turn.ids)
        return turn

    def _end(self, conversations: Sequence[Conversation], status: Status) -> None:
        with self._changed:
            for conversation in conversations:
                self._live.pop(conversation, None)
                self._counts["ended"] += 1
                conversation.asked = None
                conversation.session.close()
                rows = conversation.record.rows()
                if any(row.action_mask.any() for row in rows):
                    self._ended.append(_trajectory(conversation, status, rows))
            self._changed.notify_all()


def _told(chat: Chat) -> int:
    """How many messages there are up to the assistant's last one."""
    assistants = [i for i, message in enumerate(chat.messages) if message.role == "assistant"]
    return assistants[-1] + 1 if assistants else 0


def _trajectory(conversation: Conversation, status: Status, rows: tuple[Row, ...]) -> Trajectory:
    facts: dict[str, Any] = {
        "messages": [dataclasses.asdict(message) for message in conversation.messages],  # before the last turn
        "metadata": dict(conversation.metadata),
        "sampling": dataclasses.asdict(conversation.session.sampling),
        "turns": conversation.turns,
        "constrained": conversation.constrained,
    }
    return Trajectory(conversation.id, conversation.ticket, conversation.member, status, rows, facts, {})
