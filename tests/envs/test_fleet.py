"""A fleet: worlds in other processes answer as they do here, and what they break is theirs alone."""

import logging
import os
import signal
import subprocess
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from envs import make_world
from envs.base import EnvError, EnvLost, Observation, Step
from envs.failures import INFRASTRUCTURE, kind_of
from envs.fleet import fleet as fleets
from envs.fleet import host
from envs.fleet.fleet import Fleet, FleetError, pause_s
from envs.fleet.process import Process
from envs.fleet.ray_actor import RayActor
from rl.rollout.watched import guarded
from tests.envs import breaking
from tests.envs.breaking import TURNS, task

BREAKING = "tests.envs.breaking:make_world"


def breaking_fleet(n=1, *, silence_s=60.0, **options):
    return Fleet(partial(Process, BREAKING, options), n, deadline_s=60.0, silence_s=silence_s)


@pytest.fixture(scope="module")
def fleet():
    fleet = breaking_fleet(2)
    yield fleet
    fleet.close()
    assert_no_children(fleet.pids())
    assert not [t for t in threading.enumerate() if t.name.startswith("fleet-")]


def assert_no_children(pids):
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def play(env, task, turns=TURNS):
    return [env.reset(task), *(env.step("a" * (i + 1)) for i in range(turns))]


def broken(env, fault, **data):
    with pytest.raises(EnvError) as error:
        play(env, task(1, fault=fault, **data))
    return error.value


def test_an_episode_there_is_the_episode_here(fleet):
    here, there = breaking.make_world().make_env(), fleet.make_env()
    assert there.spec == here.spec and there.pid != os.getpid()
    for seed in range(3):
        assert play(there, task(seed)) == play(here, task(seed))
    there.close()


def test_an_instance_has_one_thread_and_its_process_no_jax(fleet):
    env = fleet.make_env()
    facts = play(env, task(0, where=True))[-1].facts
    assert facts["threads"] == 1 and facts["pid"] == env.pid != os.getpid()
    loaded = {name.partition(".")[0] for name in facts["modules"]}
    assert not loaded & {"jax", "jaxlib", "flax", "optax", "transformers", "rl", "models", "launch", "pytest"}
    env.close()


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("x"), KeyError("x"), FileNotFoundError(2, "x"), PermissionError(13, "x"), EnvError("x")),
        *(OSError(28, "x"), MemoryError(), EOFError(), TimeoutError(), EnvLost("x"), ConnectionResetError()),
        subprocess.TimeoutExpired("x", 1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("caused", [False, True])
def test_a_failure_is_of_the_same_kind_on_both_sides(error, caused):
    """In a thread of the host, and through the bytes that cross."""

    def world():
        if not caused:
            raise error
        raise EnvError("it failed") from error

    with pytest.raises(EnvError) as there:
        host.opened(host.answer(world))
    with pytest.raises(EnvError) as here:
        guarded("step", world)
    assert kind_of(there.value) == kind_of(here.value)


def test_an_instance_that_cannot_be_made_leaves_nothing_behind(monkeypatch):
    made = []

    def start():
        made.append(Process(BREAKING, {}))
        told = made[-1].told = []
        tell = made[-1].tell
        made[-1].tell = lambda instance, verb: (told.append(verb), tell(instance, verb))
        return made[-1]

    fleet = Fleet(start, 1, deadline_s=60.0)
    try:
        monkeypatch.setattr(fleet, "_call", lambda *args: (_ for _ in ()).throw(EnvError("no")))
        with pytest.raises(EnvError, match="no"):
            fleet.make_env()
        assert made[0].told == [host.CLOSE] and fleet.stats()["instances"] == 0
    finally:
        fleet.close()


def test_errors_cross_with_their_text_and_place(fleet):
    env = fleet.make_env()
    error = broken(env, "raise")
    assert "RuntimeError: boom at breaking.py:" in str(error) and not isinstance(error, EnvLost)
    assert str(broken(env, "env_error")) == "no answer from there"
    assert "SystemExit: leaving" in str(broken(env, "leave"))
    full = broken(env, "full")
    assert "No space left" in str(full) and isinstance(full, EnvLost)
    assert "cannot be sent" in str(broken(env, "lambda")) and "function" in str(broken(env, "lambda"))
    assert "cannot be read here (RuntimeError: nobody reads me)" in str(broken(env, "unreadable"))
    with pytest.raises(EnvError, match="reset: cannot be sent"):
        env.reset(task(0, inner=lambda: None))
    # the instance is still there, in the same process
    assert play(env, task(2)) == play(breaking.make_world().make_env(), task(2))
    env.close()


def test_garbage_crosses_as_it_is(fleet, capfd):
    env = fleet.make_env()
    env.reset(task(0, fault="garbage"))
    assert env.step("a") == 42
    assert isinstance(play(env, task(0, fault="print"))[-1], Step)
    env.close()
    out, err = capfd.readouterr()
    assert "a world prints" not in out


def test_snapshots_cross_between_processes(fleet):
    one, other = fleet.make_env(), fleet.make_env()
    assert one.pid != other.pid  # each goes where there are fewest
    one.reset(task(5)), one.step("a"), one.step("bb")
    other.reset(task(5))
    other.restore(one.snapshot())
    assert one.step("ccc") == other.step("ccc")
    one.close(), other.close()


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("exit", "ended with exit code 7"),
        ("segfault", "ended by SIGSEGV"),
        ("unnamed", "ended by signal "),  # a number without a name
        ("frame", "ended by SIGKILL (it sent what is no answer: error: "),
    ],
)
def test_a_process_that_dies_says_how_and_its_place_is_filled(fault, how, caplog):
    fleet = breaking_fleet(2)
    try:
        playing, idle, elsewhere = (fleet.make_env() for _ in range(3))
        assert playing.pid == elsewhere.pid != idle.pid
        waits = threading.Thread(target=lambda: fates.append(broken(elsewhere, "hang")))
        fates: list[EnvError] = []
        waits.start()
        until(lambda: fleet.stats()["instances"] == 3)
        time.sleep(0.2)
        error = broken(playing, fault)
        waits.join(10)
        for one in (error, *fates):
            assert how in str(one) and isinstance(one.__cause__, ConnectionError)
        assert len(fates) == 1
        assert play(idle, task(1)) == play(breaking.make_world().make_env(), task(1))
        until(lambda: fleet.stats()["members"] == 2)
        assert fleet.stats()["died"] == 1 and fleet.stats()["started"] == 3 and playing.pid not in fleet.pids()
        # between two episodes an instance moves
        before = idle.pid
        os.kill(before, signal.SIGKILL)
        until(lambda: before not in fleet.pids())
        assert play(idle, task(2)) == play(breaking.make_world().make_env(), task(2)) and idle.pid != before
    finally:
        fleet.close()
    assert_no_children(fleet.pids())


def test_a_hung_call_is_given_up_and_many_cost_their_process(monkeypatch):
    monkeypatch.setattr(fleets, "MOST_HUNG", 2)
    fleet = breaking_fleet(1)
    try:
        first, calm = fleet.make_env(), fleet.make_env()
        calm.reset(task(3))
        pid = calm.pid
        for _ in range(2):
            first.reset(task(1, fault="hang"))
            with monkeypatch.context() as patch:
                patch.setattr(fleet, "_deadline_s", 0.3)
                with pytest.raises(EnvError) as raised:
                    first.step("a")
            error = raised.value
            assert "its deadline" in str(error) and isinstance(error.__cause__, TimeoutError)
            first.close()
            first = fleet.make_env()
            assert (first.pid == pid) == (fleet.stats()["hung_calls"] < 2)
        # the process is replaced when its episodes have ended
        assert [calm.step("a" * (i + 1)).done for i in range(TURNS)] == [False, False, True]
        until(lambda: fleet.stats()["retired"] == 1 and fleet.stats()["members"] == 1)
        assert play(calm, task(3)) == play(breaking.make_world().make_env(), task(3)) and calm.pid != pid
        assert fleet.stats()["died"] == 0
    finally:
        fleet.close()


def test_making_an_instance_and_its_first_call_have_one_deadline_together(monkeypatch):
    fleet = breaking_fleet(1)
    try:
        env, given = fleet.make_env(), []
        fleet._forget(env._running, env._instance)  # it is gone: the next reset makes another
        member, calls = env._running.member, env._running.member.call

        def call(instance, verb, body, deadline_s):
            given.append(deadline_s)
            time.sleep(0.5)
            return calls(instance, verb, body, deadline_s)

        monkeypatch.setattr(member, "call", call)
        env.reset(task(0))
        assert len(given) == 2 and given[0] <= 60.0 and given[1] <= given[0] - 0.5
    finally:
        fleet.close()


def test_a_process_that_does_not_answer_is_killed(caplog):
    fleet = breaking_fleet(1, silence_s=2.0)
    try:
        env = fleet.make_env()
        pid = env.pid
        with caplog.at_level(logging.WARNING):
            error = broken(env, "hold")
            until(lambda: fleet.pids() and pid not in fleet.pids())
        assert "SIGKILL (it has not answered for 2.0 s)" in caplog.text and "SIGKILL" in str(error)
        fleet._silence_s = 60.0
        assert fleet.make_env().reset(task(0)) == Observation("begin 0")
        begun = time.monotonic()
    finally:
        fleet.close()
    assert time.monotonic() - begun < 10
    assert_no_children([pid, *fleet.pids()])


def test_close_ends_what_hangs_in_bounded_time():
    fleet = breaking_fleet(2)
    fates: list[EnvError] = []
    envs = [fleet.make_env() for _ in range(2)]
    threads = [
        threading.Thread(target=lambda e=env, f=fault: fates.append(broken(e, f)))
        for env, fault in zip(envs, ("hang", "hold"), strict=True)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    pids, begun = fleet.pids(), time.monotonic()
    fleet.close(timeout_s=1.0)
    fleet.close()
    assert time.monotonic() - begun < 8 and len(pids) == 2
    for thread in threads:
        thread.join(5)
    assert len(fates) == 2 and not any(t.is_alive() for t in threads)
    assert_no_children(pids)
    with pytest.raises(EnvError, match="the fleet is closed"):
        fleet.make_env()


def test_a_world_is_made_there_with_its_options():
    fleet = Fleet(partial(Process, "arith", {"labels": False}), 1, deadline_s=30.0)
    try:
        assert fleet.make_env().spec == make_world("arith", labels=False).make_env().spec
    finally:
        fleet.close()


def test_a_world_that_cannot_be_made_is_said_at_once():
    with pytest.raises(FleetError, match="ValueError: refused: there is no such world"):
        breaking_fleet(2, refuse=True)
    with pytest.raises(FleetError, match="of 2 have died; the last: the process [0-9]+ ended with exit code 3"):
        breaking_fleet(2, die=True)
    with pytest.raises(ValueError, match="got n=0"):
        breaking_fleet(0)


def test_the_pause_doubles_to_a_bound():
    assert [pause_s(n) for n in (0, 1, 2, 3, 9, 10, 1000)] == [0.0, 0.1, 0.2, 0.4, 25.6, 30.0, 30.0]


class Doomed:
    """A member that is ready at once and ends as soon as it is looked at twice."""

    made: list[float] = []

    def __init__(self):
        self.pid, self.ready, self.ended, self.why_not, self._looks = -1, True, None, None, 0
        self.made.append(time.monotonic())

    def is_gone(self):
        self._looks += 1
        if self._looks > 1:
            self.ended = "ended"
        return self._looks > 1

    def silent_s(self):
        return 0.0

    def end(self):
        pass

    def join(self, until_s):
        pass


def test_what_ends_again_and_again_is_made_at_growing_pauses(monkeypatch):
    monkeypatch.setattr(fleets, "TICK_S", 0.01)
    monkeypatch.setattr(Doomed, "made", [])
    fleet = Fleet(Doomed, 1, deadline_s=1.0)
    until(lambda: len(Doomed.made) == 4)
    fleet.close()
    gaps = [b - a for a, b in zip(Doomed.made, Doomed.made[1:], strict=False)]
    assert all(gap >= want for gap, want in zip(gaps, (0.1, 0.2, 0.4), strict=True))
    # one that lives long enough leaves no pause behind
    monkeypatch.setattr(fleets, "HEALTHY_S", -1.0)
    monkeypatch.setattr(Doomed, "made", [])
    fleet = Fleet(Doomed, 1, deadline_s=1.0)
    until(lambda: len(Doomed.made) == 5)
    fleet.close()
    assert Doomed.made[-1] - Doomed.made[0] < 4 * (0.1 + 0.1)


def test_a_world_by_its_module():
    assert make_world(BREAKING).name == "breaking"
    with pytest.raises(ValueError, match="no module 'nowhere'"):
        make_world("nowhere:make_world")
    with pytest.raises(ValueError, match="has no 'nothing'"):
        make_world("envs.arith:nothing")
    with pytest.raises(ValueError, match=r"options \['size'\]"):
        make_world(BREAKING, size=3)


class Full:
    """What starts members until there are no descriptors left, twice; then there are some again."""

    def __init__(self):
        self.asked = 0

    def __call__(self):
        self.asked += 1
        if self.asked in (3, 4):
            raise OSError(24, "Too many open files")
        return Process(BREAKING, {})


def test_a_member_that_cannot_be_started_again_is_tried_again():
    start = Full()
    fleet = Fleet(start, 2, deadline_s=60.0)
    try:
        one, other = fleet.make_env(), fleet.make_env()
        os.kill(one.pid, signal.SIGKILL)
        until(lambda: start.asked == 5 and fleet.stats()["members"] == 2)
        assert fleet.stats()["died"] == 3 and play(other, task(1)) == play(breaking.make_world().make_env(), task(1))
    finally:
        fleet.close()
    start.asked = 2  # the user hears of the first
    with pytest.raises(FleetError, match="OSError: .*Too many open files"):
        Fleet(start, 1, deadline_s=60.0)


def test_a_call_that_ends_late_hangs_no_more(monkeypatch):
    """And its member is not given up for it."""
    fleet = breaking_fleet(1)
    try:
        for _ in range(fleets.MOST_HUNG + 1):
            env = fleet.make_env()
            env.reset(task(1, seconds=0.4))
            with monkeypatch.context() as patch:
                patch.setattr(fleet, "_deadline_s", 0.1)
                with pytest.raises(EnvError, match="its deadline"):
                    env.step("a")
            until(lambda running=env._running: not running.late)
        stats = fleet.stats()
        assert stats["hung_calls"] == fleets.MOST_HUNG + 1 and stats["started"] == 1 and not stats["retired"]
    finally:
        fleet.close()


def test_a_retired_member_waits_for_no_episode_that_was_left(monkeypatch):
    monkeypatch.setattr(fleets, "REST_S", 0.5)
    fleet = breaking_fleet(1)
    try:
        left = fleet.make_env()
        left.reset(task(0))  # and its worker ends it
        fleet._deadline_s = 0.2
        left._running.late = [lambda: False] * fleets.MOST_HUNG
        until(lambda: fleet.stats()["retired"] == 1 and left.pid not in fleet.pids())
        assert fleet.stats()["instances"] == 0
    finally:
        fleet.close()


@pytest.mark.parametrize("name", ["ObjectLostError", "RayActorError", "GetTimeoutError"])
def test_what_ray_loses_is_the_infrastructures(name):
    """Without Ray: its errors, by their tree."""
    errors = {"RayError": type("RayError", (Exception,), {})}
    for each in ("ObjectLostError", "RayActorError", "GetTimeoutError"):
        errors[each] = type(each, (errors["RayError"],), {})

    def get(ref, timeout=None):
        raise errors[name]("object 0f3a is lost")

    actor = RayActor.__new__(RayActor)
    actor._ray = SimpleNamespace(exceptions=SimpleNamespace(**errors), get=get, wait=lambda *a, **k: ([], []))
    actor._actor = SimpleNamespace(call=SimpleNamespace(remote=lambda *args: None))
    actor.pid, actor._name, actor._killed, actor.ended, actor._life = 1, "breaking", "", None, None
    with pytest.raises(EnvError) as raised:
        guarded("step", actor.call, 1, host.CALL, b"", 1.0)
    assert kind_of(raised.value) == INFRASTRUCTURE
