"""An episode ends for exactly one reason, its row is what was sampled and given, and a broken world is data."""

import dataclasses

import numpy as np
import pytest

from envs.base import EnvError, EnvSpec, Message, Observation, Step, Task
from rl.rollout.session import CapacityError
from rl.rollout.worker import action_text, run_episode, transcribe
from rl.types import Status, Turn

END, ASSISTANT = 0, 1


class ByteCodec:
    """One id a character (its code point), 0 the end of turn, 1 opens a turn: world text is `text end open`."""

    end_ids = (END,)
    world_role, opened = "tool", ""

    def start(self, messages, tools=()):
        return [*map(ord, "|".join(m.content for m in messages)), END, ASSISTANT]

    def turn_text(self, ids):
        return self.view(ids[:-1] if ids and ids[-1] == END else ids)

    def extend_by(self, sampled, messages, before=(), tools=()):
        (answer,) = messages
        return [*([] if sampled and sampled[-1] == END else [END]), *map(ord, answer.content), END, ASSISTANT]

    def view(self, ids):
        return "".join(chr(i) if i > 1 else "#" for i in ids)

    def encode_action(self, text):
        return list(map(ord, text))

    def fewest_ids(self, text):
        return len(text)


class Script:
    """A session that samples given texts, `$` the end of turn, and keeps the engine's contract on limits and stops."""

    def __init__(self, *turns, capacity=10_000, on_turn=lambda n: None):
        self.turns, self.capacity, self.on_turn = list(turns), capacity, on_turn
        self.calls, self.length = [], 0

    def generate(self, new_ids, *, max_tokens, stop=(), deadline_s=None, constraint=None):
        self.calls.append((list(new_ids), max_tokens, stop))
        self.length += len(new_ids)
        if self.length >= self.capacity:
            raise CapacityError("no room")
        text = self.turns.pop(0)
        self.on_turn(len(self.calls))
        if text is None:
            return Turn([], [], [], "cancelled")
        ids, reason = [], "length"
        for c in text[: min(max_tokens, self.capacity - self.length)]:
            ids.append(END if c == "$" else ord(c))
            if c == "$":
                reason = "stop"
                break
            if any(s in "".join(map(chr, ids)) for s in stop):
                reason = "stop"
                break
        self.length += len(ids)
        n = len(self.calls)
        return Turn(ids, [-0.1 * n] * len(ids), [n] * len(ids), reason)


class Forced(Script):
    """Its first and third token of every turn were forced by the constraint that it was given."""

    def generate(self, new_ids, *, constraint, **kwargs):
        self.constraint = constraint
        return dataclasses.replace(super().generate(new_ids, **kwargs), forced=(0, 2))


class Env:
    """Answers each action from a list; an item may be a Step, an error to raise, or anything else as garbage."""

    def __init__(self, *answers, max_turns=4, stop=("</s>",), first=""):
        self.spec = EnvSpec("fake", stop, max_turns)
        self.answers, self.first, self.seen = list(answers), first, []

    def reset(self, task):
        return Observation(self.first) if isinstance(self.first, str) else self.first

    def step(self, action):
        self.seen.append(action)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer

    def close(self):
        pass


TASK = Task("t", "hop1", "train", 1, (Message("user", "q"),), {})


def step(text="obs", done=False, **facts):
    return Step(Observation(text), done, {"success": False, **facts})


def play(env, session, **options):
    defaults = {"ticket": 3, "member": 2, "max_turn_tokens": 20, "max_tokens": 200, "call_deadline_s": 5.0}
    return run_episode(env, TASK, ByteCodec(), session, **defaults | options)


def text_of(row, mask=None):
    ids = row.tokens if mask is None else row.tokens[mask]
    return ByteCodec().view(ids.tolist()).replace("\x00", "$")


def test_two_turns_token_by_token():
    env = Env(step("obs"), step("bye", done=True, success=True, f1=1.0))
    session = Script("a</s>ignored", "yes$")
    trajectory = play(env, session)
    (row,) = trajectory.rows
    # prompt "q" end open | a</s> | end(glue) obs end open | yes end(sampled)
    assert row.tokens.tolist() == [113, 0, 1, *map(ord, "a</s>"), 0, *map(ord, "obs"), 0, 1, *map(ord, "yes"), 0]
    assert row.action_mask.tolist() == [False] * 3 + [True] * 5 + [False] * 6 + [True] * 4
    assert row.turn.tolist() == [-1] * 3 + [0] * 5 + [0] * 6 + [1] * 4
    np.testing.assert_array_equal(row.version, [-1] * 3 + [1] * 5 + [-1] * 6 + [2] * 4)
    np.testing.assert_allclose(row.behavior_logp, [0] * 3 + [-0.1] * 5 + [0] * 6 + [-0.2] * 4, rtol=1e-6)
    assert env.seen == ["a</s>", "yes"]  # a sampled end of turn is trained, and no text for the world
    assert (trajectory.task_id, trajectory.ticket, trajectory.member) == ("t", 3, 2)
    assert trajectory.status is Status.DONE and trajectory.facts == {"success": True, "f1": 1.0}
    assert [new for new, _, _ in session.calls] == [[113, 0, 1], [0, *map(ord, "obs"), 0, 1]]  # new tokens only
    assert session.calls[0][1:] == (20, ("</s>",))


def test_a_forced_token_is_no_action():
    session, constraint = Forced("a</s>", "yes$"), object()
    trajectory = play(Env(step("obs"), step("bye", done=True)), session, constraint=constraint)
    (row,) = trajectory.rows
    assert session.constraint is constraint
    # of a</s> without its first and third character, and of yes$
    assert text_of(row, row.action_mask) == "<s>e#" and "a</s>" in text_of(row) and "yes#" in text_of(row)
    assert row.behavior_logp[row.action_mask].tolist() == pytest.approx([-0.1] * 3 + [-0.2] * 2)


def test_token_that_crosses_the_stop_is_trained_and_the_world_sees_up_to_the_string():
    class Wide(ByteCodec):
        def view(self, ids):
            return "".join("</s>tail" if i == 500 else chr(i) for i in ids)

    class Session:
        def generate(self, new_ids, **_):
            return Turn([97, 500], [-1.0, -1.0], [0, 0], "stop")

    env = Env(step(done=True))
    trajectory = run_episode(
        env, TASK, Wide(), Session(), ticket=0, member=0, max_turn_tokens=9, max_tokens=99, call_deadline_s=5.0
    )
    assert env.seen == ["a</s>"]
    assert trajectory.rows[0].tokens[-2:].tolist() == [97, 500] and trajectory.rows[0].action_mask[-2:].all()


def test_first_of_several_stop_strings_cuts():
    assert action_text(ByteCodec(), list(map(ord, "x</b>y</a>")), ("</a>", "</b>")) == "x</b>"
    assert action_text(ByteCodec(), [97, END], ("</a>",)) == "a"
    assert action_text(ByteCodec(), [], ("</a>",)) == ""


def test_reset_text_follows_the_prompt():
    session = Script("a$")
    play(Env(step(done=True), first="page"), session)
    assert session.calls[0][0] == [*map(ord, "q|page"), 0, 1]


@pytest.mark.parametrize(
    "env, session, options, status, actions",
    [
        (Env(step(done=True)), Script("a$"), {}, Status.DONE, 2),
        (Env(step(done=True, gave_up=True)), Script("a$"), {}, Status.GAVE_UP, 2),
        (Env(*[step()] * 2, max_turns=2), Script("a$", "b$"), {}, Status.TURN_LIMIT, 4),
        # "q" end open = 3 places; 5 sampled fill the row of 8
        (Env(), Script("a" * 50), {"max_tokens": 8}, Status.TOKEN_LIMIT, 5),
        # the row is full and the action complete: the world answers, but nothing more fits
        (Env(step()), Script("abcd$"), {"max_tokens": 8}, Status.TOKEN_LIMIT, 5),
        (Env(step(done=True)), Script("abcd$"), {"max_tokens": 8}, Status.DONE, 5),
        # an observation that leaves no room for a token is not even read
        (Env(step("x" * 300)), Script("a$"), {}, Status.TOKEN_LIMIT, 2),
        (Env(step("x" * 90)), Script("a$", "b$", capacity=50), {}, Status.TOKEN_LIMIT, 2),
        # the engine's row is full before the budget is spent
        (Env(), Script("a" * 50, capacity=10), {}, Status.TOKEN_LIMIT, 7),
        (Env(), Script("a$"), {"max_tokens": 3}, Status.TOKEN_LIMIT, 0),
        (Env(step()), Script("a$", None), {}, Status.CANCELLED, 2),
        (Env(), Script(None), {}, Status.CANCELLED, 0),
        (Env(EnvError("down")), Script("a$"), {}, Status.ENV_ERROR, 2),
        (Env(step(), ValueError("bug")), Script("a$", "b$"), {}, Status.ENV_ERROR, 4),
    ],
)
def test_status(env, session, options, status, actions):
    trajectory = play(env, session, **options)
    assert trajectory.status is status
    assert sum(int(row.action_mask.sum()) for row in trajectory.rows) == actions
    assert all(len(row.tokens) <= options.get("max_tokens", 200) for row in trajectory.rows)
    assert trajectory.facts["success"] is False
    assert ("error" in trajectory.facts) == (status is Status.ENV_ERROR)


@pytest.mark.parametrize("length", [199, 200])
def test_what_is_longer_than_a_row_is_not_encoded(length):
    class Reader(ByteCodec):
        def start(self, messages, tools=()):
            assert all(len(m.content) < 200 for m in messages)
            return super().start(messages, tools)

        def extend_by(self, sampled, messages, before=(), tools=()):
            assert all(len(m.content) < 200 for m in messages)
            return super().extend_by(sampled, messages, before, tools)

    how = {"ticket": 0, "member": 0, "max_turn_tokens": 20, "max_tokens": 200, "call_deadline_s": 5.0}
    trajectory = run_episode(Env(step("x" * length, f1=0.5)), TASK, Reader(), Script("a$"), **how)
    assert trajectory.status is Status.TOKEN_LIMIT and trajectory.facts == {"success": False, "f1": 0.5}
    assert text_of(trajectory.rows[0]) == "q##a#"
    trajectory = run_episode(Env(first="x" * length), TASK, Reader(), Script(), **how)
    assert trajectory.status is Status.TOKEN_LIMIT and trajectory.rows == ()


def test_turn_cut_by_its_own_limit_is_handed_to_the_world():
    env = Env(step("malformed"), step(done=True, success=True))
    session = Script("a" * 50, "b$")
    trajectory = play(env, session, max_turn_tokens=4)
    assert env.seen == ["aaaa", "b"] and trajectory.status is Status.DONE
    # C6: the end that closes the cut turn is ours, so it is not trained
    assert trajectory.rows[0].action_mask.tolist() == [False] * 3 + [True] * 4 + [False] * 12 + [True] * 2


def test_budget_of_a_turn_shrinks_with_the_row():
    session = Script("abc</s>", "d</s>", "e$")
    play(Env(step(""), step(""), step(done=True)), session, max_tokens=16, max_turn_tokens=10)
    # 16 - 3 = 13 → 10; 16 - 10 - 3 = 3
    assert [asked for _, asked, _ in session.calls] == [10, 3]


def test_a_limit_is_failure_and_keeps_the_last_facts():
    env = Env(step(success=True, f1=0.5), max_turns=1)
    trajectory = play(env, Script("a$"))
    assert trajectory.status is Status.TURN_LIMIT and trajectory.facts == {"success": False, "f1": 0.5}


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        "text",
        (Observation("x"), True, {}),
        Step("text", True, {"success": True}),
        Step(Observation(None), True, {"success": True}),
        Step(Observation("x"), "yes", {"success": True}),
        Step(Observation("x"), True, None),
        Step(Observation("x"), True, {}),
        Step(Observation("x"), False, {"success": 1.0}),
        Step(Observation("x"), True, [("success", True)]),
    ],
)
def test_garbage_is_an_env_error(garbage):
    trajectory = play(Env(garbage), Script("a$"))
    assert trajectory.status is Status.ENV_ERROR and "the world gave" in trajectory.facts["error"]
    assert trajectory.facts["success"] is False


class Sly:
    """Whoever looks at it is hurt."""

    def __repr__(self):
        raise RuntimeError("no repr")


class Lazy(dict):
    def __iter__(self):
        raise RuntimeError("the connection is gone")

    keys = __iter__


def deep(n=2000):
    value = ()
    for _ in range(n):
        value = (value,)
    return value


@pytest.mark.parametrize(
    "garbage",
    [
        Sly(),
        10**5000,
        Step(Observation("x"), Sly(), {"success": True}),
        Step(Observation("x"), True, {"success": 10**5000}),
        Step(Observation("x"), True, Lazy(success=True)),
        Step(Observation("x"), True, {"success": False, "gave_up": np.array([0, 1])}),
        Step(Observation("x"), False, {"success": False, "seconds": 10**400}),
        Step(Observation("x"), True, {"success": True, "nested": deep()}),
    ],
    ids=["no repr", "long number", "done", "success", "lazy", "gave up", "seconds", "deep"],
)
def test_an_answer_that_cannot_even_be_read_is_an_env_error(garbage):
    trajectory = play(Env(garbage), Script("a$", "b$"), max_seconds=5.0)
    assert trajectory.status is Status.ENV_ERROR and trajectory.to_bytes()


def test_what_a_world_reports_is_what_it_was_then():
    """It may go on writing into its own lists: in the next episode, say, before this one is judged."""
    log = []
    first = play(Env(lambda: log.append("a") or step(done=True, success=True, log=log)), Script("a$"))
    log.clear()
    log.append("b")
    assert first.facts["log"] == ["a"]


def test_a_world_without_labels_tells_no_success():
    env = Env(Step(Observation("x"), True, {"answer": "7"}))
    env.spec = dataclasses.replace(env.spec, labelled=False)
    trajectory = play(env, Script("a$"))
    assert trajectory.status is Status.DONE and trajectory.facts == {"answer": "7"}


@pytest.mark.parametrize("fact", [{1, 2}, 10**400, "\ud83d", object()])
def test_facts_that_cannot_be_kept_are_an_env_error(fact):
    trajectory = play(Env(step(done=True, success=True, odd=fact)), Script("a$"))
    assert trajectory.status is Status.ENV_ERROR and "facts that are not plain data" in trajectory.facts["error"]
    assert trajectory.to_bytes()


def test_what_ends_a_program_ends_the_episode():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    class Sly(Exception):
        def __str__(self):
            raise SystemExit(4)

    for error in (SystemExit(3), Odd(), Sly()):
        trajectory = play(Env(error), Script("a$"))
        assert trajectory.status is Status.ENV_ERROR and type(error).__name__ in trajectory.facts["error"]


def test_garbage_from_reset_leaves_no_row():
    trajectory = play(Env(first=None), Script())
    assert trajectory.status is Status.ENV_ERROR and trajectory.rows == ()


def test_error_note_says_what_and_where():
    def boom():
        raise KeyError("index is gone")

    note = play(Env(boom), Script("a$")).facts["error"]
    assert "KeyError: 'index is gone'" in note and 'raise KeyError("index is gone")' in note
    assert "test_worker.py" in note and "/test_worker.py" not in note


def test_an_answer_that_comes_too_late_is_an_env_error():
    now = [0.0]

    def slow():
        now[0] += 7.0
        return step(done=True, success=True)

    trajectory = play(Env(slow), Script("a$"), clock=lambda: now[0])
    assert trajectory.status is Status.ENV_ERROR and "took 7.0 s, deadline 5.0 s" in trajectory.facts["error"]


@pytest.mark.parametrize("max_seconds, status", [(None, Status.DONE), (6.0, Status.DONE), (5.9, Status.TIME_LIMIT)])
def test_seconds_in_the_worlds_calls_are_bounded(max_seconds, status):
    now = [0.0]

    def slow():  # 2 s a step; what is sampled between takes 100 s
        now[0] += 2.0
        return step(done=now[0] > 206, success=now[0] > 206, f1=0.5)

    def sampling(n):
        now[0] += 100.0

    session = Script("a$", "b$", "c$", on_turn=sampling)
    trajectory = play(Env(slow, slow, slow), session, clock=lambda: now[0], max_seconds=max_seconds)
    assert trajectory.status is status and trajectory.status.scored
    assert trajectory.facts == {"success": status is Status.DONE, "f1": 0.5}
    assert trajectory.rows[0].action_mask.sum() == 6  # the turn that ran over is part of the row


def test_a_world_with_a_clock_of_its_own_is_bounded_by_that_alone():
    now = [0.0]

    def answer(seconds, **facts):
        def slow():
            now[0] += 4.0  # wall seconds, which do not count
            return step(seconds=seconds, **facts)

        return slow

    env = Env(answer(0.0), answer(3), answer(np.float32(3.5), done=True, success=True))
    assert play(env, Script("a$", "b$", "c$"), clock=lambda: now[0], max_seconds=3.5).status is Status.DONE
    env = Env(answer(3.0), answer(4.0, done=True, success=True))
    trajectory = play(env, Script("a$", "b$"), clock=lambda: now[0], max_seconds=3.5)
    assert trajectory.status is Status.TIME_LIMIT and trajectory.facts == {"success": False, "seconds": 4.0}
    for bad in ("soon", float("nan"), None):
        trajectory = play(Env(step(seconds=bad)), Script("a$"), max_seconds=3.5)
        assert trajectory.status is Status.ENV_ERROR and "want a finite number of seconds" in trajectory.facts["error"]


def test_a_failed_program_raises():
    class Broken:
        def generate(self, *_, **__):
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        play(Env(), Broken())


def test_every_ending_can_be_stored():
    for env, session in [(Env(step(done=True, f1=np.float32(0.5))), Script("a$")), (Env(None), Script("a$"))]:
        trajectory = play(env, session)
        assert type(trajectory).from_bytes(trajectory.to_bytes()).status is trajectory.status


def test_transcript_has_the_rows_of_the_live_episode():
    live = play(Env(step("obs"), step("bye", done=True, success=True)), Script("a</s>zz", "yes$"))
    turns = [("a</s>zz", "obs"), ("yes", "bye")]
    script = transcribe(ByteCodec(), TASK, turns, {"success": True}, stop=("</s>",), ticket=3, member=2)
    for name in ("tokens", "turn", "action_mask"):
        np.testing.assert_array_equal(getattr(script.rows[0], name), getattr(live.rows[0], name))
    assert script.facts == live.facts and script.status is live.status
    assert not script.rows[0].behavior_logp.any()
    np.testing.assert_array_equal(script.rows[0].version, np.where(script.rows[0].action_mask, 0, -1))
