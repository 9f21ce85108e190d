"""One episode: the world and the engine take turns, and every token is written down once, as it was sampled or given.

A limit is failure: `facts["success"]` is False. A turn cut by `max_turn_tokens` is handed to the world as it is
(malformed, so the world says so); an episode whose row is full, or whose next observation leaves no room for a token,
ends as TOKEN_LIMIT. Past `max_seconds` of the world's clock it ends as TIME_LIMIT.

A failed world is typed data: one that raises, answers something else than a Step, or answers later than
`call_deadline_s` ends its episode as ENV_ERROR with `facts["error"]`. A call that *never* returns cannot be seen from
here: rl/rollout/pool.py watches the clock of each thread, abandons it with its world, records the ENV_ERROR and starts
another. A failed program (codec, engine) raises.
"""

import itertools
import math
import numbers
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envs.base import Env, EnvError, Message, Observation, Step, Task
from models.codec import Codec
from rl.rollout.session import CapacityError
from rl.rollout.watched import guarded
from rl.types import Row, Status, Trajectory, Turn


def run_episode(
    env: Env,
    task: Task,
    codec: Codec,
    session,
    *,
    ticket: int,
    member: int,
    max_turn_tokens: int,
    max_tokens: int,
    call_deadline_s: float,
    max_seconds: float | None = None,
    role: str = "tool",
    clock: Callable[[], float] = time.monotonic,
) -> Trajectory:
    """Plays `task` to its end and returns its trajectory, whatever the world does. The caller closes both sides.

    `max_turn_tokens` bounds what one turn samples, `max_tokens` the whole row, prompt and world text included: no row
    is longer. `role` is the world's in the chat template. A text that `env.reset` gives follows the prompt as a user
    message. Row.turn is -1 on the prompt and k on turn k (from 0) and on the world's answer to it.

    `max_seconds` (None: no limit) bounds the world's clock: `facts["seconds"]` where the world reports its own, virtual
    or not, and otherwise the seconds of `clock` spent inside its calls. It is read after each step; time spent sampling
    does not count.

    CANCELLED: the session was closed. Raises what the codec and the engine raise
    (models.codec.NotPrefix among them).
    """
    record, facts, spent_s = _Record(), {"success": False}, 0.0

    def ended(status: Status, **more: Any) -> Trajectory:
        if status not in (Status.DONE, Status.GAVE_UP):
            more["success"] = False
        return Trajectory(task.task_id, ticket, member, status, record.rows(), {**facts, **more}, {})

    try:
        first, spent_s = _call("reset", env.reset, task, call_deadline_s, clock)
        new_ids = codec.start(_messages(task, _observed(first).text))
        for index in itertools.count():
            asked = min(max_turn_tokens, max_tokens - len(record) - len(new_ids))
            if asked < 1:
                return ended(Status.TOKEN_LIMIT)
            try:
                turn = session.generate(new_ids, max_tokens=asked, stop=env.spec.stop)
            except CapacityError:
                return ended(Status.TOKEN_LIMIT)
            record.given(new_ids, index - 1)
            record.sampled(turn, index)
            if turn.reason == "closed":
                return ended(Status.CANCELLED)
            # fewer than asked: the engine's own row is full
            if turn.reason == "length" and (len(turn.ids) < asked or len(record) >= max_tokens):
                return ended(Status.TOKEN_LIMIT)
            text = action_text(codec, turn.ids, env.spec.stop)
            answer, seconds = _call("step", env.step, text, call_deadline_s, clock)
            step, spent_s = _stepped(answer), spent_s + seconds
            facts = dict(step.facts)
            if max_seconds is not None and _seconds(facts, spent_s) > max_seconds:
                return ended(Status.TIME_LIMIT)
            if step.done:
                return ended(Status.GAVE_UP if facts.get("gave_up") else Status.DONE)
            if index + 1 >= env.spec.max_turns:
                return ended(Status.TURN_LIMIT)
            new_ids = codec.extend(turn.ids, step.observation.text, role=role)
    except EnvError as err:
        return ended(Status.ENV_ERROR, error=_note(err))


def transcribe(
    codec: Codec,
    task: Task,
    turns: Sequence[tuple[str, str]],
    facts: Mapping[str, Any],
    *,
    stop: Sequence[str] = (),
    ticket: int = 0,
    member: int = 0,
    status: Status = Status.DONE,
    role: str = "tool",
    first: str = "",
) -> Trajectory:
    """The trajectory of scripted `turns` (action, observation): the rows that a live episode with these texts would
    have.

    Action ids are `codec.encode_action`, action_mask is True on them, `behavior_logp` 0 and `version` 0 (nobody
    sampled them). An action is cut after its first stop string; without one it ends with the end-of-turn id, which a
    live turn would have had to sample. The last observation is not part of the row: nothing was sampled after it.
    `first` is reset's text.
    """
    record = _Record()
    new_ids = codec.start(_messages(task, first))
    for index, (action, observation) in enumerate(turns):
        text, complete = _cut(action, stop)
        ids = codec.encode_action(text)
        if not complete:
            ids.append(codec.end_ids[0])
        record.given(new_ids, index - 1)
        record.sampled(Turn(ids, [0.0] * len(ids), [0] * len(ids), "stop" if complete else "end"), index)
        new_ids = codec.extend(ids, observation, role=role)
    return Trajectory(task.task_id, ticket, member, status, record.rows(), dict(facts), {})


def action_text(codec: Codec, ids: Sequence[int], stop: Sequence[str]) -> str:
    """What the world sees of a turn: its text up to and including the first stop string, without a sampled end."""
    if ids and ids[-1] in codec.end_ids:
        ids = ids[:-1]
    return _cut(codec.view(ids), stop)[0]


class _Record:
    """A row while it grows."""

    def __init__(self):
        self._tokens: list[int] = []
        self._turn: list[int] = []
        self._mask: list[bool] = []
        self._logp: list[float] = []
        self._version: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def given(self, ids: Sequence[int], turn: int) -> None:
        """Prompt, glue and world text: nobody's action."""
        self._append(ids, turn, False, [0.0] * len(ids), [-1] * len(ids))

    def sampled(self, turn: Turn, index: int) -> None:
        self._append(turn.ids, index, True, turn.logp, turn.version)

    def _append(self, ids, turn: int, mask: bool, logp, version) -> None:
        self._tokens += ids
        self._turn += [turn] * len(ids)
        self._mask += [mask] * len(ids)
        self._logp += logp
        self._version += version

    def rows(self) -> tuple[Row, ...]:
        if not self._tokens:  # the episode ended before the policy was asked
            return ()
        return (
            Row(
                tokens=np.asarray(self._tokens, np.int32),
                turn=np.asarray(self._turn, np.int32),
                action_mask=np.asarray(self._mask, np.bool_),
                behavior_logp=np.asarray(self._logp, np.float32),
                version=np.asarray(self._version, np.int32),
            ),
        )


def _messages(task: Task, first: str) -> tuple[Message, ...]:
    return (*task.prompt, Message("user", first)) if first else task.prompt


def _cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Text up to and including its first stop string, and whether there is one."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return (text[: min(ends)], True) if ends else (text, False)


def _call(
    name: str, function: Callable, argument: Any, deadline_s: float, clock: Callable[[], float]
) -> tuple[Any, float]:
    """One call of the world: its answer, and how long it took. An answer that comes too late is an EnvError too."""
    began_s = clock()
    answer = guarded(name, function, argument)
    if clock() - began_s > deadline_s:
        raise EnvError(f"the world's call took {clock() - began_s:.1f} s, deadline {deadline_s} s")
    return answer, clock() - began_s


def _seconds(facts: Mapping[str, Any], spent_s: float) -> float:
    """The world's clock: its own account where it gives one, else the seconds spent in its calls."""
    seconds = facts.get("seconds", spent_s)
    if not isinstance(seconds, numbers.Real) or not math.isfinite(seconds):
        raise EnvError(f"the world gave facts['seconds']={_brief(seconds)}, want a finite number of seconds; mend step")
    return float(seconds)


def _observed(answer: Any) -> Observation:
    if not isinstance(answer, Observation) or not isinstance(answer.text, str):
        raise EnvError(f"the world gave {_brief(answer)}, want an Observation with a text; mend reset/step")
    return answer


def _stepped(answer: Any) -> Step:
    if not isinstance(answer, Step):
        raise EnvError(f"the world gave {_brief(answer)}, want a Step; mend step")
    _observed(answer.observation)
    facts = answer.facts
    if not isinstance(answer.done, bool | np.bool_) or not isinstance(facts, Mapping):
        got = f"done={_brief(answer.done)} facts={_brief(facts)}"
        raise EnvError(f"the world gave {got}, want a bool and a mapping; mend step")
    if not isinstance(facts.get("success"), bool | np.bool_):
        got = _brief(facts.get("success"))
        raise EnvError(f"the world gave facts['success']={got}, want a bool at every step; mend step")
    return answer


def _brief(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"


def _note(err: BaseException) -> str:
    """The error, and where in the world it came from."""
    root = err
    while root.__cause__ is not None:
        root = root.__cause__
    frames = traceback.extract_tb(root.__traceback__)
    where = f" at {pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{root!r}{where}"
