"""One episode: the world and the engine take turns, and every token is written down once, as it was sampled or given.

A limit is failure: `facts["success"]` is False. A turn cut by `max_turn_tokens` is handed to the world as it is
(malformed, so the world says so); an episode whose row is full, or whose next observation leaves no room for a token,
ends as TOKEN_LIMIT; what is longer than any row is not even encoded. Past `max_seconds` of the world's clock it ends as
TIME_LIMIT.

A failed world is typed data: one that raises, answers something else than a Step, or answers later than
`call_deadline_s` ends its episode as ENV_ERROR; `facts` then have what `failure_facts` says. A call that *never*
returns cannot be seen from here: rl/rollout/pool.py watches the clock of each thread, abandons it with its world,
records the ENV_ERROR and starts another. A failed program (codec, engine) raises.

Between two turns a rule may give the episode up (rl/rollout/abandon.py): it ends as ABANDONED, a failure whatever the
world said, or is audited, which is played on and says in its facts that it would have ended.

Where the chat template would rewrite what was said so far (models.codec.NotPrefix), the episode goes on in a new row:
its prompt is the template's rendering of the whole conversation, in which no token is an action, and the session starts
again, empty. What was sampled stays in the row in which it was sampled, so every sampled token is trained once.
"""

import copy
import dataclasses
import itertools
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from envs.base import Env, EnvError, EnvLost, EnvSpec, Message, Observation, Step, Task
from models.codec import Codec, NotPrefix
from models.constraint import Constraint
from rl.rollout.abandon import NEVER, Abandonment, Verdict
from rl.rollout.failures import failure_facts
from rl.rollout.session import CapacityError
from rl.rollout.watched import guarded
from rl.types import ROW_DTYPES, Row, Status, Trajectory, Turn


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
    role: str | None = None,
    constraint: Constraint | None = None,
    abandonment: Abandonment = NEVER,
    clock: Callable[[], float] = time.monotonic,
) -> Trajectory:
    """Plays `task` to its end and returns its trajectory, whatever the world does. The caller closes both sides.

    `max_turn_tokens` bounds what one turn samples, `max_tokens` each row, prompt and world text included: no row is
    longer, and in a new row what it renders again counts again. `role` is the world's in the chat template, by default
    `codec.world_role`. `constraint` is that of every turn; a token to which it left no choice is no action. A text that
    `env.reset` gives follows the prompt as a user message. Row.turn is -1 on a row's prompt and k on turn k (from 0,
    counted over the rows) and on the world's answer to it.

    `max_seconds` (None: no limit) bounds the world's clock: `facts["seconds"]` where the world reports its own, virtual
    or not, and otherwise the seconds of `clock` spent inside its calls. It is read after each step; time spent sampling
    does not count. `abandonment` is asked after each turn that is not the last, of texts and rows alone.

    CANCELLED: the session was closed. Raises what the codec and the engine raise.
    """
    record, facts, spent_s = Record(), {"success": False}, 0.0
    role, verdict = codec.world_role if role is None else role, Verdict(abandonment, ticket, member)

    def played(status: Status, facts: Mapping[str, Any]) -> Trajectory:
        return Trajectory(task.task_id, ticket, member, status, record.rows(), facts, {})

    def ended(status: Status, **more: Any) -> Trajectory:
        if status not in (Status.DONE, Status.GAVE_UP):
            more["success"] = False
        trajectory = played(status, {**facts, **verdict.facts(spent_s, record.n_actions), **more})
        try:
            trajectory.to_bytes()
            # The world may go on writing into what it has reported.
            trajectory = dataclasses.replace(trajectory, facts=copy.deepcopy(trajectory.facts))
        except (TypeError, ValueError, OverflowError, RecursionError) as err:  # now: later the program would fail
            wrong = EnvError(f"the world gave facts that are not plain data ({type(err).__name__}: {err}); mend step")
            failed = {"success": False, **failure_facts(wrong)}
            return dataclasses.replace(trajectory, status=Status.ENV_ERROR, facts=failed)
        return trajectory

    try:
        first, spent_s = _call("reset", env.reset, task, call_deadline_s, clock)
        seen = guarded("reset's answer", _observed, first).text
        messages = _messages(task, seen)
        if _fit_in_no_row(codec, messages, max_tokens):
            return ended(Status.TOKEN_LIMIT)
        talk = Talk(codec, messages, env.spec.tools)
        new_ids = talk.start()
        for index in itertools.count():
            asked = min(max_turn_tokens, max_tokens - len(record) - len(new_ids))
            if asked < 1:
                return ended(Status.TOKEN_LIMIT)
            try:
                turn = session.generate(new_ids, max_tokens=asked, stop=env.spec.stop, constraint=constraint)
            except CapacityError:
                return ended(Status.TOKEN_LIMIT)
            record.given(new_ids, index - 1)
            record.sampled(turn, index)
            if turn.reason == "cancelled":
                return ended(Status.CANCELLED)
            # fewer than asked: the engine's own row is full
            if turn.reason == "length" and (len(turn.ids) < asked or len(record) >= max_tokens):
                return ended(Status.TOKEN_LIMIT)
            text = action_text(codec, turn.ids, env.spec.stop)
            answer, seconds = _call("step", env.step, text, call_deadline_s, clock)
            spent_s += seconds
            step, facts, gave_up = guarded("step's answer", _stepped, answer, env.spec)
            if max_seconds is not None and guarded("step's clock", _seconds, facts, spent_s) > max_seconds:
                return ended(Status.TIME_LIMIT)
            if step.done:
                return ended(Status.GAVE_UP if gave_up else Status.DONE)
            if index + 1 >= env.spec.max_turns:
                return ended(Status.TURN_LIMIT)
            answers = [Message(role, step.observation.text)]
            if _fit_in_no_row(codec, answers, max_tokens):
                return ended(Status.TOKEN_LIMIT)
            new_ids, breaks = talk.answer(turn.ids, answers)
            so_far = partial(played, Status.ABANDONED, {}), partial(_goes_on, record, new_ids, breaks)
            if verdict.ends(seen, text, *so_far, spent_s=spent_s):
                return ended(Status.ABANDONED)
            seen = step.observation.text
            if breaks:
                record.begin_row()
                session.restart(index + 1)
    except EnvError as err:
        return ended(Status.ENV_ERROR, **failure_facts(err))


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
    role: str | None = None,
    first: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
) -> Trajectory:
    """The trajectory of scripted `turns` (action, observation): the rows that a live episode with these texts would
    have.

    Action ids are `codec.encode_action`, action_mask is True on them, `behavior_logp` 0 and `version` 0 (nobody
    sampled them). An action is cut after its first stop string; without one it ends with the end-of-turn id, which a
    live turn would have had to sample; a thinking tag that the generation prompt opens is not sampled twice. The last
    observation is in no row: nothing was sampled after it. `first` is reset's text, `tools` are the world's.
    """
    record, talk = Record(), Talk(codec, _messages(task, first), tools)
    role = codec.world_role if role is None else role
    new_ids = talk.start()
    for index, (action, observation) in enumerate(turns):
        text, complete = _cut(action.removeprefix(codec.opened.rstrip()), stop)
        ids = codec.encode_action(text)
        if not complete:
            ids.append(codec.end_ids[0])
        record.given(new_ids, index - 1)
        record.sampled(Turn(ids, [0.0] * len(ids), [0] * len(ids), "stop"), index)
        new_ids, breaks = talk.answer(ids, [Message(role, observation)])
        if breaks:
            record.begin_row()
    return Trajectory(task.task_id, ticket, member, status, record.rows(), dict(facts), {})


def action_text(codec: Codec, ids: Sequence[int], stop: Sequence[str]) -> str:
    """What the world sees of a turn: the assistant's message up to and including the first stop string."""
    return _cut(codec.turn_text(ids), stop)[0]


class Talk:
    """The conversation so far, and the ids by which it goes on."""

    def __init__(self, codec: Codec, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()):
        self.messages = tuple(messages)
        self._codec, self._tools = codec, tools

    def start(self) -> list[int]:
        """The ids before the first turn."""
        return self._codec.start(self.messages, self._tools)

    def answer(self, sampled_ids: Sequence[int], messages: Sequence[Message]) -> tuple[list[int], bool]:
        """The ids before the next turn, and whether they begin a new row: then they are the conversation's, rendered
        again.
        """
        before = self.messages
        self.messages += (Message("assistant", self._codec.turn_text(sampled_ids)), *messages)
        try:
            return self._codec.extend_by(sampled_ids, messages, before, self._tools), False
        except NotPrefix:
            return self._codec.start(self.messages, self._tools), True


class Record:
    """The rows of an episode while they grow; its length is that of the row that grows now."""

    def __init__(self):
        self._rows: list[dict[str, list]] = []
        self.begin_row()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Ids of the row that grows: this list itself, to which ids are only added."""
        return self._rows[-1]["tokens"]

    @property
    def n_actions(self) -> int:
        """How many tokens the policy sampled, over all rows."""
        return sum(map(sum, (row["action_mask"] for row in self._rows)))

    def begin_row(self) -> None:
        self._rows.append({name: [] for name in ROW_DTYPES})

    def given(self, ids: Sequence[int], turn: int) -> None:
        """Prompt, glue and world text: nobody's action. What begins a row is its prompt."""
        n = len(ids)
        self._append(ids, turn if len(self) else -1, [False] * n, [0.0] * n, [-1] * n)

    def sampled(self, turn: Turn, index: int) -> None:
        mask, logp, version = [True] * len(turn.ids), list(turn.logp), list(turn.version)
        for i in turn.forced:
            mask[i], logp[i], version[i] = False, 0.0, -1
        self._append(turn.ids, index, mask, logp, version)

    def _append(self, ids, turn: int, mask, logp, version) -> None:
        for name, values in zip(ROW_DTYPES, (ids, [turn] * len(ids), mask, logp, version), strict=True):
            self._rows[-1][name] += values

    def rows(self) -> tuple[Row, ...]:
        """An episode that ended before the policy was asked has none; nor is a row kept before its first turn."""
        arrays = [{name: np.asarray(row[name], dtype) for name, dtype in ROW_DTYPES.items()} for row in self._rows]
        return tuple(Row(**row) for row in arrays if len(row["tokens"]))


def _goes_on(record: Record, new_ids: Sequence[int], breaks: bool) -> list[int]:
    """All that the policy has before its next turn."""
    return [*(() if breaks else record.tokens), *new_ids]


def _fit_in_no_row(codec: Codec, messages: Sequence[Message], max_tokens: int) -> bool:
    """Whether what others than the policy say fills a row of its own, by its length: a template keeps all of it."""
    return sum(codec.fewest_ids(message.content) for message in messages if message.role != "assistant") >= max_tokens


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
        raise EnvLost(f"the world's call took {clock() - began_s:.1f} s, deadline {deadline_s} s")
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


def _stepped(answer: Any, spec: EnvSpec) -> tuple[Step, dict[str, Any], bool]:
    """The step, its facts, and whether the policy gave up. Whatever a world answers, reading it may raise anything."""
    if not isinstance(answer, Step):
        raise EnvError(f"the world gave {_brief(answer)}, want a Step; mend step")
    _observed(answer.observation)
    facts = answer.facts
    if not isinstance(answer.done, bool | np.bool_) or not isinstance(facts, Mapping):
        got = f"done={_brief(answer.done)} facts={_brief(facts)}"
        raise EnvError(f"the world gave {got}, want a bool and a mapping; mend step")
    if spec.labelled and not isinstance(facts.get("success"), bool | np.bool_):
        got = _brief(facts.get("success"))
        raise EnvError(f"the world gave facts['success']={got}, want a bool at every step; mend step")
    return answer, dict(facts), bool(facts.get("gave_up"))


def _brief(value: Any) -> str:
    """Of a value that may fail even at its repr; a number of thousands of digits does."""
    try:
        shown = repr(value)[:80]
    except Exception as err:
        shown = f"(no repr: {type(err).__name__})"
    return f"{type(value).__name__} {shown}"
