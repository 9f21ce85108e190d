"""The pool: a group leaves the table whichever way its members end, nobody waits for ever, and close() leaves nothing
behind.
"""

import itertools
import threading
import time

import numpy as np
import pytest

from envs.base import EnvError, EnvSpec, Message, Observation, Step, Task
from models.config import ModelConfig
from models.sampling import Sampling
from rl.rollout import pool as pools
from rl.rollout import table as tables
from rl.rollout.engine import Engine
from rl.rollout.failures import Budget
from rl.rollout.keys import request_key
from rl.rollout.pool import Pool, PoolClosed, PoolError
from rl.rollout.session import EngineBusy, EngineClosed
from rl.rollout.watched import guarded
from rl.types import Row, Status, Trajectory
from tests.models.weights import drawn

TASK = Task("task-0", "toy", "train", 0, (), {})


class FakeSession:
    def __init__(self, engine, key):
        self.engine, self.key, self._wake = engine, key, threading.Event()

    def generate(self):
        if self.engine.blocks:
            self._wake.wait()
        if self.engine.error:
            raise self.engine.error
        return "cancelled" if self._wake.is_set() else "stop"

    def close(self):
        self._wake.set()
        self.engine.sessions.discard(self)


class FakeEngine:
    """Sessions with a `generate` that answers at once, or only when it is closed."""

    def __init__(self, blocks=False, residents=1000, error=None):
        self.blocks, self.residents, self.error, self.sessions, self.keys = blocks, residents, error, set(), []

    def open(self, key, sampling, *, timeout_s):
        if len(self.sessions) >= self.residents:
            time.sleep(min(timeout_s, 0.05))
            raise TimeoutError("no row")
        session = FakeSession(self, key)
        self.sessions.add(session)
        self.keys.append(tuple(key))
        return session

    def stats(self):
        return {"sessions": len(self.sessions)}


class FakeEnv:
    spec = EnvSpec("fake", (), 1)

    def __init__(self, play):
        self.play, self.closed = play, False

    def reset(self, task):
        return Observation("")

    def step(self, action):
        return self.play(action)

    def close(self):
        self.closed = True


def row():
    return Row(
        np.array([1, 2], np.int32),
        np.zeros(2, np.int32),
        np.array([False, True]),
        np.array([0, -1], np.float32),
        np.array([-1, 0], np.int32),
    )


def episode(env, task, codec, session, *, ticket, member, call_deadline_s):
    """One turn of one action: its name is `ticket/member`."""
    env.reset(task)
    if session.generate() == "cancelled":
        return Trajectory(task.task_id, ticket, member, Status.CANCELLED, (), {}, {})
    step = guarded("step", env.step, f"{ticket}/{member}")
    if not isinstance(step, Step):
        raise EnvError(f"garbage: {step!r}")
    return Trajectory(task.task_id, ticket, member, Status.DONE, (row(),), dict(step.facts), {})


def ok(action):
    return Step(Observation(""), True, {"success": True})


def make_pool(play=ok, engine=None, **kwargs):
    options = {"threads": 4, "seed": 7, "sampling": Sampling(), "call_deadline_s": 5.0, "episode": episode, **kwargs}
    return Pool(engine or FakeEngine(), lambda: FakeEnv(play), None, **options)


def env_threads():
    return [t for t in threading.enumerate() if t.name.startswith(("env-", "pool-"))]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(env_threads())
    yield
    until = time.monotonic() + 2
    while set(env_threads()) - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(env_threads()) - before


def test_groups_come_back_complete_and_in_member_order():
    engine = FakeEngine()
    pool = make_pool(engine=engine)
    for ticket in range(5):
        pool.submit_group(ticket, TASK, 3)
    groups = sorted((pool.next_group(5) for _ in range(5)), key=lambda g: g.ticket)
    assert [[(t.ticket, t.member) for t in g.trajectories] for g in groups] == [
        [(i, m) for m in range(3)] for i in range(5)
    ]
    assert not any(g.dropped for g in groups)
    # Randomness is addressed, whichever thread took the job.
    assert sorted(engine.keys) == sorted(tuple(request_key(7, t, m)) for t in range(5) for m in range(3))
    assert pool.close()
    stats = pool.stats()
    assert (stats["groups_done"], stats["groups_open"], stats["live_threads"], len(engine.sessions)) == (5, 0, 0, 0)


@pytest.mark.parametrize(
    "pair", itertools.product(["ok", "raise", "timeout", "garbage", "cancel"], repeat=2), ids="-".join
)
def test_every_pair_of_outcomes_closes_its_group(pair):
    """CASES E3: a group of four of which two members end in any way; the others are scored, the group delivered."""
    release = threading.Event()

    def play(action):
        ticket, member = action.split("/")
        outcome = pair[int(member)] if int(member) < 2 else "ok"
        if outcome == "raise":
            raise KeyError("world")
        if outcome == "timeout":
            release.wait(10)
        return [] if outcome == "garbage" else ok(action)

    def cancelling(env, task, codec, session, *, ticket, member, call_deadline_s):
        if member < 2 and pair[member] == "cancel":
            session.close()
        return episode(env, task, codec, session, ticket=ticket, member=member, call_deadline_s=call_deadline_s)

    engine = FakeEngine()
    pool = make_pool(play, engine, call_deadline_s=0.05, budget=Budget(1, 1), episode=cancelling)
    pool.submit_group(0, TASK, 4)
    group = pool.next_group(5)
    want = {"ok": Status.DONE, "cancel": Status.CANCELLED}
    assert [t.status for t in group.trajectories] == [want.get(o, Status.ENV_ERROR) for o in pair] + [Status.DONE] * 2
    assert group.retries == sum(o in ("raise", "timeout", "garbage") for o in pair)
    assert group.dropped == ("cancel" in pair)
    assert pool.stats()["groups_open"] == 0
    assert pool.stats()["lost_threads"] == 2 * pair.count("timeout")
    release.set()
    assert pool.close()
    assert not engine.sessions


def test_a_retry_may_succeed_and_the_world_is_a_fresh_one():
    failed, made = set(), []

    def play(action):
        if action not in failed:
            failed.add(action)
            raise OSError("flaky")
        return ok(action)

    def make_env():
        made.append(FakeEnv(play))
        return made[-1]

    pool = Pool(
        FakeEngine(), make_env, None, threads=1, seed=0, sampling=Sampling(), call_deadline_s=5, episode=episode
    )
    pool.submit_group(0, TASK, 2)
    group = pool.next_group(5)
    assert [t.status for t in group.trajectories] == [Status.DONE] * 2 and group.retries == 2
    assert pool.close()
    assert len(made) == 3 and all(env.closed for env in made)  # the first, and one after each error


def test_too_few_scored_members_drop_the_group_within_the_budget():
    attempts = []

    def play(action):
        attempts.append(action)
        if action.endswith("/0"):
            return ok(action)
        raise OSError("down for good")

    pool = make_pool(play, budget=Budget(infrastructure=2, group=3))
    pool.submit_group(0, TASK, 3)
    group = pool.next_group(5)
    assert group.dropped and group.retries == 3 and len(attempts) == 3 + 3
    assert [t.status.scored for t in group.trajectories] == [True, False, False]
    assert "down for good" in group.trajectories[1].facts["error"]
    assert pool.stats()["groups_dropped"] == 1
    assert pool.close()


def test_hung_world_is_abandoned_and_its_place_filled():
    """Every thread hangs once; the pool still plays on, and close() counts what it could not join."""
    release = threading.Event()

    def play(action):
        if action.startswith("0/"):
            release.wait(10)
        return ok(action)

    engine = FakeEngine()
    pool = make_pool(play, engine, threads=2, call_deadline_s=0.05, budget=Budget(infrastructure=0))
    pool.submit_group(0, TASK, 2)
    pool.submit_group(1, TASK, 2)
    groups = {g.ticket: g for g in (pool.next_group(5), pool.next_group(5))}
    assert groups[0].dropped and "deadline" in groups[0].trajectories[0].facts["error"]
    assert [t.status for t in groups[1].trajectories] == [Status.DONE] * 2
    assert not engine.sessions  # a hung thread holds no row
    began = time.monotonic()
    assert pool.close(2.0) and time.monotonic() - began < 2
    assert (pool.stats()["lost_threads"], pool.stats()["hung_threads"]) == (2, 2)
    release.set()


def test_close_is_bounded_with_blocked_generation_and_consumers():
    """CASES E1: all threads blocked in generate or open, three consumers blocked; submit never blocks."""
    engine = FakeEngine(blocks=True, residents=2)
    pool = make_pool(engine=engine)
    pool.submit_group(0, TASK, 4)
    ends = []

    def blocked(call):
        try:
            call()
            ends.append(None)
        except PoolError as error:
            ends.append(type(error))

    callers = [threading.Thread(target=blocked, args=(lambda: pool.next_group(30),)) for _ in range(3)]
    for caller in callers:
        caller.start()
    while len(engine.sessions) < 2:
        time.sleep(0.001)
    began = time.monotonic()
    assert pool.close()
    for caller in callers:
        caller.join(1)
    assert time.monotonic() - began < 2
    assert ends == [PoolClosed] * 3
    with pytest.raises(PoolClosed, match="closed"):
        pool.next_group(0)
    assert pool.close()  # idempotent
    stats = pool.stats()
    assert (stats["groups_open"], stats["groups_cancelled"], stats["live_threads"], len(engine.sessions)) == (
        0,
        1,
        0,
        0,
    )


def test_a_consumer_blocked_in_next_group_wakes_on_close():
    pool = make_pool(engine=FakeEngine(blocks=True))
    pool.submit_group(0, TASK, 1)
    timer = threading.Timer(0.05, pool.close)
    timer.start()
    with pytest.raises(PoolClosed):
        pool.next_group(5)
    timer.join()


def test_a_dead_producer_reaches_the_consumer():
    """CASES E2: whatever is not the world's fault ends the run, naming the cause."""
    pool = make_pool(engine=FakeEngine(error=RuntimeError("device lost")))
    pool.submit_group(0, TASK, 4)
    with pytest.raises(PoolError, match="RuntimeError: device lost") as caught:
        pool.next_group(5)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(PoolError, match="device lost"):
        pool.submit_group(1, TASK, 4)
    assert pool.close() and pool.stats()["groups_open"] == 0


def test_a_world_that_always_fails_is_fatal_after_so_many_in_a_row(monkeypatch):
    monkeypatch.setattr(tables, "MOST_PAUSE_S", 0.0)

    def play(action):
        raise ConnectionError("no route to the world")

    pool = make_pool(play, budget=Budget(infrastructure=1), failures_in_row=6, outage_s=0.0)
    with pytest.raises(PoolError, match="6 episodes in a row .* no route to the world"):
        for ticket in range(10):
            pool.submit_group(ticket, TASK, 2)
            assert pool.next_group(5).dropped
    assert pool.close()


@pytest.mark.parametrize("error", [ConnectionError("refused"), KeyError("rows")], ids=["lost", "data"])
def test_an_outage_is_fatal_only_when_it_lasts(monkeypatch, error):
    """What fails for its data fails as well a minute later; a service may have come back."""
    monkeypatch.setattr(tables, "MOST_PAUSE_S", 0.0)
    left = [error] * 40

    def play(action):
        if left:
            raise left.pop()
        return ok(action)

    pool, dropped = make_pool(play, budget=Budget(1, 1), failures_in_row=6, threads=1), []
    try:
        for ticket in range(11):
            pool.submit_group(ticket, TASK, 2)
            dropped.append(pool.next_group(10).dropped)
    except PoolError as failed:
        assert isinstance(error, KeyError) and "6 episodes in a row" in str(failed)
    else:
        assert isinstance(error, ConnectionError) and dropped == [True] * 10 + [False]
    assert pool.close()


def test_after_a_pause_every_thread_that_has_work_begins():
    """None was woken for its job: the threads that waited for the pause were."""
    all_there, pool = threading.Barrier(4), None

    def play(action):
        assert time.monotonic() >= until
        all_there.wait(10)
        return ok(action)

    pool = make_pool(play)
    until = pool._table.not_before_s = time.monotonic() + 0.2
    for ticket in range(4):
        pool.submit_group(ticket, TASK, 1)
        time.sleep(0.01)
    assert [pool.next_group(10).trajectories[0].status for _ in range(4)] == [Status.DONE] * 4
    assert pool.close()


def test_the_first_that_comes_through_ends_the_pause():
    began, leave = threading.Event(), threading.Event()

    def play(action):
        began.set()
        leave.wait(10)
        return ok(action)

    pool = make_pool(play, threads=3)
    pool.submit_group(0, TASK, 1)
    assert began.wait(10)
    pool._table.not_before_s = time.monotonic() + 1000.0
    pool.submit_group(1, TASK, 2)
    leave.set()
    assert sorted(pool.next_group(10).ticket for _ in range(2)) == [0, 1]
    assert pool.close()


@pytest.mark.parametrize("episodes", [0, 1])
def test_a_thread_that_dies_closes_its_world(episodes):
    """Also when it dies in the first episode that the world plays."""
    made = []

    def make_env():
        made.append(FakeEnv(ok))
        return made[-1]

    engine, options = FakeEngine(), {"sampling": Sampling(), "call_deadline_s": 5, "episode": episode}
    pool = Pool(engine, make_env, None, threads=1, seed=0, **options)
    for ticket in range(episodes):
        pool.submit_group(ticket, TASK, 1)
        pool.next_group(5)
    engine.error = RuntimeError("device lost")
    pool.submit_group(9, TASK, 1)
    with pytest.raises(PoolError, match="device lost"):
        pool.next_group(5)
    assert pool.close()
    assert len(made) == 1 and made[0].closed and not engine.sessions


def test_a_call_may_end_while_the_supervisor_looks():
    """`call_since` is set to None by the thread at any time: it is read once, wherever that read falls."""
    pool = make_pool(threads=1, call_deadline_s=0.05)
    slot = pool._slots[0]

    class Fleeting(type(slot)):  # the first read sees a call that is long overdue, every later one none
        reads = 0

        @property
        def call_since(self):
            self.reads += 1
            return 0.0 if self.reads == 1 else None

        @call_since.setter
        def call_since(self, value):
            pass

    slot.__class__ = Fleeting
    pool._inspect()
    pool.submit_group(0, TASK, 2)
    assert [t.status for t in pool.next_group(5).trajectories] == [Status.DONE] * 2
    assert pool.stats()["lost_threads"] == 1
    assert pool.close()


def test_a_world_that_cannot_be_made_is_the_worlds_fault():
    def make_env():
        raise OSError("no disk")

    pool = Pool(
        FakeEngine(),
        make_env,
        None,
        threads=2,
        seed=0,
        sampling=Sampling(),
        call_deadline_s=5,
        episode=episode,
        budget=Budget(infrastructure=0),
    )
    pool.submit_group(0, TASK, 2)
    assert "no disk" in pool.next_group(5).trajectories[0].facts["error"]
    assert pool.close()


def test_no_progress_is_noticed():
    pool = make_pool(engine=FakeEngine(blocks=True), watchdog_s=0.1)
    pool.submit_group(0, TASK, 2)
    with pytest.raises(PoolError, match="no token came in 0.1 s, 1 groups open"):
        pool.next_group(5)
    assert pool.close()


class Clock:
    """Monotonic seconds that pass when a test says so. For the rest it is the module `time`."""

    def __init__(self):
        self.now = time.monotonic()

    def monotonic(self):
        return self.now

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.mark.parametrize("moves", ["a call ended", "a call runs", "a token came", "nothing"])
def test_whatever_moves_is_progress(monkeypatch, moves):
    """An episode of many calls, or of one that takes long, is no hang, however long no episode ends."""
    clock, engine = Clock(), FakeEngine(blocks=True)
    pool = make_pool(engine=engine, watchdog_s=100.0, call_deadline_s=1e6, threads=1)
    monkeypatch.setattr(engine, "stats", lambda: {"tokens_kept": clock.now if moves == "a token came" else 7})
    pool.submit_group(0, TASK, 1)
    while not engine.sessions:
        time.sleep(0.001)
    monkeypatch.setattr(pools, "time", clock)
    slot = pool._slots[0]
    for _ in range(5):
        if moves == "a call runs":
            slot.call_since = clock.now
        slot.calls += moves == "a call ended"
        pool._inspect()
        clock.now += 99.0
    failed, slot.call_since = pool._failure, None
    monkeypatch.undo()
    assert pool.close()
    assert isinstance(failed, PoolError) if moves == "nothing" else failed is None


def test_run_many_keeps_the_order_of_tasks_and_apart_from_training_groups():
    pool = make_pool(min_scored=1)
    pool.submit_group(100, TASK, 2)
    tasks = [Task(f"task-{i}", "toy", "test", i, (), {}) for i in range(7)]
    groups = pool.run_many(tasks, samples=2, sampling=Sampling(greedy=True), seed=3, first_ticket=2**30)
    assert [g.ticket for g in groups] == list(range(2**30, 2**30 + 7))
    assert [g.task.task_id for g in groups] == [t.task_id for t in tasks]
    assert all(len(g.trajectories) == 2 and not g.dropped for g in groups)
    assert pool.next_group(5).ticket == 100
    assert pool.close()


def test_errors_name_the_remedy():
    pool = make_pool()
    with pytest.raises(PoolError, match="call submit_group first"):
        pool.next_group(1)
    with pytest.raises(ValueError, match="size 0"):
        pool.submit_group(0, TASK, 0)
    assert pool.close()
    with pytest.raises(ValueError, match="threads=0"):
        make_pool(threads=0)


@pytest.mark.parametrize("how", [{"greedy": True}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_training_samples_by_temperature_alone(how):
    pool = make_pool(sampling=Sampling(**how))
    with pytest.raises(ValueError, match="want temperature alone"):
        pool.submit_group(0, TASK, 2)
    assert len(pool.run_many([TASK])) == 1  # an evaluation may
    assert pool.close()


def test_training_has_no_constraint():
    pool = make_pool(constraint=object(), episode=lambda *args, constraint, **kwargs: episode(*args, **kwargs))
    with pytest.raises(ValueError, match="got a constraint, want none"):
        pool.submit_group(0, TASK, 2)
    assert len(pool.run_many([TASK])) == 1  # an evaluation may
    assert pool.close()


def test_a_pool_whose_engine_drains_ends_and_has_not_failed():
    """What was played is delivered; whoever waits is told, of the reason too; nothing is left."""

    class Draining(FakeEngine):
        def open(self, key, sampling, *, timeout_s):
            if len(self.keys) == 2:
                raise EngineClosed("the engine is draining; make a new Engine")
            return super().open(key, sampling, timeout_s=timeout_s)

    pool = make_pool(engine=Draining(), threads=1)
    for ticket in range(3):
        pool.submit_group(ticket, TASK, 2)
    with pytest.raises(PoolClosed, match="the engine is draining; make a new Engine, and a new Pool"):
        while True:
            assert pool.next_group(10).ticket == 0
    with pytest.raises(PoolClosed, match="draining"):
        pool.submit_group(9, TASK, 2)
    assert pool.close() and pool.close()
    stats = pool.stats()
    assert (stats["groups_done"], stats["groups_cancelled"], stats["groups_open"]) == (1, 2, 0)


def test_a_busy_engine_is_asked_again():
    class Busy(FakeEngine):
        refusals = 3

        def open(self, key, sampling, *, timeout_s):
            if self.refusals:
                self.refusals -= 1
                raise EngineBusy("try again later")
            return super().open(key, sampling, timeout_s=timeout_s)

    pool = make_pool(engine=Busy(), threads=2)
    pool.submit_group(0, TASK, 2)
    assert not pool.next_group(10).dropped
    assert pool.close()


class CharCodec:
    """Ids 0-63 are the characters from "0" on; 63 ends a turn."""

    end_ids = (63,)
    world_role, opened = "tool", ""

    def start(self, messages, tools=()):
        return [ord(c) - 48 for m in messages for c in m.content]

    def turn_text(self, ids):
        return self.view(ids[:-1] if ids[-1:] == [63] else ids)

    def extend_by(self, sampled_ids, messages, before=(), tools=()):
        return [ord(c) - 48 for m in messages for c in m.content]

    def view(self, ids):
        return "".join(chr(48 + i) for i in ids)

    def fewest_ids(self, text):
        return len(text)


class EchoEnv:
    """Answers each action with its last three characters; a retried world raises at its first step."""

    spec = EnvSpec("echo", ("5", "ab"), 3)

    def __init__(self, fails):
        self.fails = fails

    def reset(self, task):
        self.turns = 0
        return Observation("")

    def step(self, action):
        if self.fails.pop() if self.fails else False:
            raise OSError("flaky")
        self.turns += 1
        return Step(Observation(action[-3:]), self.turns == 3, {"success": action.endswith("5")})

    def close(self):
        pass


def test_real_episodes_are_a_function_of_their_address_alone():
    """Pool, worker and engine together: threads, lanes and failures of the world change nothing in what is trained."""
    config = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64)
    params = drawn(config)
    task = Task("t", "echo", "train", 0, (Message("user", "0123"),), {})

    def run(threads, fails):
        engine = Engine(
            config, params, version=3, lanes=2, residents=3, capacity=64, view=CharCodec().view, end_ids=(63,),
            round_tokens=4, prefill_rows=2, prefill_chunk=8, contexts=(24, 64),
        )  # fmt: skip
        pool = Pool(
            engine, lambda: EchoEnv(fails), CharCodec(), threads=threads, seed=1, sampling=Sampling(),
            call_deadline_s=5.0, max_turn_tokens=9, max_tokens=60,
        )  # fmt: skip
        for ticket in range(3):
            pool.submit_group(ticket, task, 2)
        groups = sorted((pool.next_group(60) for _ in range(3)), key=lambda g: g.ticket)
        assert pool.close()
        assert engine.stats()["sessions"] == 0  # the pool holds no row, though the engine is open
        engine.close()
        return groups

    one, many = run(1, []), run(5, [True, False, True, True])
    assert sum(g.retries for g in one) == 0 and sum(g.retries for g in many) == 3
    for a, b in zip(one, many, strict=True):
        assert [t.to_bytes() for t in a.trajectories] == [t.to_bytes() for t in b.trajectories]
    rows = [t.rows[0] for g in one for t in g.trajectories]
    assert all((r.version[r.action_mask] == 3).all() and (r.behavior_logp[r.action_mask] < 0).all() for r in rows)
    assert len({r.tokens.tobytes() for r in rows}) == 6


def test_real_episodes_of_an_engine_that_drains_are_cancelled():
    """Between two turns: the turn in flight ends, the next is cancelled, and the next episode finds no engine."""
    config = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64)
    task = Task("t", "echo", "train", 0, (Message("user", "0123"),), {})
    engine = Engine(
        config, drawn(config), version=3, lanes=2, residents=3, capacity=64, view=CharCodec().view, end_ids=(63,),
        round_tokens=4, prefill_rows=2, prefill_chunk=8, contexts=(24, 64),
    )  # fmt: skip
    stepped, drained = threading.Event(), threading.Event()

    class Waiting(EchoEnv):
        def step(self, action):
            stepped.set()
            drained.wait(30)
            return super().step(action)

    pool = Pool(
        engine, lambda: Waiting([]), CharCodec(), threads=1, seed=1, sampling=Sampling(),
        call_deadline_s=60.0, max_turn_tokens=9, max_tokens=60,
    )  # fmt: skip
    pool.submit_group(0, task, 1)
    pool.submit_group(1, task, 1)
    assert stepped.wait(60)
    engine.drain(30)
    drained.set()
    group = pool.next_group(30)
    assert group.dropped and [t.status for t in group.trajectories] == [Status.CANCELLED]
    with pytest.raises(PoolClosed, match="draining"):
        pool.next_group(30)
    assert pool.close() and engine.stats()["sessions"] == 0
    engine.close()
