"""The worlds of a fleet in Ray actors: real ones, in processes of their own, which answer as a world does here."""

import os
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]: pip install 'wayfinder-rl[ray]'")

from envs.fleet.fleet import Fleet, FleetError
from envs.fleet.ray_actor import RayActor, connect, disconnect
from tests.envs import breaking
from tests.envs.breaking import task
from tests.envs.test_fleet import BREAKING, broken, play, until

SOON_S = 300  # Ray begins many processes: on a busy machine an actor takes a minute


@pytest.fixture(scope="module", autouse=True)
def cluster():
    assert connect() and not connect()
    yield
    disconnect()


@pytest.fixture(scope="module")
def fleet(cluster):
    fleet = Fleet(partial(RayActor, BREAKING, {}), 2, deadline_s=120.0)
    yield fleet
    pids = fleet.pids()
    fleet.close()
    until(lambda: all(is_ended(pid) for pid in pids), SOON_S)


def is_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_episodes_there_are_those_here(fleet):
    envs, here = [fleet.make_env() for _ in range(4)], breaking.make_world().make_env()
    pids = {env.pid for env in envs}
    assert len(pids) == 2 and os.getpid() not in pids
    for i, env in enumerate(envs):
        assert play(env, task(i)) == play(here, task(i))
    facts = play(envs[0], task(0, where=True))[-1].facts
    assert facts["pid"] == envs[0].pid and facts["threads"] == 1
    assert not {name.partition(".")[0] for name in facts["modules"]} & {"jax", "jaxlib", "transformers", "rl"}
    for env in envs:
        env.close()


def test_what_breaks_there(fleet):
    env, idle, other = (fleet.make_env() for _ in range(3))
    assert env.pid == other.pid
    assert "RuntimeError: boom at breaking.py:" in str(broken(env, "raise"))
    assert "cannot be sent" in str(broken(env, "lambda"))
    # a call that hangs keeps up no other instance of the same actor, and ends with it
    fates = []
    waits = threading.Thread(target=lambda: fates.append(broken(other, "hang")))
    waits.start()
    assert play(env, task(1)) == play(breaking.make_world().make_env(), task(1))
    first = env.pid
    error = broken(env, "exit")
    waits.join(SOON_S)
    for one in (error, *fates):
        assert isinstance(one.__cause__, ConnectionError) and f"the actor {first}" in str(one)
    assert len(fates) == 1
    assert play(env, task(1)) == play(breaking.make_world().make_env(), task(1)) and env.pid != first
    until(lambda: fleet.stats()["members"] == 2, SOON_S)
    assert fleet.stats()["died"] == 1
    assert play(idle, task(2)) == play(breaking.make_world().make_env(), task(2))
    env.close(), idle.close()


def test_what_cannot_begin_says_why():
    with pytest.raises(FleetError, match="ValueError: refused: there is no such world"):
        Fleet(partial(RayActor, BREAKING, {"refuse": True}), 1, deadline_s=60.0)


def test_a_call_past_its_deadline_is_given_up(fleet, monkeypatch):
    env = fleet.make_env()
    monkeypatch.setattr(fleet, "_deadline_s", 2.0)
    monkeypatch.setattr(RayActor, "silent_s", lambda self: 0.0)  # a busy machine answers later than that
    env.reset(task(0, fault="hang"))
    with pytest.raises(Exception, match="its deadline") as error:
        env.step("a")
    assert isinstance(error.value.__cause__, TimeoutError) and fleet.stats()["hung_calls"] == 1
