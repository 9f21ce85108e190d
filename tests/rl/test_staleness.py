"""No token is trained more than `max_staleness` versions after it was sampled; nothing waits for ever."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.rollout.staleness import StalenessGate, capacity


@pytest.mark.parametrize(
    "max_staleness, batch, version, accepted, running, max_running, want",
    [
        # AReaL's own test table: (η + v + 1)·B − (accepted + running), capped by concurrency
        (2, 4, 0, 0, 0, 100, 12),
        (2, 4, 5, 0, 0, 100, 32),
        (0, 8, 0, 0, 0, 100, 8),
        (0, 8, 5, 0, 0, 100, 48),
        (2, 4, 0, 0, 3, 10, 7),  # min(10 − 3, 12 − 3)
        (2, 4, 0, 5, 0, 20, 7),  # 12 − 5
        (10, 32, 0, 0, 0, 100, 100),
        (0, 0, 0, 0, 0, 100, 1),  # a batch of 0 counts as 1
        (0, 4, 1, 4, 0, 10_000, 4),
        (2, 4, 1, 4, 3, 10_000, 9),
        (4, 512, 3, 1536, 0, 10_000, 2560),
        (0, 4, 1, 12, 0, 100, -4),  # may be negative: start none
    ],
)
def test_capacity(max_staleness, batch, version, accepted, running, max_running, want):
    limits = {"batch": batch, "max_staleness": max_staleness, "max_running": max_running}
    assert capacity(version, accepted, running, **limits) == want


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 9), st.lists(st.integers(0, 9), max_size=300))
def test_bound_holds_under_any_schedule(batch, max_staleness, max_running, choices):
    gate = StalenessGate(batch=batch, max_staleness=max_staleness, max_running=max_running)
    started, running, done, version, trained = {}, [], [], 0, []
    for choice in choices:
        if choice < 4 and gate.acquire(timeout_s=0):
            running.append(len(started))
            started[len(started)] = version
        elif choice < 8 and running:  # any running group may end first: short episodes overtake long ones
            ticket = running.pop(choice % len(running))
            if choice == 7:
                gate.drop()
            else:
                gate.accept()
                done.append(ticket)
        elif choice >= 8:
            # batch v: the next `batch` tickets that were not dropped, in ticket order; it waits for the slow ones
            ready = sorted(done)
            while len(ready) >= batch and not any(t < ready[batch - 1] for t in running):
                for ticket in ready[:batch]:
                    trained.append(version - started[ticket])
                    done.remove(ticket)
                version += 1
                gate.on_publish(version)
                ready = sorted(done)
        assert len(running) == gate.stats()["running"] <= max_running
    assert all(0 <= lag <= max_staleness for lag in trained)


def test_sync_admits_one_batch_per_version():
    gate = StalenessGate(batch=2, max_staleness=0, max_running=9)
    assert [gate.acquire(timeout_s=0) for _ in range(3)] == [True, True, False]
    gate.accept()
    gate.drop()  # its place goes to the next ticket
    assert [gate.acquire(timeout_s=0) for _ in range(2)] == [True, False]
    gate.accept()
    assert not gate.acquire(timeout_s=0)  # lag max + 1
    gate.on_publish(1)
    assert gate.acquire(timeout_s=0)


@pytest.mark.parametrize("wake, want", [("on_publish", True), ("drop", True), ("close", False)])
def test_a_waiting_thread_wakes(wake, want):
    gate = StalenessGate(batch=1, max_staleness=0, max_running=4)
    assert gate.acquire()
    got = []
    waiter = threading.Thread(target=lambda: got.append(gate.acquire()), name="waiter")
    waiter.start()
    {"on_publish": lambda: gate.on_publish(1), "drop": gate.drop, "close": gate.close}[wake]()
    waiter.join(5)
    assert not waiter.is_alive() and got == [want]
    gate.close()
    assert not gate.acquire()


def test_many_threads_never_exceed_the_bound():
    gate = StalenessGate(batch=4, max_staleness=1, max_running=3)
    peak, lock = [], threading.Lock()

    def work():
        while gate.acquire(timeout_s=0.05):
            with lock:
                peak.append(gate.stats()["running"])
            gate.accept()

    threads = [threading.Thread(target=work, name=f"w{i}") for i in range(8)]
    [t.start() for t in threads]
    [t.join(5) for t in threads]
    stats = gate.stats()
    assert max(peak) <= 3 and stats["accepted"] == 8 and stats["running"] == 0  # (1 + 0 + 1) · 4


def test_a_resumed_gate_lets_in_what_was_under_way_and_what_waits():
    gate = StalenessGate(batch=2, max_staleness=1, max_running=9)
    gate.start_at(1)
    assert (gate.stats()["accepted"], gate.stats()["capacity"]) == (2, 4)  # (1 + 1 + 1) · 2 − 2
    gate.acquire()
    gate.accept()  # a group whose episodes were saved
    assert gate.stats()["capacity"] == 3
    with pytest.raises(RuntimeError, match="want a fresh one"):
        gate.start_at(1)


def test_what_was_sampled_before_is_allowed_by_its_turn():
    gate = StalenessGate(batch=2, max_staleness=1, max_running=9)
    gate.on_publish(3)  # places 0 and 1 are trained at version 3, 2 and 3 at version 4, ...
    assert [gate.allows(2, place) for place in range(4)] == [True, True, False, False]
    assert [gate.allows(sampled, 3) for sampled in (1, 3, None)] == [False, True, True]
    assert [gate.allows(None, place) for place in (3, 4)] == [True, False]


def test_errors():
    gate = StalenessGate(batch=2, max_staleness=0, max_running=9)
    with pytest.raises(RuntimeError, match="accept: got no running group"):
        gate.accept()
    gate.on_publish(2)
    with pytest.raises(ValueError, match="got version 1 after 2"):
        gate.on_publish(1)
    with pytest.raises(ValueError, match="want at least one group a batch"):
        StalenessGate(batch=0, max_staleness=0, max_running=1)
