"""How much goes on at once: never more calls of a world than it bears, and as many episodes as keep the lanes busy."""

import contextlib
import math
import random
import threading
import time
from types import SimpleNamespace

import pytest

from envs.base import EnvError, EnvSpec, Observation, Step
from rl.rollout import concurrency, watched
from rl.rollout.concurrency import CallLimit, InFlight, Seen, adapting, next_in_flight, seen_between
from rl.rollout.failures import Budget
from rl.rollout.watched import Watch, WatchedEnv
from tests.rl.test_pool import TASK, FakeEngine, make_pool, ok


def seen(busy=1.0, calls=300, call_s=1.0, waiting=0, in_flight=10):
    return Seen(1.0, busy, calls, call_s, waiting, in_flight)


def test_one_step_by_hand():
    now, how = InFlight(10, 1.0), {"lanes": 8, "cap": 100}
    assert next_in_flight(now, seen(busy=0.5), **how).most == 12  # lanes idle: one more for every four
    assert next_in_flight(now, seen(busy=0.5, in_flight=9), **how).most == 10  # not even those are in flight
    assert next_in_flight(now, seen(busy=0.95), **how).most == 10
    assert next_in_flight(now, seen(waiting=9), **how).most == 8  # a whole set of lanes waits
    assert next_in_flight(now, seen(busy=0.5, call_s=2.1), **how) == InFlight(5, 1.1, 2.1)  # the world is crowded
    assert next_in_flight(InFlight(5, 1.1, 2.1), seen(busy=0.5, call_s=9.0), **how) == InFlight(5, 1.1, 1.1)
    few = next_in_flight(now, seen(busy=0.5, call_s=2.25, calls=50), **how)
    assert few == InFlight(12, 1.0, 0.0, 50, 112.5)  # too few calls to tell
    assert next_in_flight(few, seen(busy=0.5, call_s=2.25, calls=46), **how).most == 6  # but now
    assert next_in_flight(now, seen(call_s=0.5), **how).shortest_s == 0.5
    assert next_in_flight(InFlight(99), seen(busy=0.5, in_flight=99), **how).most == 100
    assert next_in_flight(InFlight(1), seen(waiting=9, in_flight=1), **how).most == 1


def simulated(most, *, lanes, cap, think_s, turn_s=0.1, bears=10**9, periods=120, seed=0):
    """(episodes in flight, share of lanes busy) by period, of a fleet in its steady state at each: E episodes go round
    between `lanes` lanes (a turn takes turn_s) and a world whose calls take think_s, longer where more than it bears
    are in it. The throughput is that of the slower of the three: lanes, world, the round trip itself.
    """
    rng, state, course = random.Random(seed), InFlight(most), []
    for _ in range(periods):
        episodes = state.most
        rate = min(lanes / turn_s, bears / think_s, episodes / (turn_s + think_s))
        call_s = think_s if rate < bears / think_s else episodes / rate - turn_s
        waits = max(0, episodes - lanes - round(rate * call_s))
        noise = rng.uniform(0.9, 1.1)
        course.append((episodes, rate * turn_s / lanes))
        period = seen(rate * turn_s / lanes, int(rate), call_s * noise, waits, episodes)
        state = next_in_flight(state, period, lanes=lanes, cap=cap)
    return course


@pytest.mark.parametrize("most", [1, 8, 200])
def test_it_finds_what_keeps_the_lanes_busy_and_no_more(most):
    """Eight lanes and calls of nine turns' length need 80 episodes; 200 are allowed."""
    course = simulated(most, lanes=8, cap=200, think_s=0.9)[60:]
    assert all(busy > 0.85 for _, busy in course)
    assert max(episodes for episodes, _ in course) < 100


@pytest.mark.parametrize(("lanes", "cap"), [(4, 16), (4, 32), (8, 32)])
def test_calls_of_very_different_length_are_no_crowd(lanes, cap):
    """Log-normal seconds, median .3 and sigma 1, of a world that bears any number: a few long calls say nothing."""
    rng, state, course = random.Random(0), InFlight(cap, math.inf), []
    for _ in range(600):
        calls = [rng.lognormvariate(math.log(0.3), 1.0) for _ in range(int(state.most / 0.7))]
        period = seen(0.5, len(calls), sum(calls) / max(1, len(calls)), 0, state.most)
        state = next_in_flight(state, period, lanes=lanes, cap=cap)
        course.append(state.most)
    assert min(course) == cap


def test_it_never_exceeds_what_it_may():
    course = simulated(8, lanes=8, cap=20, think_s=0.9)
    assert all(1 <= episodes <= 20 for episodes, _ in course) and course[-1][0] == 20


def test_a_crowded_world_is_not_asked_for_more():
    """A world that bears 16 calls at once: those and the turns between them are 18 episodes; 200 are allowed."""
    course = simulated(4, lanes=8, cap=200, think_s=0.9, bears=16, periods=400)[100:]
    assert sum(episodes for episodes, _ in course) / len(course) < 80
    assert sum(busy for _, busy in course) / len(course) > 0.9 * (16 / 0.9) * 0.1 / 8


def test_a_world_that_has_become_slow_is_no_crowded_one():
    state = InFlight(64, 0.1)
    for _ in range(150):
        state = next_in_flight(state, seen(busy=0.5, call_s=1.0, in_flight=state.most), lanes=8, cap=64)
    assert state.most == 64


def test_what_two_readings_say():
    before = {"lanes_used": 10, "lane_places": 20, "idle_s": 1.0, "world_steps": 5, "world_step_s": 2.0}
    now = {"lanes_used": 40, "lane_places": 60, "idle_s": 1.5, "world_steps": 15, "world_step_s": 7.0}
    now |= {"requests": 12, "busy_lanes": 8, "in_flight": 30}
    assert seen_between(before, now, 2.0) == Seen(2.0, 0.75 * 0.75, 10, 0.5, 4, 30)


def test_a_reset_that_takes_no_time_says_nothing_of_steps(monkeypatch):
    """Batch after batch begins with resets of a millisecond; steps take two seconds, however many go on at once."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(watched, "time", clock)

    class Slow:
        reset = lambda self, task: setattr(clock, "now", clock.now + 0.001)  # noqa: E731
        step = lambda self, action: setattr(clock, "now", clock.now + 2.0)  # noqa: E731

    pool = make_pool(threads=1)
    slot, state, idle = pool._slots[0], InFlight(64), {"lanes_used": 0, "lane_places": 0, "idle_s": 0.0}
    idle |= {"requests": 0, "busy_lanes": 0, "in_flight": 64}
    env, before = WatchedEnv(slot, Slow), pool.stats() | idle
    for call in [env.reset, env.step] * 10:
        for _ in range(200):
            call(None)
        after = pool.stats() | idle
        state, before = next_in_flight(state, seen_between(before, after, 1.0), lanes=8, cap=64), after
    assert pool.close() and state.most == 64


class Counting:
    """A world that counts how many of its calls run at once."""

    spec = EnvSpec("counting", (), 1)
    running, most, lock = 0, 0, threading.Lock()

    def reset(self, task):
        return Observation("")

    def step(self, action):
        with Counting.lock:
            Counting.running += 1
            Counting.most = max(Counting.most, Counting.running)
        time.sleep(0.005)
        with Counting.lock:
            Counting.running -= 1
        return Step(Observation(""), True, {"success": True})

    def close(self):
        pass


def test_never_more_calls_at_once_than_the_world_bears():
    Counting.most = 0
    world = Counting()
    pool = make_pool(world.step, threads=12, calls=CallLimit(3), call_deadline_s=5.0)
    for ticket in range(8):
        pool.submit_group(ticket, TASK, 5)
    groups = [pool.next_group(10) for _ in range(8)]
    assert pool.close() and Counting.most == 3
    assert not any(g.dropped for g in groups) and pool.stats()["env_errors"] == 0


def test_who_waits_for_a_turn_when_the_pool_closes_is_cancelled():
    began, leave = threading.Event(), threading.Event()

    def step(action):
        began.set()
        leave.wait(10)
        return ok(action)

    pool = make_pool(step, threads=6, calls=CallLimit(1), call_deadline_s=20.0, budget=Budget(0, 0, 0))
    pool.submit_group(0, TASK, 6)
    assert began.wait(10)
    closing = threading.Thread(target=pool.close)
    closing.start()
    while not pool.calls._refused:
        time.sleep(0.01)
    leave.set()
    closing.join(10)
    stats = pool.stats()
    assert stats["members_failed"] == 0 and stats["env_errors"] == 0 and stats["members_cancelled"] >= 5
    assert stats["groups_cancelled"] == 1 and stats["groups_waiting"] == 0


def test_waiting_for_a_turn_is_off_the_clock():
    """Two calls of a fifth of a second, one at a time, under a deadline that both together would miss."""
    calls = CallLimit(1)
    began_s = time.monotonic()
    pool = make_pool(lambda action: (time.sleep(0.2), ok(action))[1], threads=4, calls=calls, call_deadline_s=0.6)
    pool.submit_group(0, TASK, 4)
    group = pool.next_group(10)
    assert time.monotonic() - began_s >= 0.8 and not group.dropped and group.retries == 0
    pool.close()

    watch, spent = Watch(0), []
    env = WatchedEnv(watch, Counting, calls)

    def step():
        before = calls.clock()
        env.step("")
        spent.append(calls.clock() - before)

    with calls.turn("another"):
        thread = threading.Thread(target=step)
        thread.start()
        time.sleep(0.2)
        assert watch.call_since is None  # it has not begun
    thread.join()
    assert spent[0] < 0.15 and watch.step_s < 0.15


def test_a_call_that_never_ends_holds_nobody_up():
    gate = threading.Event()
    calls = CallLimit(1)
    pool = make_pool(
        lambda action: gate.wait() if action == "0/0" else ok(action),
        threads=2, calls=calls, call_deadline_s=0.2, budget=Budget(0, 0), min_scored=1,
    )  # fmt: skip
    pool.submit_group(0, TASK, 3)
    statuses = [str(t.status) for t in pool.next_group(10).trajectories]
    assert statuses[0].endswith("ENV_ERROR") and all(s.endswith("DONE") for s in statuses[1:])
    gate.set()
    assert pool.close()


def test_who_waits_hears_of_the_end():
    calls, heard = CallLimit(1), []

    def wait():
        try:
            with calls.turn("waits"):
                heard.append("called")
        except EnvError as error:
            heard.append(str(error))

    with calls.turn("holds"):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        calls.refuse(["waits"])
        thread.join(5)
    assert heard == ["the call was given up before its turn came"]
    with calls.turn("a third"):
        pass
    with pytest.raises(ValueError, match="got most=0"):
        CallLimit(0)


def test_turns_are_handed_over_first_come_first_served():
    """Whoever gives a turn back and asks again at once comes after all that wait; who is refused leaves the line."""
    calls, order, threads = CallLimit(1), [], []

    def ask(name):
        with contextlib.suppress(EnvError), calls.turn(name):
            order.append(name)

    with calls.turn("again"):
        for name in "abcd":
            threads.append(threading.Thread(target=ask, args=(name,), daemon=True))
            threads[-1].start()
            end = time.monotonic() + 10
            while len(calls._line) < len(threads):
                assert time.monotonic() < end, "it does not wait"
                time.sleep(0.001)
        calls.refuse(["b"])
    ask("again")
    for thread in threads:
        thread.join(10)
    assert order == ["a", "c", "d", "again"] and not calls._holders and not calls._line


def test_the_turns_of_those_who_never_come_back_are_handed_over_when_they_are_refused():
    calls, went = CallLimit(2), []

    def ask(name):
        with calls.turn(name):
            went.append(name)

    calls._take("hangs"), calls._take("hangs too")
    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    while len(calls._line) < 2:
        time.sleep(0.001)
    calls.refuse(["hangs", "hangs too"])
    for thread in threads:
        thread.join(10)
    assert sorted(went) == ["a", "b"] and not calls._holders


def test_the_pool_begins_no_episode_over_the_limit():
    Counting.most = 0
    pool = make_pool(Counting().step, threads=12)
    pool.limit_in_flight(2)
    pool.submit_group(0, TASK, 12)
    pool.next_group(10)
    assert Counting.most == 2 and pool.stats()["in_flight"] == 0
    pool.limit_in_flight(12)
    pool.submit_group(1, TASK, 12)
    pool.next_group(10)
    assert Counting.most > 2 and pool.close()


class Idle(FakeEngine):
    """Lanes of which half are busy, whatever is played."""

    def stats(self):
        n = time.monotonic()
        return {"lanes_used": n, "lane_places": 2 * n, "idle_s": 0.0, "requests": 0, "busy_lanes": 0}


def test_the_episodes_in_flight_grow_while_lanes_are_idle():
    pool = make_pool(lambda action: (time.sleep(0.01), ok(action))[1], engine=Idle(), threads=12)
    try:
        with adapting(Idle(), pool, lanes=2, cap=12, period_s=0.02):
            assert pool._most_in_flight == 4
            for ticket in range(20):
                pool.submit_group(ticket, TASK, 12)
            for _ in range(20):
                pool.next_group(10)
            assert 4 < pool._most_in_flight <= 12
    finally:
        pool.close()
    assert concurrency.PERIOD_S == 1.0 and not [t for t in threading.enumerate() if t.name == "pool-in-flight"]


def test_a_controller_that_fails_holds_nothing_back_and_is_heard_of():
    class Broken:
        def stats(self):
            return {}

    pool = make_pool(threads=9)
    try:
        with pytest.raises(KeyError), adapting(Broken(), pool, lanes=1, cap=9, period_s=0.01):
            end = time.monotonic() + 10
            while pool._most_in_flight < 9:
                assert time.monotonic() < end
                time.sleep(0.01)
    finally:
        pool.close()


def test_a_controller_that_fails_does_not_hide_what_ended_the_block():
    pool, broken = make_pool(threads=2), FakeEngine()
    broken.stats = dict  # nothing that it could read
    try:
        with pytest.raises(ZeroDivisionError), adapting(broken, pool, lanes=1, cap=2, period_s=0.01):
            end = time.monotonic() + 10
            while any(thread.name == "pool-in-flight" for thread in threading.enumerate()):
                assert time.monotonic() < end
                time.sleep(0.01)
            raise ZeroDivisionError
    finally:
        pool.close()
