"""The ideal schedule that `launch.bench async` is measured by, where it can be told without one."""

import pytest

from launch import bench_async
from launch.bench_async import ideal_s, latencies

SIZES = {"steps": 5, "groups": 3, "size": 2}


def episodes(step):
    return [sum(latencies(0, 3 * step + group, member)) for group in range(3) for member in range(2)]


def test_synchronous_it_is_the_slowest_of_each_batch():
    want = sum(max(episodes(step)) for step in range(5))
    assert ideal_s(0, 0, 6, **SIZES) == pytest.approx(want) == ideal_s(0, 0, 99, **SIZES)


def test_one_worker_plays_all_and_workers_for_all_wait_for_the_slowest():
    everything = [seconds for step in range(5) for seconds in episodes(step)]
    for staleness in (0, 1, 9):
        assert ideal_s(0, staleness, 1, **SIZES) == pytest.approx(sum(everything))
    assert ideal_s(0, 9, 30, **SIZES) == pytest.approx(max(everything))


def test_it_gains_by_running_ahead_and_never_beats_the_work():
    took = [ideal_s(1, staleness, 6, **SIZES | {"steps": 20}) for staleness in (0, 1, 2, 4)]
    work = sum(sum(latencies(1, ticket, member)) for ticket in range(60) for member in range(2))
    assert took == sorted(took, reverse=True) and took[0] > took[-1] >= work / 6


def test_latencies_are_addressed_and_log_normal():
    some = [seconds for ticket in range(400) for seconds in latencies(3, ticket, 1)]
    assert latencies(3, 7, 1) == latencies(3, 7, 1) != latencies(3, 7, 0) and len(latencies(3, 7, 1)) == 6
    assert sorted(some)[len(some) // 2] == pytest.approx(bench_async.MEDIAN_S, rel=0.1)
    assert sum(some) / len(some) == pytest.approx(0.3 * 2.718281828**0.5, rel=0.1)
