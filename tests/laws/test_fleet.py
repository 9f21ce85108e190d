"""Law: where a world is changes nothing of what is played in it: episodes through processes are those of threads, token
for token. A world that breaks its interpreter changes no other episode's result. No process outlives its fleet, or the
program that began it, however that ends.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from envs.fleet.fleet import Fleet
from envs.fleet.process import Process
from launch import worlds
from models.sampling import Sampling
from rl.rollout.concurrency import CallLimit
from rl.rollout.failures import Budget
from rl.rollout.keys import key_data
from rl.rollout.pool import Pool
from rl.types import Status, Turn
from tests.envs import breaking
from tests.rl.test_worker import ByteCodec

ROOT = Path(__file__).resolve().parents[2]
BREAKING = "tests.envs.breaking:make_world"
TICKETS, SIZE, SEED = 8, 3, 5


class Session:
    """Samples letters, a full stop and the end of turn by its key and by every id that it has read: what differs
    anywhere differs from there on.
    """

    def __init__(self, key):
        self.key, self.read = [int(word) for word in np.ravel(key_data(key))], []

    def generate(self, new_ids, *, max_tokens, stop=(), constraint=None):
        self.read += new_ids
        rng = np.random.default_rng([*self.key, *self.read])
        n = min(max_tokens, int(rng.integers(1, 6)))
        ids = [*(int(i) for i in rng.integers(97, 123, n)), ord(".")]
        self.read += ids
        return Turn(ids, [float(x) for x in -rng.random(len(ids))], [len(self.read)] * len(ids), "stop")

    def close(self):
        pass


class Engine:
    def open(self, key, sampling, *, timeout_s):
        return Session(key)

    def stats(self):
        return {}


def played(make_env, tickets=range(TICKETS), **data):
    """{(ticket, member): episode} of one task for each ticket; the task of ticket 3 has `data`. And the retries."""
    pool = Pool(
        Engine(), make_env, ByteCodec(), threads=6, seed=SEED, sampling=Sampling(), call_deadline_s=60.0,
        max_turn_tokens=20, max_tokens=300,
    )  # fmt: skip
    try:
        for ticket in tickets:
            pool.submit_group(ticket, breaking.task(ticket, **data if ticket == 3 else {}, seconds=0.02), SIZE)
        groups = [pool.next_group(60) for _ in tickets]
    finally:
        pool.close()
    return {(t.ticket, t.member): t for group in groups for t in group.trajectories}, pool.stats()["retries"]


def as_bytes(trajectories):
    return {place: trajectory.to_bytes() for place, trajectory in trajectories.items()}


@pytest.fixture
def fleet():
    fleet = Fleet(partial(Process, BREAKING, {}), 2, deadline_s=60.0)
    yield fleet
    fleet.close()


def test_episodes_through_processes_are_those_of_threads(fleet):
    (here, _), (there, _) = played(breaking.make_world().make_env), played(fleet.make_env)
    assert as_bytes(here) == as_bytes(there) and len(here) == TICKETS * SIZE
    assert all(t.status is Status.DONE and t.n_turns == breaking.TURNS for t in here.values())
    assert fleet.stats()["died"] == 0


@pytest.mark.parametrize("fault", ["exit", "segfault"])
def test_a_crash_changes_no_result(fleet, fault, tmp_path):
    """Those that it cost are played again, and are what they would have been."""
    want, _ = played(breaking.make_world().make_env)
    got, retries = played(fleet.make_env, fault=fault, once=str(tmp_path / "crashed"))
    assert fleet.stats()["died"] == 1 and retries >= 1
    assert as_bytes(got) == as_bytes(want)


def test_an_episode_whose_world_always_dies_says_how(fleet, monkeypatch):
    monkeypatch.setattr("envs.fleet.fleet.MOST_PAUSE_S", 0.1)
    got, _ = played(fleet.make_env, tickets=[3], fault="exit")
    assert {t.status for t in got.values()} == {Status.ENV_ERROR}
    assert all("ended with exit code 7" in t.facts["error"] for t in got.values())


PARENT = """
import sys, threading, time
from functools import partial
from envs.fleet.fleet import Fleet
from envs.fleet.process import Process
from tests.envs.breaking import task

fleet = Fleet(partial(Process, "tests.envs.breaking:make_world", {}), 2, deadline_s=600.0)
env = fleet.make_env()
env.reset(task(0, fault="hold"))
threading.Thread(target=env.step, args=("a",), daemon=True).start()
time.sleep(0.3)
print(*fleet.pids(), flush=True)
time.sleep(600)
"""


def ended(pid):
    """A process that nobody reaps, because its new parent does not, is a zombie: it has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl and /proc are Linux's")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_its_parent(number):
    """Also one whose world keeps the interpreter to itself, so that it cannot notice."""
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(ended(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(10)
    until = time.monotonic() + 10
    while not all(ended(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    left = [pid for pid in pids if not ended(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_no_process_outlives_its_fleet():
    fleet = Fleet(partial(Process, BREAKING, {}), 2, deadline_s=600.0)
    pids, env = fleet.pids(), fleet.make_env()
    env.reset(breaking.task(0, fault="hold"))
    said = []

    def step():
        try:
            env.step("a")
        except Exception as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=step)
    thread.start()
    time.sleep(0.2)
    fleet.close(timeout_s=0.5)
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # reaped too: no zombie
            os.kill(pid, 0)
    thread.join(5)
    assert said == ["EnvError"] and not thread.is_alive()


def test_a_member_that_is_made_again_costs_no_more_than_its_episodes():
    """Also where that takes longer than a deadline: waiting for it is no call of the world."""
    deadline_s, slow_s = 1.0, 1.5
    made = []

    def start():
        made.append(Process(BREAKING, {"slow_s": slow_s if made else 0.0}))
        return made[-1]

    fleet = Fleet(start, 1, deadline_s=worlds.deadline_s(deadline_s))
    calls = CallLimit(ready=fleet.ready)
    pool = Pool(
        Engine(), fleet.make_env, ByteCodec(), threads=6, seed=SEED, sampling=Sampling(), call_deadline_s=deadline_s,
        max_turn_tokens=20, max_tokens=300, calls=calls, clock=calls.clock,
    )  # fmt: skip
    try:
        for ticket in range(6):
            pool.submit_group(ticket, breaking.task(ticket, seconds=0.05), SIZE)
        first = pool.next_group(60)
        made[0].kill("chaos")
        groups = [first, *(pool.next_group(60) for _ in range(5))]
        stats = pool.stats()
        assert len(made) == 2 and not any(group.dropped for group in groups)
        assert stats["retries"] <= 6 and stats["members_failed"] == stats["lost_threads"] == 0
    finally:
        pool.close()
        fleet.close()


def test_a_call_that_hangs_there_costs_no_thread_here():
    """The fleet gives it up before the pool would."""
    fleet = Fleet(partial(Process, BREAKING, {}), 1, deadline_s=worlds.deadline_s(1.0))
    pool = Pool(
        Engine(), fleet.make_env, ByteCodec(), threads=3, seed=SEED, sampling=Sampling(), call_deadline_s=1.0,
        max_turn_tokens=20, max_tokens=300, budget=Budget(0, 0, 0),
    )  # fmt: skip
    try:
        pool.submit_group(0, breaking.task(0, fault="hang"), 3)
        group = pool.next_group(60)
        assert all("its deadline" in t.facts["error"] for t in group.trajectories)
        assert pool.stats()["lost_threads"] == 0 and fleet.stats()["hung_calls"] == 3
    finally:
        pool.close()
        fleet.close()


def test_close_waits_for_no_member_that_is_made_again():
    fleet = Fleet(partial(Process, BREAKING, {}), 1, deadline_s=5.0)
    calls = CallLimit(ready=fleet.ready)
    fleet._places[0].running.member.ready = False  # as one that is being made
    pool = Pool(
        Engine(), fleet.make_env, ByteCodec(), threads=2, seed=SEED, sampling=Sampling(), call_deadline_s=9.0,
        max_turn_tokens=20, max_tokens=300, calls=calls, clock=calls.clock,
    )  # fmt: skip
    try:
        pool.submit_group(0, breaking.task(0), 2)
        time.sleep(0.1)
        began_s = time.monotonic()
        assert pool.close() and time.monotonic() - began_s < 2.0 and not pool.stats()["lost_threads"]
    finally:
        fleet.close()
