"""The loop with a fake pool and a fake learner: which tickets a batch holds, what is left out of it, when it evaluates
and saves.
"""

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import Task
from rl import loop
from rl.credit import relative
from rl.hosts import ALONE, HostError, Hosts
from rl.quarantine import Quarantine
from rl.rewards.compose import RewardTerm
from rl.rollout.feeder import MOST_REFUSED, Feeder
from rl.rollout.pool import Group
from rl.rollout.staleness import StalenessGate
from rl.types import Mean, Row, Status, Trajectory
from tests.rl.test_hosts import in_threads

TERMS = [RewardTerm("outcome", 1.0, "episode", lambda t: t.facts["score"])]
SIZE = 2
GOOD, EQUAL, DROPPED, FAILED = "good", "equal", "dropped", "one member failed"


def draw(ticket):
    return Task(f"task-{ticket}", "toy", "train", ticket, (), {})


def trajectory(ticket, member, score, status=Status.DONE):
    mask = np.array([False, True])
    row = Row(
        np.array([1, 2], np.int32),
        np.zeros(2, np.int32),
        mask,
        np.where(mask, -1, 0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )
    facts = {"score": score, "success": score == 1}
    return Trajectory(f"task-{ticket}", ticket, member, status, (row,), facts, {})


def group(ticket, scores, dropped=False, statuses=None):
    statuses = statuses or [Status.DONE] * len(scores)
    members = [trajectory(ticket, m, s, status) for m, (s, status) in enumerate(zip(scores, statuses, strict=True))]
    return Group(ticket, draw(ticket), tuple(members), dropped, 0)


def finish(ticket, kind):
    if kind == DROPPED:
        return group(ticket, [0.0, 1.0], True, [Status.ENV_ERROR, Status.DONE])
    if kind == FAILED:
        return group(ticket, [0.0, 1.0, 0.5], False, [Status.DONE, Status.DONE, Status.ENV_ERROR])
    return group(ticket, {GOOD: [0.0, 1.0], EQUAL: [0.5, 0.5]}[kind])


class FakePool:
    """Group t ends as `kinds(t)`; of those under way the `choose(n)`-th is the next to finish."""

    def __init__(self, kinds, choose=lambda n: 0):
        self.kinds, self.choose, self.open, self.submitted, self.most = kinds, choose, [], [], 0

    def submit_group(self, ticket, task, size):
        assert task == draw(ticket) and size == SIZE
        self.open.append(ticket)
        self.submitted.append(ticket)
        self.most = max(self.most, len(self.open))

    def next_group(self, timeout_s=None):
        ticket = self.open.pop(self.choose(len(self.open)))
        kind = self.kinds(ticket)
        return kind if isinstance(kind, Group) else finish(ticket, kind)


def gate(n):
    return StalenessGate(batch=n, max_staleness=0, max_running=n)


def roll_out(pool, n, progress=None, *, drop_equal=False, barrier=None):
    """The next batch, as (admitted, refused)."""
    progress = progress or loop.Progress()
    judge = partial(loop.judge, terms=TERMS, drop_equal_groups=drop_equal)
    with Feeder(
        pool, barrier or gate(n), draw, judge, progress.tickets(ALONE), size=SIZE, batch=n, batches=1
    ) as feeder:
        feeder.let_in(progress.version)
        admitted, refused = feeder.next_batch()
    assert not feeder.waiting()
    progress.settle(group.ticket for group in [*admitted, *refused])
    return admitted, refused


def tickets(groups):
    return [g.ticket for g in groups]


def test_the_place_of_a_refused_group_goes_to_the_next_ticket():
    pool, progress = FakePool([GOOD, DROPPED, GOOD, EQUAL, DROPPED, GOOD, GOOD].__getitem__), loop.Progress()
    admitted, refused = roll_out(pool, 4, progress)
    assert (tickets(admitted), tickets(refused)) == ([0, 2, 3, 5], [1, 4])
    assert pool.submitted == list(range(6)) and progress.ticket == 6
    assert all(t.scores == {"outcome": t.facts["score"]} for g in admitted for t in g.trajectories)  # scored


@pytest.mark.parametrize(("drop_equal", "want"), [(False, ([0, 1], [])), (True, ([1, 3], [0, 2]))])
def test_equal_groups_are_refused_where_that_is_asked(drop_equal, want):
    admitted, refused = roll_out(FakePool([EQUAL, FAILED, EQUAL, GOOD].__getitem__), 2, drop_equal=drop_equal)
    assert (tickets(admitted), tickets(refused)) == want


@given(
    st.lists(st.sampled_from([GOOD, GOOD, EQUAL, DROPPED, FAILED]), min_size=12, max_size=12),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.integers(0, 3), min_size=1),
)
def test_tickets_of_a_batch_do_not_depend_on_the_order_of_completion(kinds, n, drop_equal, picks):
    """Batch v is the v-th `n` admissible tickets; none is drawn twice or skipped, and none beyond what it needs."""
    kinds = [*kinds, *[GOOD] * 3 * n]
    picks = itertools.cycle(picks)
    pool = FakePool(kinds.__getitem__, lambda under_way: next(picks) % under_way)
    progress, barrier = loop.Progress(), gate(n)
    bad = {DROPPED, EQUAL} if drop_equal else {DROPPED}
    for _ in range(3):
        start = progress.ticket
        if sum(kind in bad for kind in kinds[start:]) >= MOST_REFUSED * n:
            return  # the error has its own test
        admitted, refused = roll_out(pool, n, progress, drop_equal=drop_equal, barrier=barrier)
        want = list(itertools.islice((t for t in range(start, len(kinds)) if kinds[t] not in bad), n))
        assert tickets(admitted) == want and progress.ticket == want[-1] + 1
        assert tickets(refused) == [t for t in range(start, progress.ticket) if t not in want]
        assert pool.submitted == list(range(progress.ticket)) and not pool.open and pool.most <= n
        progress.version += 1


def test_refills_are_bounded():
    pool = FakePool(([DROPPED] * 100).__getitem__)  # an IndexError where they are not
    with pytest.raises(RuntimeError, match="got 16 refused .*0 admitted .*for a batch of 2"):
        roll_out(pool, 2)
    assert len(pool.submitted) <= MOST_REFUSED * 2 + 2


@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ([0.5, 0.5], True),
        ([0.5, math.nan], True),  # one judged member has nobody to be compared with
        ([math.nan, math.nan], True),
        ([0.5, math.nan, 0.25], False),
        ([0.0, 1.0], False),
    ],
)
def test_is_equal_compares_the_judged_members(scores, want):
    assert loop.is_equal(loop.judge(group(0, scores), terms=TERMS).group) is want


# --- train ------------------------------------------------------------------------------------------------------------


class FakeLearner:
    @staticmethod
    def prepare(state, ref, batch):
        return batch

    @staticmethod
    def train_step(state, batch):
        return FakeState(), {"loss": Mean(1.0, 1), "optim/skipped": Mean(0.0, 1)}


class FakeState:
    params = "weights"


def run(pool, progress=None, **options):
    """(progress, what happened in order, packed batches, metrics by step)."""
    progress, events, batches, metrics = progress or loop.Progress(), [], [], {}

    def pack(episodes, credit, rewards, *, version):
        batches.append((episodes, credit, rewards, version))
        return "batch", {"pad_frac": 0.0, "rows": 1, "tokens": 4, "action_tokens": 2}

    def log(step, record):
        events.append(("log", step))
        metrics[step] = record

    def evaluate():
        events.append(("evaluate", progress.step))
        return {"sampled": 0.5}

    kwargs = {
        "draw": draw, "outcome": lambda ticket, trajectories: ticket, "observe": lambda outcomes, next_ticket: None,
        "admit": lambda trajectories: True, "terms": TERMS, "pack": pack, "log": log, "evaluate": evaluate,
        "publish": lambda params, version: events.append(("publish", version)),
        "keep_episodes": lambda step, kept: events.append(("keep", step, [(t.ticket, t.member) for t in kept])),
        "save": lambda state, progress, score: events.append(("save", progress.step, score)),
        "steps": 1, "groups_per_batch": 2, "group_size": SIZE, "drop_equal_groups": False,
        "credit": partial(relative, scale="none"),
        "eval_every": 0, "save_every": 0, **options,
    }  # fmt: skip
    n = kwargs["groups_per_batch"] // kwargs.get("hosts", ALONE).count
    barrier = gate(n)
    barrier.start_at(progress.version)
    loop.train(FakeLearner, FakeState(), None, pool, barrier, progress, **kwargs)
    return progress, events, batches, metrics


def test_an_episode_that_was_not_judged_is_kept_but_in_no_batch():
    kinds = [group(0, [0.0, math.nan, 1.0]), FAILED, DROPPED]
    _, events, [(episodes, credit, rewards, version)], metrics = run(FakePool(kinds.__getitem__))
    judged = [(0, 0), (0, 2), (1, 0), (1, 1)]
    assert [(t.ticket, t.member) for t in episodes] == judged == list(credit) == list(rewards)
    assert [credit[k] for k in judged] == [-0.5, 0.5, -0.5, 0.5] and version == 0
    assert list(rewards.values()) == [0, 1, 0, 1]
    (kept,) = [e[2] for e in events if e[0] == "keep"]
    assert set(kept) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)}
    assert metrics[1]["episode/env_error_frac"] == Mean(1, 6)


def test_refused_groups_are_kept_and_counted():
    _, events, [(episodes, *_)], metrics = run(
        FakePool([DROPPED, GOOD, EQUAL, GOOD].__getitem__), drop_equal_groups=True
    )
    assert {t.ticket for t in episodes} == {1, 3}
    (kept,) = [e[2] for e in events if e[0] == "keep"]
    assert sorted(kept) == [(t, m) for t in range(4) for m in range(2)]
    assert metrics[1]["episode/env_error_frac"] == Mean(1, 8)
    assert metrics[1]["batch/equal_groups_frac"].count == 4


def test_evaluates_on_schedule_and_at_the_end_alone_and_saves_with_the_score():
    progress, events, batches, _ = run(FakePool(lambda ticket: GOOD), steps=5, eval_every=2, save_every=3)
    assert [e[1] for e in events if e[0] == "evaluate"] == [2, 4, 5]
    assert [e[1:] for e in events if e[0] == "save"] == [(2, 0.5), (3, None), (4, 0.5), (5, 0.5)]
    assert [e[1] for e in events if e[0] == "publish"] == [1, 2, 3, 4, 5] == [b[3] + 1 for b in batches]
    assert (progress.step, progress.version, progress.ticket) == (5, 5, 10)


def test_a_batch_of_several_updates_is_so_many_steps_and_one_version():
    progress, events, batches, _ = run(FakePool(lambda ticket: GOOD), steps=6, minibatches=2, eval_every=4)
    assert [e[1] for e in events if e[0] == "log"] == [2, 4, 6] and [e[1] for e in events if e[0] == "evaluate"] == [
        4,
        6,
    ]
    assert [b[3] for b in batches] == [0, 1, 2] and (progress.step, progress.version, progress.ticket) == (6, 3, 6)
    with pytest.raises(ValueError, match="got steps=9 after 6, want a multiple of minibatches=2 more"):
        run(FakePool(lambda ticket: GOOD), progress, steps=9, minibatches=2)


def test_a_stop_saves_without_evaluating_and_the_next_run_goes_on():
    pool, progress = FakePool(lambda ticket: GOOD), loop.Progress()
    _, events, _, _ = run(pool, progress, steps=4, eval_every=2, stop=lambda: progress.step >= 1)
    assert progress.step == 1 and ("save", 1, None) in events and "evaluate" not in [e[0] for e in events]
    assert ("log", 1) in events
    _, events, batches, _ = run(pool, progress, steps=4, eval_every=2)
    assert [e[1] for e in events if e[0] == "log"] == [2, 3, 4] and [b[3] for b in batches] == [1, 2, 3]
    assert pool.submitted == list(range(8))


def test_a_stop_that_comes_during_a_save_loses_nothing():
    asked, saved = [], []

    def save(state, progress, score):
        saved.append(progress.step)
        asked.append(True)

    progress, *_ = run(FakePool(lambda ticket: GOOD), steps=6, save_every=2, save=save, stop=lambda: bool(asked))
    assert saved[-1] == progress.step < 6


def test_a_finished_run_does_nothing_more():
    progress = loop.Progress(step=3, version=3, ticket=6)
    _, events, batches, _ = run(FakePool(lambda ticket: GOOD), progress, steps=3, eval_every=1)
    assert events == batches == [] and progress == loop.Progress(step=3, version=3, ticket=6)


# --- several processes, as threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_make_the_batches_of_one(processes):
    pools = [FakePool(lambda ticket: GOOD) for _ in range(processes)]

    def work(hosts):
        return run(pools[hosts.index], steps=3, groups_per_batch=4, eval_every=2, hosts=hosts)

    alone = run(FakePool(lambda ticket: GOOD), steps=3, groups_per_batch=4, eval_every=2)
    own = in_threads(processes, work)
    assert [p.submitted for p in pools] == [list(range(i, 12, processes)) for i in range(processes)]
    for step in range(3):
        dealt = [credit for _, _, batches, _ in own for credit in batches[step][1].items()]
        assert sorted(dealt) == sorted(alone[2][step][1].items())
    for progress, _, _, metrics in own:
        assert progress == dataclasses.replace(alone[0], trained_s=progress.trained_s)
        for name, want in alone[3][3].items():
            if name.startswith(("episode/", "status/", "reward_by_status/")) or name == "batch/equal_groups_frac":
                assert metrics[3][name] == want, name
        assert metrics[3]["batch/tokens"] == Mean(4 * processes, processes)  # of a packing, what the fake one says


def test_a_refill_on_one_side_only_and_then_another_number_of_processes():
    kinds = [DROPPED if ticket in (0, 2, 6) else GOOD for ticket in range(40)]
    pools = [FakePool(kinds.__getitem__) for _ in range(2)]
    first, second = in_threads(2, lambda hosts: run(pools[hosts.index], steps=1, groups_per_batch=4, hosts=hosts))
    assert [p.submitted for p in pools] == [[0, 2, 4, 6, 8], [1, 3]]
    assert first[0].ahead == second[0].ahead == [6, 8] and first[0].ticket == second[0].ticket == 5
    progress, pool = first[0], FakePool(kinds.__getitem__)
    run(pool, progress, steps=2, groups_per_batch=4)
    assert pool.submitted == [5, 7, 9, 10] and (progress.ticket, progress.ahead) == (11, [])


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=4, max_size=4)), max_size=8))
def test_no_ticket_is_taken_twice_or_lost(stretches):
    """Stretches of a run, each by some number of processes, of which process i takes so many tickets."""
    progress, taken = loop.Progress(), []
    for processes, counts in stretches:
        everybody = []
        for index in range(processes):
            mine = progress.tickets(Hosts(index, processes, exchange=None, tell=None))
            own = list(itertools.islice(mine, counts[index]))
            assert all(ticket % processes == index for ticket in own)
            everybody += own
        progress.settle(everybody)
        taken += everybody
        assert len(set(taken)) == len(taken)
        assert set(taken) == {*range(progress.ticket), *progress.ahead}


def test_without_a_quarantine_no_task_is_held():
    """As over stored episodes: what they say is trained whatever else failed."""
    *_, metrics = run(FakePool(lambda ticket: GOOD))
    assert "rollout/quarantined" not in metrics[1]
    *_, metrics = run(FakePool(lambda ticket: GOOD), quarantine=Quarantine(9))
    assert metrics[1]["rollout/quarantined"].value == 0


def test_all_stop_where_one_is_asked_to():
    def work(hosts):
        progress = loop.Progress()
        stop = lambda: hosts.index == 1 and progress.step == 2  # noqa: E731
        return run(FakePool(lambda ticket: GOOD), progress, steps=9, hosts=hosts, stop=stop)

    for progress, events, *_ in in_threads(2, work):
        assert progress.step == 2 and ("save", 2, None) in events


@pytest.mark.parametrize("where", ["pool", "log"])
def test_what_one_raises_all_raise(where):
    def fail(*_):
        raise OSError("the disk is full")

    def work(hosts):
        broken = hosts.index == 1
        pool = FakePool(fail if broken and where == "pool" else lambda ticket: GOOD)
        return run(pool, steps=3, hosts=hosts, **({"log": fail} if broken and where == "log" else {}))

    other, own = in_threads(2, work)
    assert isinstance(own, OSError)
    assert isinstance(other, HostError) and "process 1 failed: OSError: the disk is full" in str(other)
