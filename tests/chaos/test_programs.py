"""Law: whatever worlds do (raise, hang, answer garbage, take long, always fail on some tasks), a run ends with its last
step, and every episode is scored or counted as lost.

Law: a fault of the program (engine, batcher, judge, checkpoint, disk) ends the run with an error that says
what it was; no group stays open, no thread alive, no member uncounted; and the run that goes on from there equals the
one that nothing disturbed, bit for bit.

One learner, compiled once, serves all runs. Each fault comes at a moment of its own, drawn by the test's seed.
"""

import dataclasses
import json
import random
import subprocess
import threading
import time

import jax
import numpy as np
import pytest

from envs import chaos
from envs.base import Task
from envs.fleet.process import Process
from launch import bench_chaos, build
from rl import checkpoint, loop, monitor
from rl.episodes import read_episodes
from rl.rollout.device import Device
from tests.chaos.conftest import STEPS

LOST = RuntimeError("chaos: the device was lost")
FULL = OSError(28, "No space left on device")


def story(workdir):
    return {(t.ticket, t.member): (t.status, [r.tokens.tolist() for r in t.rows]) for t in read_episodes(workdir)}


def newest(workdir):
    """Host state and every array of the last checkpoint."""
    found = checkpoint.restore_host(workdir / "ckpt")
    found["progress"].pop("trained_s")
    (step,) = checkpoint.steps(workdir / "ckpt")[-1:]
    manifest = checkpoint._manifest(workdir / "ckpt" / f"{step:08d}")
    shapes = {name: jax.ShapeDtypeStruct(*leaf) for name, leaf in manifest["leaves"].items()}
    with checkpoint.ocp.Checkpointer(checkpoint.ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(workdir / "ckpt" / f"{step:08d}" / "device")
    return found, {name: np.asarray(arrays[name]) for name in shapes}


def assert_went_on_as_if_nothing_had_happened(runs, workdir):
    runs(workdir)
    assert story(workdir) == story(runs.root / "whole") and len(story(workdir)) >= STEPS * 4
    (ours, own), (theirs, whole) = newest(workdir), newest(runs.root / "whole")
    assert ours == theirs and ours["progress"]["step"] == STEPS
    for name, array in whole.items():
        np.testing.assert_array_equal(own[name], array, err_msg=name)


def assert_nothing_is_left(pool, before):
    assert not bench_chaos.ours({*threading.enumerate()} - before)
    stats = pool.stats()
    assert stats["groups_open"] == stats["members_open"] == stats["live_threads"] == 0
    ended = sum(stats[f"members_{how}"] for how in ("scored", "failed", "cancelled"))
    assert ended == stats["members_submitted"]
    assert stats["env_errors"] == stats["members_failed"] + stats["retries"]


def failing(original, at, error):
    """`original`, but for its `at`-th call, which raises."""
    calls = []

    def call(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            raise error
        return original(*args, **kwargs)

    return call


def patched(where, what, error):
    return lambda at: (where, what, failing(getattr(where, what), at, error))


FAULTS = {  # what raises, at most at which call, and with which words the run ends
    "engine": (patched(Device, "decode", LOST), STEPS, "device was lost"),
    "batcher": (patched(build, "pack", ValueError("chaos: rows")), STEPS, "chaos: rows"),
    "judge": (patched(loop, "score_group", ValueError("chaos: no judge")), 2 * STEPS, "chaos: no judge"),
    "manifest": (patched(checkpoint, "_fsync", FULL), 8 * STEPS, "was not written.*No space"),
    "metrics": (patched(monitor._Events, "write", FULL), STEPS, "was not recorded.*is the disk full"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_program_ends_the_run_and_loses_nothing(runs, monkeypatch, name):
    make, most, words = FAULTS[name]
    before = {*threading.enumerate()}
    with monkeypatch.context() as patch, pytest.raises(Exception, match=words):
        patch.setattr(*make(random.Random(name).randint(1, most)))
        runs(name)
    assert_nothing_is_left(runs.pool(), before)
    assert_went_on_as_if_nothing_had_happened(runs, runs.root / name)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 700 KB, which a run fills within its steps, and a function that makes it large."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    grow = ["mount", "-o", "remount,size=30m", tmp_path]
    try:
        yield tmp_path, lambda: subprocess.run(grow, check=True)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_disk_that_is_full_ends_the_run_and_one_that_has_room_again_goes_on(runs, small_disk):
    folder, grow = small_disk
    before = {*threading.enumerate()}
    with pytest.raises((OSError, ValueError), match="No space|disk full"):
        runs(folder / "run")
    assert_nothing_is_left(runs.pool(), before)
    assert checkpoint.steps(folder / "run" / "ckpt") < [STEPS]
    grow()
    assert_went_on_as_if_nothing_had_happened(runs, folder / "run")


def test_a_run_over_worlds_that_fail_ends_and_counts_every_loss(runs, capfd):
    """A third of the episodes is faulted, beside the broken tasks that every run here has."""
    hang_s, before = 2.0, {*threading.enumerate()}
    faults = chaos.Faults(("raise", "hang", "garbage", "slow"), 0.33, 0.15, 2, bench_chaos.BROKEN_SEED)
    kept = {}

    def change(parts):
        rollout = dataclasses.replace(parts.plan.rollout, call_deadline_s=0.5, max_quarantined_frac=1.0)
        kept["draw"] = parts.options["draw"]
        world = chaos.wrapped(parts.world, faults, hang_s=hang_s)
        return dataclasses.replace(parts, plan=dataclasses.replace(parts.plan, rollout=rollout), world=world)

    runs("worlds", change)
    until = time.monotonic() + 10 * hang_s
    while bench_chaos.ours({*threading.enumerate()} - before) and time.monotonic() < until:
        time.sleep(0.05)
    assert_nothing_is_left(runs.pool(), before)
    stats, workdir = runs.pool().stats(), runs.root / "worlds"
    host = checkpoint.restore_host(workdir / "ckpt")
    assert host["progress"]["step"] == STEPS
    assert stats["late_attempts"] == stats["lost_threads"] == faults.injected["hang"]
    errors = sum(faults.injected.values()) - faults.injected["slow"]
    assert stats["env_errors"] == errors and len(faults.injected) == 5
    # Every group that was played is kept; the broken ones, and they alone, are in quarantine.
    episodes = list(read_episodes(workdir))
    assert len(episodes) == stats["members_submitted"]
    played = {t.task_id: kept["draw"](t.ticket) for t in episodes}
    broken = sorted(task_id for task_id, task in played.items() if faults.is_broken(task))
    lines = [json.loads(line) for line in (workdir / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(line["task_id"] for line in lines) == broken and broken
    assert lines == host["quarantine"]["held"]
    assert all(line["signature"].startswith("KeyError: 'chaos: the data of") for line in lines)
    out = capfd.readouterr().out
    assert all(out.count(f"quarantined: task {task_id} is not drawn any more") == 1 for task_id in broken)
    record = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["rollout/quarantined"] == len(broken)


def test_a_run_whose_worlds_end_their_processes_ends_and_leaves_none(runs, tmp_path, monkeypatch):
    """What a process takes with it is tried again; counted are those that it was drawn for, over all processes."""
    made, names, begin, before = [], [], Process.__init__, {*threading.enumerate()}

    def watched(self, *args):
        begin(self, *args)
        made.append(self.pid)
        names.extend(bench_chaos.ours({*threading.enumerate()} - before))

    monkeypatch.setattr(Process, "__init__", watched)
    drawn = {"share": 0.15, "broken": 0.15, "calls": 2, "seed": bench_chaos.BROKEN_SEED, "counts": str(tmp_path)}
    kinds = ["raise", "garbage", "slow", "exit"]

    def change(parts):
        rollout = dataclasses.replace(
            parts.plan.rollout, worlds="processes", processes=2, max_quarantined_frac=1.0, retries=20, group_retries=100
        )
        options = {**parts.plan.world_options, **drawn, "faults": kinds}
        return dataclasses.replace(parts, plan=dataclasses.replace(parts.plan, rollout=rollout, world_options=options))

    runs("processes", change)
    assert_nothing_is_left(runs.pool(), before)
    assert {"fleet-supervisor", "pool-supervisor"} & {*names} and any(name.startswith("fleet-") for name in names)
    assert not [pid for pid in made if bench_chaos.alive(pid)]
    faults, stats, fleet = chaos.Faults(kinds, **drawn), runs.pool().stats(), runs.pool().make_env.__self__.stats()
    assert checkpoint.restore_host(runs.root / "processes" / "ckpt")["progress"]["step"] == STEPS
    assert 1 <= fleet["died"] <= faults.injected["exit"] and 2 <= fleet["started"] == len(made) <= 2 + fleet["died"]
    assert stats["infrastructure_errors"] >= faults.injected["exit"] and stats["lost_threads"] == 0


def test_faults_that_count_in_a_folder_go_on_where_another_process_ended(tmp_path):
    task = Task("chaos/1", "toy", "train", 1, (), {})
    drawn = {"kinds": ["raise", "exit"], "share": 0.5, "broken": 0.0, "calls": 3, "seed": 4}
    alone = chaos.Faults(**drawn)
    want = [alone.draw(task) for _ in range(8)]
    apart = [chaos.Faults(**drawn, counts=tmp_path) for _ in range(8)]
    assert [each.draw(task) for each in apart] == want and len({*want}) > 2
    for each in apart:
        each.count("exit")
    assert apart[0].injected == {"exit": 8} and not alone.injected
