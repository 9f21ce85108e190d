"""Law: an exchange gives every process the records of all, or raises in all of them; nobody waits for one that died."""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rl.hosts import ALONE, HostError, over, total
from rl.types import Max, Mean

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120  # far beyond what it takes: a busy machine is slow


def test_one_process_alone_exchanges_nothing():
    record, calls = object(), []
    assert ALONE.exchange(record)[0] is record
    assert ALONE.first(lambda: calls.append(1) or "done") == "done" and calls == [1]
    with pytest.raises(ValueError, match="mine"), ALONE.telling():
        raise ValueError("mine")


def test_means_add_and_a_name_that_one_lacks_counts_where_it_is():
    own = [{"a": Mean(1.0, 2), "b": Max(1.0)}, {"a": Mean(2.0, 3), "b": Max(4.0), "c": Mean(5, 1)}]
    assert total(own) == {"a": Mean(3.0, 5), "b": Max(4.0), "c": Mean(5, 1)}
    assert total(own[:1]) == own[0]


def in_threads(n, work):
    """[work(hosts) of each of n processes]: what it returned, or raised."""
    barrier, said, results = threading.Barrier(n, timeout=20), [b""] * n, [None] * n

    def gather(index, data):
        said[index] = data
        barrier.wait()
        everybody = list(said)
        barrier.wait()
        return everybody

    def one(index):
        try:
            results[index] = work(over(partial(gather, index), index, n))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return results


def test_records_come_back_by_process_and_exactly():
    record = {"m": Mean(np.float64(0.1), np.int64(3)), "x": Max(math.inf), "l": [1, None, "ü", 0.1, True], 2: {}}

    def work(hosts):
        return hosts.exchange([hosts.index, record])

    for got in in_threads(2, work):
        assert got == [[0, record], [1, record]]


def test_an_error_is_told_once_and_raised_by_all():
    def work(hosts):
        with hosts.telling():
            with hosts.telling():
                if hosts.index == 0:
                    raise ValueError("no data in caf\udce9")  # a path that is no UTF-8
            hosts.exchange(1)

    own, other = in_threads(2, work)
    assert isinstance(own, ValueError)
    assert isinstance(other, HostError) and "process 0 failed: ValueError: no data in caf?" in str(other)


def test_what_one_does_first_the_others_find():
    done = []
    out = in_threads(2, lambda hosts: hosts.first(lambda: done.append(hosts.index) or list(done)))
    assert out == [[0], [0, 1]]


PROGRAM = """
import os, sys, time
from launch import distributed
from rl.hosts import HostError

with distributed.joined("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2])) as hosts:
    for n in (10, 20_000, 70_000):  # shorter than one collective carries, and longer
        assert hosts.exchange("x" * (n + hosts.index)) == ["x" * n, "x" * (n + 1)]
    try:
        with hosts.telling():
            if hosts.index == 1:
                raise ValueError("told")
        hosts.exchange(None)
    except HostError as error:
        assert "process 1 failed: ValueError: told" in str(error), error
    except ValueError:
        pass
    hosts.exchange(None)
    print("alive", flush=True)
    if hosts.index == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    hosts.exchange(None)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_is_not_waited_for(victim):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [sys.executable, "-c", PROGRAM, str(port)]
    began = time.monotonic()
    both = [
        subprocess.Popen([*command, str(i), str(victim)], env=env, stdout=-1, stderr=-1, text=True) for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=WAIT_S) for process in both]
    finally:
        [process.kill() for process in both]
    assert both[victim].returncode == -9, said[victim][1][-2000:]
    other = 1 - victim
    assert both[other].returncode not in (0, -9), said[other][1][-2000:]
    assert "most likely died" in said[other][1] or "another task died" in said[other][1], said[other][1][-2000:]
    assert time.monotonic() - began < WAIT_S
    assert "alive" in said[0][0] and "alive" not in said[1][0]  # process 0 prints
