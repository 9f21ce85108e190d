"""Laws of asynchrony, over a scripted pool and a learner that learns nothing, whatever finishes when.

Batches are the admitted tickets in ticket order; no trained token is older than max_staleness versions, and the check
at the cut is an assertion; nothing is lost for being slow; a run that is killed and resumed trains the same tickets.
"""

import itertools
import threading
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import Task
from rl import checkpoint, loop
from rl.credit import relative
from rl.curriculum import Curriculum, TaskStream
from rl.hosts import ALONE
from rl.rewards.compose import RewardTerm
from rl.rollout.batcher import pack
from rl.rollout.feeder import MOST_REFUSED, Feeder
from rl.rollout.pool import Group
from rl.rollout.staleness import StalenessGate
from rl.rollout.worker import Record
from rl.types import Mean, Status, Trajectory, Turn
from tests.rl.test_hosts import in_threads

SIZE = 2
TERMS = [RewardTerm("outcome", 1.0, "episode", lambda t: float(t.member))]
TASKS = [Task(f"task-{i}", "toy", "train", i, (), {}) for i in range(24)]


def length(ticket, member):
    """Tokens of an episode: they differ much."""
    return 2 + (ticket * 7 + member * 3) % 11


class Worlds:
    """A pool whose groups finish in the order of `picks`: the pick-th of those under way, None: nothing finishes now.

    An episode's first token is sampled as its group is submitted, the others as it finishes.
    """

    def __init__(self, picks=(0,), refused=frozenset(), by_length=False):
        self.picks, self.refused, self.by_length = itertools.cycle([*picks, 0]), refused, by_length
        self.version, self.open, self.submitted, self.most = 0, {}, [], 0
        self.lock = threading.Lock()

    def publish(self, params, version):
        self.version = version

    def submit_group(self, ticket, task, size):
        with self.lock:
            self.open[ticket] = (task, self.version)
            self.submitted.append(ticket)

    def next_group(self, timeout_s):
        pick = next(self.picks)
        with self.lock:
            self.most = max(self.most, len(self.open))
            if pick is None:
                raise TimeoutError
            under_way = sorted(self.open, key=lambda t: length(t, 0)) if self.by_length else list(self.open)
            ticket = under_way[pick % len(under_way)]
            task, version = self.open.pop(ticket)
        members = tuple(self.episode(task, ticket, member, version) for member in range(SIZE))
        return Group(ticket, task, members, ticket in self.refused, 0)

    def episode(self, task, ticket, member, version):
        record, n = Record(), length(ticket, member)
        record.given([1], -1)
        record.sampled(Turn([2] * n, [-1.0] * n, [version] + [self.version] * (n - 1), "stop"), 0)
        return Trajectory(task.task_id, ticket, member, Status.DONE, record.rows(), {"success": True}, {})


class Learner:
    """Learns nothing; `during` is called in its step."""

    params = "weights"

    def __init__(self, during=lambda: None):
        self.during = during

    def prepare(self, state, ref, batch):
        return batch

    def train_step(self, state, batch):
        self.during()
        return state, {"loss": Mean(1.0, 1), "optim/skipped": Mean(0.0, 1)}


def train(
    pool, progress, curriculum, *, n, staleness, steps, bound=None, learner=None, hosts=ALONE, save=None, trained=None,
    log=lambda step: None, **options,
):  # fmt: skip
    """What each step trained on, {step: (episodes, batch)}; the gate's bound is `staleness`, the cut's `bound`."""
    trained, share = {} if trained is None else trained, n // hosts.count
    gate = StalenessGate(batch=share, max_staleness=staleness, max_running=(staleness + 1) * share)
    gate.start_at(progress.version)
    pool.version = progress.version
    shape = {"rows": 4 * n, "length": 16, "micro_rows": 1, "pad_id": 0}

    def packed(episodes, credit, rewards, *, version):
        limit = staleness if bound is None else bound
        batch, stats = pack(episodes, credit, rewards, **shape, version=version, max_staleness=limit)
        trained[version + 1] = (episodes, batch)
        return batch, stats

    learner = learner or Learner()
    loop.train(
        learner, learner, None, pool, gate, progress,
        draw=curriculum.draw, outcome=curriculum.outcome, observe=curriculum.observe, admit=lambda trajectories: True,
        terms=TERMS, pack=packed, keep_episodes=lambda step, kept: None,
        log=lambda step, record: log(step), evaluate=None, save=save or (lambda *args: None), steps=steps,
        groups_per_batch=n, group_size=SIZE, credit=partial(relative, scale="none"), drop_equal_groups=False,
        eval_every=0, hosts=hosts, **{"save_every": 0, "publish": pool.publish, **options},
    )  # fmt: skip
    return trained


def fresh():
    return Curriculum(TaskStream(TASKS, 5))


def tickets(trained):
    """By step, in the order of the batch: (ticket, member)."""
    return [[(t.ticket, t.member) for t in trained[step][0]] for step in sorted(trained)]


def admitted(refused, n, steps):
    own = list(itertools.islice((t for t in itertools.count() if t not in refused), n * steps))
    return [[(t, m) for t in own[i : i + n] for m in range(SIZE)] for i in range(0, n * steps, n)]


PICKS = st.lists(st.none() | st.integers(0, 9), max_size=30)
REFUSED = st.frozensets(st.integers(0, 12), max_size=6)


@given(st.integers(1, 3), st.integers(0, 4), st.integers(1, 6), PICKS, REFUSED)
@settings(max_examples=60)
def test_batches_are_in_ticket_order_and_no_token_is_too_old(n, staleness, steps, picks, refused):
    pool, progress = Worlds(picks, refused), loop.Progress()
    if len(refused) >= MOST_REFUSED * n:
        return
    trained = train(pool, progress, fresh(), n=n, staleness=staleness, steps=steps)
    assert tickets(trained) == admitted(refused, n, steps)
    for step, (episodes, batch) in trained.items():
        ages = {step - 1 - int(v) for t in episodes for row in t.rows for v in row.version[row.action_mask]}
        assert min(ages) >= 0 and max(ages) <= staleness
        assert int(batch.staleness.max()) == max(ages)  # what the loss and the metrics read
    # Nothing is played that no batch holds, nothing twice, and never more than the bound lets in.
    assert sorted(pool.submitted) == list(range(progress.ticket)) and not pool.open
    assert pool.most <= (staleness + 1) * n


def test_sampling_runs_ahead_while_the_learner_computes():
    """Each step ends only when all that the gate may let in has been played, which takes other threads than this."""
    pool, ahead, steps = Worlds([0]), [], 5
    played = threading.Event()

    def during():
        for _ in range(300):
            if len(pool.submitted) - len(pool.open) >= min(2 * (len(ahead) + 3), 2 * steps):
                break
            played.wait(0.01)
        ahead.append(len(pool.submitted) - len(pool.open))

    trained = train(pool, loop.Progress(), fresh(), n=2, staleness=2, steps=steps, learner=Learner(during))
    assert ahead == [6, 8, 10, 10, 10]  # (η + 1 + version) batches, up to the last
    assert [int(batch.staleness.max()) for _, batch in trained.values()] == [0, 1, 2, 2, 2]


def test_the_place_of_a_refused_group_is_filled_while_the_learner_computes():
    """Of the tickets that are let in first, 0 to 5, half are refused: 6 to 8 are played before the first step ends."""
    pool, played = Worlds([0], refused={3, 4, 5}), []

    def during():
        for _ in range(300):
            if len(pool.submitted) == 9 or played:
                break
            threading.Event().wait(0.01)
        played.append(sorted(pool.submitted))

    train(pool, loop.Progress(), fresh(), n=2, staleness=2, steps=3, learner=Learner(during))
    assert played[0] == list(range(9))


def test_a_batch_that_nothing_under_way_would_complete_is_an_error():
    gate = StalenessGate(batch=2, max_staleness=0, max_running=2)
    judge = partial(loop.judge, terms=TERMS)
    with Feeder(Worlds(), gate, fresh().draw, judge, itertools.count(), size=SIZE, batch=2, batches=2) as feeder:
        feeder.let_in(0)
        assert [group.ticket for group in feeder.next_batch()[0]] == [0, 1]
        with pytest.raises(RuntimeError, match="got no group under way and 0 ready, want 2 admitted .*; call let_in"):
            feeder.next_batch()


def test_a_token_over_the_bound_ends_the_run():
    pool = Worlds([0])
    with pytest.raises(AssertionError, match="got a token 1 versions old at version 1, want at most max_staleness=0"):
        train(pool, loop.Progress(), fresh(), n=2, staleness=2, bound=0, steps=3)


@given(st.integers(1, 3), st.integers(1, 4), PICKS)
@settings(max_examples=30)
def test_what_is_trained_is_as_long_as_what_is_generated(n, staleness, picks):
    """The shortest under way finishes first: whoever trained what is there first would train short episodes."""
    pool, steps = Worlds([None if pick is None else 0 for pick in picks], by_length=True), 4
    trained = train(pool, loop.Progress(), fresh(), n=n, staleness=staleness, steps=steps)
    lengths = [t.n_actions for step in sorted(trained) for t in trained[step][0]]
    assert lengths == [length(ticket, member) for ticket in range(n * steps) for member in range(SIZE)]
    assert len(pool.submitted) == n * steps


class Killed(Exception):
    """The process is gone: what was not saved is lost."""


def killed_and_resumed(kills, *, n, staleness, steps, picks, refused, save_every, processes=(1,)):
    """What was trained in all, and the tickets that each launch played; the launch after `kills[i]` more steps ends."""
    saved, trained, plays = {}, {}, []
    counts = itertools.cycle(processes)
    for kill in [*kills, None]:
        state = checkpoint._unpack(checkpoint._pack(saved)) if saved else {}
        count = next(counts)
        done = state.get("progress", {}).get("step", 0)

        def launch(hosts):
            progress, curriculum, own = loop.Progress(**state.get("progress", {})), fresh(), {}  # noqa: B023
            if state:  # noqa: B023
                curriculum.load_state_dict(state["tasks"])  # noqa: B023
            pool = Worlds(picks, refused)

            def save(_, progress, score):
                if hosts.index == 0:
                    tasks = curriculum.state_dict(progress.ticket)
                    saved.update(progress=dict(vars(progress)), tasks=tasks)

            def log(step):
                if kill is not None and step > done + kill:  # noqa: B023
                    raise Killed

            options = {"save_every": save_every, "save": save, "log": log, "trained": own, "hosts": hosts}
            try:
                train(pool, progress, curriculum, n=n, staleness=staleness, steps=steps, **options)
            except Exception as error:
                if kill is None or not isinstance(error, Killed):  # noqa: B023
                    raise
            return own, pool.submitted

        results = [launch(ALONE)] if count == 1 else in_threads(count, launch)
        for result in results:
            assert isinstance(result, tuple), result
        for step in sorted({step for own, _ in results for step in own}):
            trained[step] = sorted((t.ticket, t.member) for own, _ in results for t in own.get(step, ((), None))[0])
        plays.append((state.get("progress", {}), [ticket for _, submitted in results for ticket in submitted]))
    return [trained[step] for step in sorted(trained)], plays


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 2),
    PICKS,
    REFUSED,
)
@settings(max_examples=40)
def test_killed_and_resumed_it_trains_the_same_tickets(kills, n, staleness, save_every, picks, refused):
    if len(refused) >= MOST_REFUSED * n:
        return
    options = {"n": n, "staleness": staleness, "steps": 6, "picks": picks, "refused": refused, "save_every": save_every}
    trained, plays = killed_and_resumed(kills, **options)
    assert trained == admitted(refused, n, 6)
    for progress, played in plays:  # what waited is not played again; what was under way is
        waited = {saved["ticket"] for saved in progress.get("waiting", ())}
        assert not waited & {*played} and len(played) == len({*played})
        first = progress.get("ticket", 0)
        assert {*played, *waited} == {*range(first, first + len(played) + len(waited))}


def test_each_task_is_trained_once_an_epoch_across_kills():
    """24 tasks, 6 batches of 4: whatever waited or was under way when the run died."""
    picks = [3, None, 5, 2, None, 7, 1]
    options = {"n": 4, "staleness": 2, "steps": 6, "picks": picks, "refused": frozenset(), "save_every": 1}
    trained, plays = killed_and_resumed([1, 0, 2], **options)
    stream = TaskStream(TASKS, 5)
    names = [stream.draw(ticket).task_id for batch in trained for ticket, member in batch if member == 0]
    assert sorted(names) == sorted(task.task_id for task in TASKS)
    assert any(progress.get("waiting") for progress, _ in plays)


def test_what_waits_is_dealt_again_to_other_processes():
    picks = [5, 3, 6, 0, 0]  # later tickets always finish before the first: some wait at every save
    options = {"n": 4, "staleness": 2, "steps": 6, "picks": picks, "refused": frozenset(), "save_every": 1}
    trained, plays = killed_and_resumed([2], processes=(1, 2), **options)
    assert trained == admitted(frozenset(), 4, 6)
    waited = {saved["ticket"] for saved in plays[1][0]["waiting"]}
    assert waited and not waited & {*plays[1][1]}


def test_a_fault_of_the_pool_or_of_a_judge_reaches_the_loop_and_no_thread_stays():
    def broken(timeout_s):
        raise OSError("the world is gone")

    pool = Worlds()
    pool.next_group = broken
    with pytest.raises(OSError, match="the world is gone"):
        train(pool, loop.Progress(), fresh(), n=2, staleness=1, steps=2)
    assert not any(thread.name == "feeder" for thread in threading.enumerate())
