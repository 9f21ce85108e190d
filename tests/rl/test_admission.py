"""Who may open a session and who is refused; whoever waits is woken when the engine drains, closes or dies."""

import threading
import time

import pytest

from rl.rollout.engine import EngineClosed
from rl.rollout.session import EngineBusy
from tests.models.weights import drawn
from tests.rl.engines import CONFIG, GREEDY, PROMPT, in_thread, key, make_engine, slow


@pytest.fixture(scope="module")
def params():
    return drawn(CONFIG)


@pytest.fixture
def engine(params):
    engine = make_engine(params)
    yield engine
    engine.close()


def test_open_waits_its_turn_for_a_place(engine):
    held = [engine.open(key(i), GREEDY) for i in range(4)]
    with pytest.raises(TimeoutError, match="4 of 4 sessions are open .* no place for 1 more"):
        engine.open(key(9), GREEDY, timeout_s=0.01)
    waiting = [in_thread(lambda i=i: engine.open(key(i), GREEDY)) for i in range(2)]
    held[0].close()
    held[0].close()  # idempotent: one place is free, not two
    held[1].close()
    for thread, _ in waiting:
        thread.join(5)
    sessions = held[2:] + [s for _, out in waiting for s in out]
    for session in sessions:
        session.generate([1], max_tokens=1)
    assert {s.row for s in sessions} == {0, 1, 2, 3} and engine.stats()["free_rows"] == 0


def test_drain_lets_turns_end_and_begins_none(engine, monkeypatch):
    slow(engine, monkeypatch, 0.05)
    session = engine.open(key(0), GREEDY)
    thread, out = in_thread(lambda: session.generate(PROMPT, max_tokens=20))
    while not engine.stats()["rounds"]:
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match="1 turns run on after 0.01 s"):
        engine.drain(0.01)
    with pytest.raises(EngineClosed, match="draining"):  # it drains on
        session.fork(1)
    assert session.generate([1], max_tokens=1).reason == "cancelled"
    engine.drain(60)
    thread.join(10)
    assert (out[0].reason, len(out[0].ids)) == ("length", 20)
    with pytest.raises(EngineClosed, match="draining"):
        engine.open(key(1), GREEDY)


def test_close_wakes_everyone_and_leaves_nothing(params, monkeypatch):
    engine = make_engine(params)
    sessions = [engine.open(key(i), GREEDY) for i in range(4)]
    started = threading.Event()
    slow(engine, monkeypatch, 0.05, started.set)
    callers = [in_thread(lambda s=s: s.generate(PROMPT, max_tokens=40)) for s in sessions]
    callers += [in_thread(lambda: engine.open(key(9), GREEDY)) for _ in range(2)]
    started.wait(10)
    while engine.stats()["waiting_opens"] < 2:
        time.sleep(0.001)
    engine.close(5.0)
    for thread, _ in callers:
        thread.join(2)
        assert not thread.is_alive()
    assert all(out[0].reason == "cancelled" for _, out in callers[:4])
    assert all(isinstance(out[0], EngineClosed) for _, out in callers[4:])
    engine.close()  # idempotent
    stats = engine.stats()
    assert (stats["busy_lanes"], stats["requests"], stats["sessions"], stats["free_rows"]) == (0, 0, 0, 4)
    assert not engine._thread.is_alive()
    assert sessions[0].generate([1], max_tokens=1).reason == "cancelled"
    for call in (lambda: engine.open(key(0), GREEDY), lambda: engine.publish(params, 1), engine.warm_up):
        with pytest.raises(EngineClosed):
            call()


def test_close_wakes_everyone_though_a_program_hangs(params, monkeypatch):
    engine = make_engine(params)
    sessions = [engine.open(key(i), GREEDY) for i in range(4)]
    started, go = threading.Event(), threading.Event()
    slow(engine, monkeypatch, 0.0, lambda: (started.set(), go.wait(30)))
    callers = [in_thread(lambda: sessions[0].generate(PROMPT, max_tokens=40))]
    started.wait(10)
    callers += [in_thread(engine.warm_up), in_thread(lambda: engine.open(key(9), GREEDY))]
    while engine.stats()["waiting_opens"] < 1 or not engine._commands:
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match="has not returned in 0.1 s"):
        engine.close(0.1)
    for thread, _ in callers:
        thread.join(2)
        assert not thread.is_alive()
    assert callers[0][1][0].reason == "cancelled"
    assert all(isinstance(out[0], EngineClosed) for _, out in callers[1:])
    go.set()
    engine.close(10)


def test_more_callers_than_may_wait_are_refused_at_once(params):
    engine = make_engine(params, waiting=2)
    try:
        held = [engine.open(key(i), GREEDY) for i in range(4)]
        waiting = [in_thread(lambda i=i: engine.open(key(i), GREEDY)) for i in (4, 5)]
        while engine.stats()["waiting_opens"] < 2:
            time.sleep(0.001)
        for call in (lambda: engine.open(key(9), GREEDY), lambda: held[0].fork(2)):
            with pytest.raises(EngineBusy, match="4 of 4 sessions .* 2 callers wait for one, want fewer than 2"):
                call()
        assert engine.stats()["waiting_opens"] == 2 and engine.admission.load() == 6
        held[0].close()
        held[1].close()
        for thread, out in waiting:
            thread.join(5)
            out[0].close()
        engine.open(key(9), GREEDY, timeout_s=0.1).close()  # there is room again
        assert engine.admission.load() == engine.stats()["sessions"] == 2
    finally:
        engine.close()


def test_without_a_queue_whoever_fits_is_let_in(params):
    engine = make_engine(params, waiting=0)
    try:
        sessions = [out for _, out in [in_thread(lambda i=i: engine.open(key(i), GREEDY)) for i in range(4)]]
        while not all(sessions):
            time.sleep(0.001)
        with pytest.raises(EngineBusy):
            engine.open(key(9), GREEDY)
        sessions[0][0].close()
        assert not engine.open(key(9), GREEDY).closed
    finally:
        engine.close()


def test_who_gives_up_lets_those_behind_it_in(engine):
    """A caller that waits for more places than there are holds up one that would fit."""
    held = [engine.open(key(i), GREEDY) for i in range(3)]
    forks, forked = in_thread(lambda: held[0].fork(2, timeout_s=0.3))
    while engine.stats()["waiting_opens"] < 1:
        time.sleep(0.001)
    opens, opened = in_thread(lambda: engine.open(key(9), GREEDY))
    opens.join(10)
    forks.join(10)
    assert isinstance(forked[0], TimeoutError) and not opened[0].closed
    assert (engine.admission.load(), engine.stats()["waiting_opens"]) == (4, 0)
