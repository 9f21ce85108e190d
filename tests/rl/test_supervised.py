"""Supervised training with a fake learner: which rows a step trains, when it evaluates and saves, and where it ends."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl import supervised
from rl.loop import Progress
from rl.types import Mean, TrajectoryBatch
from tests.rl.test_hosts import in_threads


def rows_of(n):
    """Row i holds token i."""
    names = [f.name for f in dataclasses.fields(TrajectoryBatch)][:8]  # those that are never absent
    return TrajectoryBatch(**{name: np.arange(n)[:, None] for name in names})


def picked(rows, step, n, seed):
    return supervised.pick_rows(rows, step, n, seed).tokens[:, 0].tolist()


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2**31 - 1))
def test_each_epoch_visits_every_row_once(n, total, seed):
    rows = rows_of(total)
    steps = -(-3 * total // n)
    flat = [i for step in range(steps) for i in picked(rows, step, n, seed)]
    for epoch in range(3):
        assert sorted(flat[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_rows_are_addressed_by_seed_and_step():
    rows = rows_of(20)
    want = [picked(rows, step, 4, 0) for step in range(10)]
    assert [picked(rows, step, 4, 0) for step in reversed(range(10))] == want[::-1]  # whatever was picked before
    assert want[:5] != want[5:]  # each epoch its own order
    assert want != [picked(rows, step, 4, 1) for step in range(10)]
    batch = supervised.pick_rows(rows, 0, 4, 0)
    assert batch.ref_logp is None and np.array_equal(batch.segment, batch.tokens)  # every field, the same rows


class FakeLearner:
    """Its weights are what it was given, in order: any two different histories end differently."""

    @staticmethod
    def train_step(state, batch):
        return state + (tuple(batch.tokens[:, 0].tolist()),), {
            "loss": Mean(float(len(state)), 1),
            "optim/skipped": Mean(0.0, 1),
        }


def run(progress, state=(), **options):
    """(state, saves, metrics by step)."""
    saves, metrics = [], {}
    kwargs = {
        "rows_per_step": 3, "seed": 5, "steps": 6, "eval_every": 0, "save_every": 0,
        "evaluate": lambda state: 0.1 * len(state), "log": lambda step, record: metrics.__setitem__(step, record),
        "save": lambda state, progress, score: saves.append((progress.step, state, score)), **options,
    }  # fmt: skip
    state = supervised.train(FakeLearner, state, rows_of(7), progress, **kwargs)
    return state, saves, metrics


@pytest.mark.parametrize("k", range(1, 6))
def test_stopped_after_k_steps_and_resumed_equals_uninterrupted(k):
    want, _, metrics = run(Progress())
    progress = Progress()
    _, saves, before = run(progress, stop=lambda: progress.step >= k)
    assert saves[-1][0] == progress.step == k
    got, _, after = run(Progress(step=k), saves[-1][1])
    assert got == want and len(want) == 6
    assert {s: r["loss"] for s, r in (before | after).items()} == {s: r["loss"] for s, r in metrics.items()}


def test_a_finished_run_trains_nothing_more():
    progress = Progress(step=6)
    assert run(progress, ("trained",), eval_every=1) == (("trained",), [], {})
    assert progress == Progress(step=6)


def test_evaluates_on_schedule_and_at_the_end_alone_and_saves_with_the_score():
    state, saves, metrics = run(Progress(), steps=5, eval_every=2, save_every=3)
    assert [(step, score) for step, _, score in saves] == [(2, 0.2), (3, None), (4, 0.4), (5, 0.5)]
    assert {step: r["eval/sampled"] for step, r in metrics.items() if "eval/sampled" in r} == {2: 0.2, 4: 0.4, 5: 0.5}
    assert all(r["time/trained_s"] >= 0 for r in metrics.values()) and saves[-1][1] == state
    progress = Progress()
    _, saves, _ = run(progress, eval_every=2, stop=lambda: progress.step >= 1)
    assert [(step, score) for step, _, score in saves] == [(1, None)]
    _, saves, _ = run(Progress(), evaluate=None, eval_every=2)
    assert [(step, score) for step, _, score in saves] == [(6, None)]


def test_of_two_processes_each_trains_its_share_and_both_stop_together():
    def work(hosts):
        progress = Progress()
        stop = lambda: hosts.index == 0 and progress.step == 4  # noqa: E731
        return run(progress, rows_per_step=4, hosts=hosts, stop=stop)

    want, _, _ = run(Progress(), rows_per_step=4, steps=4)
    (first, saves, _), (second, *_) = in_threads(2, work)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(rows) for rows in want]
    assert [step for step, *_ in saves] == [4] and all(len(rows) == 2 for rows in first + second)
