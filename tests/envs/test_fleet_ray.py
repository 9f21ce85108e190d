"""The worlds of a fleet in Ray actors: real ones, in processes of their own, which answer as a world does here."""

import os
import signal
import threading
import time
from functools import partial

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]: pip install 'wayfinder-rl[ray]'")

from envs.base import EnvError
from envs.fleet.fleet import Fleet, FleetError
from envs.fleet.ray_actor import NoRay, RayActor, connect, disconnect
from tests.envs import breaking
from tests.envs.breaking import TURNS, task
from tests.envs.test_fleet import BREAKING, assert_no_children, broken, play, until


@pytest.fixture(scope="module", autouse=True)
def cluster():
    connect()
    yield
    disconnect()


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet(partial(RayActor, BREAKING, {}), 2, deadline_s=60.0)
    yield fleet
    fleet.close()


def test_episodes_there_are_those_here_and_overlap(fleet):
    envs, here = [fleet.make_env() for _ in range(8)], breaking.make_world().make_env()
    pids = {env.pid for env in envs}
    assert len(pids) == 2 and os.getpid() not in pids
    assert play(envs[0], task(0)) == play(here, task(0))
    facts = play(envs[0], task(0, where=True))[-1].facts
    assert facts["pid"] == envs[0].pid and facts["threads"] == 1
    assert not {name.partition(".")[0] for name in facts["modules"]} & {"jax", "jaxlib", "transformers", "rl"}

    got, began_s = {}, time.monotonic()
    threads = [
        threading.Thread(target=lambda e=env, i=i: got.update({i: play(e, task(i, seconds=0.5))}))
        for i, env in enumerate(envs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began_s < 8 * TURNS * 0.5 / 2
    assert got == {i: play(here, task(i)) for i in range(8)}
    for env in envs:
        env.close()


def test_what_breaks_there(fleet):
    env = fleet.make_env()
    assert "RuntimeError: boom at breaking.py:" in str(broken(env, "raise"))
    assert "cannot be sent" in str(broken(env, "lambda"))
    first = env.pid
    error = broken(env, "exit")
    assert isinstance(error.__cause__, ConnectionError) and "ended" in str(error)
    assert play(env, task(1)) == play(breaking.make_world().make_env(), task(1)) and env.pid != first
    until(lambda: fleet.stats()["members"] == 2, 60)
    assert fleet.stats()["died"] == 1
    env.close()


def test_deadlines_and_ends():
    fleet = Fleet(partial(RayActor, BREAKING, {}), 1, deadline_s=3.0)
    try:
        env = fleet.make_env()
        pid = env.pid
        error = broken(env, "hang")
        assert isinstance(error.__cause__, TimeoutError) and fleet.stats()["hung_calls"] == 1
        idle = fleet.make_env()
        idle.reset(task(0))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvError, match="ended"):
            idle.step("a")
    finally:
        fleet.close()
    assert_no_children([pid])


def test_what_cannot_begin_says_why():
    with pytest.raises(FleetError, match="ValueError: refused: there is no such world"):
        Fleet(partial(RayActor, BREAKING, {"refuse": True}), 1, deadline_s=60.0)
    disconnect()
    with pytest.raises(NoRay, match="no Ray cluster answers at 'auto'"):
        connect("auto")
