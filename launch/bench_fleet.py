"""The workload of `python -m launch.bench fleet`, a dict for each place of the worlds: what a turn costs the host where
worlds are slow and many.

EPISODES at once, each of 5 turns in a world that sleeps one second in all (launch/sleepers.py), played by the pool and
the worker as they are. The engine is one that says what a script says, at once, so that the CPU time is that of the
rollout host alone: threads, codec and records, and, where worlds are in processes, what crosses and what they do.
"""

import contextlib
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from envs import interpreter
from envs.fleet.fleet import Fleet
from envs.fleet.process import Process
from launch.sleepers import SAID, SECONDS, TURNS, WORLD, make_task, make_world
from models.codec import Codec
from models.sampling import Sampling
from models.tokenizer import train_tokenizer
from rl.rollout.pool import Pool
from rl.types import Status, Turn

EPISODES, PROCESSES = 1000, 2
SIZE = 8  # of a group
ROUNDS = 3  # of EPISODES, beside one that is not counted
TICKS_A_S = os.sysconf("SC_CLK_TCK")


class Session:
    """Says the same at every turn."""

    def __init__(self, turn: Turn):
        self._turn = turn

    def generate(self, new_ids: list[int], **options: Any) -> Turn:
        return self._turn

    def close(self) -> None:
        pass


class Engine:
    """Sessions without limit."""

    def __init__(self, ids: list[int]):
        self._turn = Turn(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    def open(self, key: Any, sampling: Sampling, *, timeout_s: float) -> Session:
        return Session(self._turn)

    def stats(self) -> dict[str, float]:
        return {}


def workloads(seed: int, episodes: int = EPISODES, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """The same episodes with worlds in threads, then in processes."""
    world = make_world()
    with tempfile.TemporaryDirectory() as folder:
        codec = Codec(train_tokenizer([SAID] * 20 + list(world.texts()) * 20, 400, Path(folder)))
        yield {"bench": "fleet/threads", **measured(world.make_env, [], codec, seed, episodes, rounds)}
        fleet = Fleet(partial(Process, WORLD, {}), PROCESSES, deadline_s=60.0)
        try:
            found = measured(fleet.make_env, fleet.pids(), codec, seed, episodes, rounds)
        finally:
            fleet.close()
        yield {"bench": "fleet/processes", "processes": PROCESSES, **found}


def measured(make_env: Any, pids: list[int], codec: Codec, seed: int, episodes: int, rounds: int) -> dict[str, Any]:
    """CPU milliseconds a turn of this process and of those that it has begun, and wall seconds of a round."""
    engine = Engine(codec.encode_action(SAID))
    limits = {"max_turn_tokens": 64, "max_tokens": 1024, "call_deadline_s": 60.0}
    pool = Pool(engine, make_env, codec, threads=episodes, seed=seed, sampling=Sampling(), **limits)
    with contextlib.closing(pool), interpreter.shared_by(episodes):
        play(pool, episodes, 0)
        began_s, here, there = time.monotonic(), cpu_s(), of_processes_s(pids)
        for i in range(rounds):
            play(pool, episodes, i + 1)
        wall_s, here, there = time.monotonic() - began_s, cpu_s() - here, of_processes_s(pids) - there
    turns = rounds * episodes * TURNS
    return {
        "episodes": episodes,
        "turns": TURNS,
        "sleep_s": SECONDS,
        "cpu_ms_a_turn": round(1000 * (here + there) / turns, 3),
        "of_it_in_processes": round(1000 * there / turns, 3),
        "wall_s": round(wall_s / rounds, 2),
        "cores": len(os.sched_getaffinity(0)),
    }


def play(pool: Pool, episodes: int, number: int) -> None:
    """So many episodes at once, each of which must be what the script makes of it."""
    groups = episodes // SIZE
    for i in range(groups):
        pool.submit_group(number * groups + i, make_task(i), SIZE)
    for _ in range(groups):
        for trajectory in pool.next_group(120).trajectories:
            if trajectory.status is not Status.DONE or trajectory.n_turns != TURNS:
                raise RuntimeError(f"got {trajectory.status} after {trajectory.n_turns} turns: {trajectory.facts}")


def cpu_s() -> float:
    """Seconds of CPU of this process, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def of_processes_s(pids: list[int]) -> float:
    """The same of others, from /proc: what getrusage says of children comes when they have ended."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(own[11]) + int(own[12]) for own in fields) / TICKS_A_S
