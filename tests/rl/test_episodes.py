"""Law: every episode of an ended step can be read back exactly, whatever happened to the steps after it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rl.episodes import EpisodeLog, read_episodes
from rl.types import Row, Status, Trajectory

ROOT = Path(__file__).resolve().parents[2]


def episode(ticket: int, length: int = 5) -> Trajectory:
    mask = np.arange(length) >= 2
    row = Row(
        tokens=np.arange(length, dtype=np.int32) + ticket,
        turn=np.zeros(length, np.int32),
        action_mask=mask,
        behavior_logp=np.where(mask, -0.5, 0).astype(np.float32),
        version=np.where(mask, 3, -1).astype(np.int32),
    )
    return Trajectory(f"t{ticket}", ticket, 0, Status.DONE, (row,), {"success": True}, {"outcome": 1.0})


def tickets(workdir, **kwargs) -> list[int]:
    return [t.ticket for t in read_episodes(workdir, **kwargs)]


def test_steps_come_back_in_order_and_exactly(tmp_path):
    with EpisodeLog(tmp_path) as log:
        for step, members in enumerate([[0, 1], [], [2]]):
            for ticket in members:
                log.append(episode(ticket))
            log.end_step(step)
        assert tickets(tmp_path) == [0, 1, 2]
        log.append(episode(9))  # an open step cannot be read yet ...
        assert tickets(tmp_path) == [0, 1, 2]
    assert tickets(tmp_path) == [0, 1, 2, 9]  # ... and close keeps it
    assert tickets(tmp_path, first=2, last=2) == [2]
    got = next(read_episodes(tmp_path))
    assert got.to_bytes() == episode(0).to_bytes() and got.status is Status.DONE
    with pytest.raises(ValueError, match="closed"):
        log.append(episode(1))


def test_a_resumed_run_replaces_the_steps_it_does_again(tmp_path):
    with EpisodeLog(tmp_path) as log:
        for step in (0, 1, 2):
            log.append(episode(step))
            log.end_step(step)
    with EpisodeLog(tmp_path) as log:
        log.append(episode(11))
        log.end_step(1)
        assert tickets(tmp_path) == [0, 11, 2]


def test_each_process_has_a_file_and_one_that_is_gone_leaves_none_of_later_steps(tmp_path):
    with EpisodeLog(tmp_path) as first, EpisodeLog(tmp_path, process=1) as second:
        for step in (1, 2, 3):
            for log, ticket in ((second, 10 * step + 1), (first, 10 * step)):
                log.append(episode(ticket))
                log.end_step(step)
        assert tickets(tmp_path) == [10, 11, 20, 21, 30, 31]
        assert tickets(tmp_path, first=2, last=2) == [20, 21]
    with EpisodeLog(tmp_path, first_step=3) as log:
        log.append(episode(99))
        log.end_step(3)
    assert tickets(tmp_path) == [10, 11, 20, 21, 99]
    with EpisodeLog(tmp_path, first_step=2) as log:  # and this one is stopped after a step
        log.append(episode(88))
        log.end_step(2)
    assert tickets(tmp_path) == [10, 11, 88], "two histories in one"


def test_threads_may_append(tmp_path):
    with EpisodeLog(tmp_path) as log:
        threads = [
            threading.Thread(target=lambda k=k: [log.append(episode(k * 20 + i)) for i in range(20)]) for k in range(4)
        ]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert sorted(tickets(tmp_path)) == list(range(80))


def test_a_killed_run_leaves_its_ended_steps(tmp_path):
    code = f"""
import sys, os; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_episodes import episode
from rl.episodes import EpisodeLog
log = EpisodeLog(sys.argv[1])
for step in range(3):
    for i in range(50): log.append(episode(step, 500))
    if step < 2: log.end_step(step)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert list((tmp_path / "episodes").glob("*.tmp"))
    assert tickets(tmp_path) == [0] * 50 + [1] * 50
    EpisodeLog(tmp_path).close()
    assert not list((tmp_path / "episodes").glob("*.tmp"))


def test_a_damaged_or_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no episodes there"):
        tickets(tmp_path)
    with EpisodeLog(tmp_path) as log:
        for step in (0, 1):
            log.append(episode(step, 5000))
            log.end_step(step)
    file = tmp_path / "episodes" / "00000001.array_record"
    whole = file.read_bytes()
    middle = len(whole) // 2
    for damaged in (
        whole[:middle],
        whole[: len(whole) // 4],
        b"",
        whole[:400] + bytes([whole[400] ^ 255]) + whole[401:],
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="00000001.array_record"):
            tickets(tmp_path)
    assert tickets(tmp_path, last=0) == [0]
