"""Laws of failed worlds: what a failure was is said by its type alone, each kind has its own budget, every member and
every attempt is counted, an attempt that was given up says nothing any more, and a task on which the world always
fails is not played again: after the cut that told of it, in every process, also after a resume.
"""

import itertools
import subprocess
import threading
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import failures
from envs.base import EnvError, EnvLost
from envs.failures import DATA, INFRASTRUCTURE, kind_of, signature_of
from models.sampling import Sampling
from rl import loop
from rl.quarantine import Quarantine, QuarantineError
from rl.rollout.failures import Budget, Failure, deterministic, failure_facts, repeated
from rl.rollout.feeder import MOST_REFUSED
from rl.rollout.pool import Group
from rl.rollout.table import Job, OpenGroup, Table
from rl.rollout.watched import guarded
from rl.types import Status, Trajectory
from tests.laws.test_async import PICKS, SIZE, TASKS, Worlds, fresh, tickets, train
from tests.rl.test_hosts import in_threads
from tests.rl.test_pool import TASK, episode, make_pool, ok


def raised(error):
    """As the worker sees it: the world's own error is the cause."""

    def step():
        raise error

    with pytest.raises(EnvError) as caught:
        guarded("step", step)
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind", "signature"),
    [
        (ConnectionResetError(104, "reset by peer"), INFRASTRUCTURE, "ConnectionResetError: [Errno #] reset by peer"),
        (TimeoutError("no answer in 3.5 s"), INFRASTRUCTURE, "TimeoutError: no answer in # s"),
        (OSError(28, "No space left on device"), INFRASTRUCTURE, "OSError: [Errno #] No space left on device"),
        (MemoryError(), INFRASTRUCTURE, "MemoryError: "),
        (EOFError(), INFRASTRUCTURE, "EOFError: "),
        (subprocess.TimeoutExpired("x", 3), INFRASTRUCTURE, "TimeoutExpired: Command 'x' timed out after # seconds"),
        (EnvLost("process 71 died of signal 9"), INFRASTRUCTURE, "EnvLost: process # died of signal #"),
        (FileNotFoundError(2, "gone", "/data/t/7.json"), DATA, "FileNotFoundError: [Errno #] gone: '#'"),
        (KeyError("rows"), DATA, "KeyError: 'rows'"),
        (ValueError("<x at 0x7f3a10> in 3f2a99b7c41d, row 12"), DATA, "ValueError: <x at #> in #, row #"),
        (SystemExit(3), DATA, "SystemExit: #"),
        (EnvError("the world gave list [], want a Step"), DATA, "EnvError: the world gave list [], want a Step"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failure_is_told_by_its_type_and_known_again(error, kind, signature):
    outer = raised(error)
    assert (kind_of(outer), signature_of(outer)) == (kind, signature)
    facts = failure_facts(outer)
    assert (facts["failure"], facts["signature"]) == (kind, signature) and type(error).__name__ in facts["error"]


def test_of_a_text_of_any_length_and_any_characters_little_is_looked_at(monkeypatch):
    """It may quote what the policy wrote, and each further character costs the pattern more than the one before."""
    looked_at = []

    def sub(by, text):
        looked_at.append(len(text))
        return text

    monkeypatch.setattr(failures, "_VARIES", SimpleNamespace(sub=sub))
    facts = failure_facts(raised(ValueError("cannot parse caf\udce9 " + "1a2b" * 50_000 + "z")))
    assert looked_at and max(looked_at) <= 1000
    assert all(len(text.encode()) < 5000 for text in facts.values()) and "cannot parse caf? 1a2b" in facts["error"]


LOST, SLOW = Failure(INFRASTRUCTURE, "lost"), Failure(INFRASTRUCTURE, "slow")
BAD, WORSE = Failure(DATA, "bad"), Failure(DATA, "worse")


@pytest.mark.parametrize(
    ("failures", "spent", "again"),
    [  # two tries for the infrastructure, three of a group; two for data, if they are not alike
        ([LOST], 0, True),
        ([LOST, SLOW], 1, True),
        ([LOST, LOST, LOST], 2, False),
        ([LOST], 3, False),
        ([BAD], 3, True),  # what the group spent on infrastructure is no matter of the data
        ([BAD, BAD], 0, False),
        ([BAD, WORSE], 0, True),
        ([BAD, WORSE, Failure(DATA, "other")], 0, False),
        ([LOST, LOST, BAD], 2, True),
        ([BAD, WORSE, LOST, LOST], 1, True),
        ([BAD, LOST, BAD], 1, False),
    ],
)
def test_each_kind_has_a_budget_of_its_own(failures, spent, again):
    assert Budget(infrastructure=2, data=2, group=3).allows(failures, spent) is again
    assert repeated(failures) is (failures[-1] == BAD and failures.count(BAD) > 1)


def group_of(size, ticket=0):
    return OpenGroup(ticket, TASK, Sampling(), 0, deque(), dict.fromkeys(range(size)), [[] for _ in range(size)])


OUTCOMES = st.sampled_from([LOST, SLOW, BAD, WORSE, Status.DONE, Status.TURN_LIMIT, Status.CANCELLED])
BUDGETS = st.builds(Budget, st.integers(0, 2), st.integers(0, 2), st.integers(0, 4))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), BUDGETS, st.lists(OUTCOMES), st.integers(0, 60), st.data())
def test_every_member_and_every_attempt_is_counted(sizes, budget, outcomes, closed_after, data):
    """Whatever ends how, in whatever order, twice or late, and whenever the pool is closed."""
    table, inboxes, begun, running, late = Table(budget, min_scored=2), [], 0, [], 0
    for ticket, size in enumerate(sizes):
        group = group_of(size, ticket)
        inboxes.append(group.inbox)
        table.add(group)
    how = itertools.cycle([*outcomes, Status.DONE])
    for _ in range(closed_after):
        while table.jobs and (not running or data.draw(st.booleans())):
            running.append(table.jobs.popleft())
            begun += 1
        if not running:
            break
        job = running.pop(data.draw(st.integers(0, len(running) - 1)))
        outcome = next(how)
        failed = isinstance(outcome, Failure)
        facts = {"failure": outcome.kind, "signature": outcome.signature} if failed else {}
        assert table.end(job, job.empty(Status.ENV_ERROR if failed else outcome, **facts), 0.0)
        if data.draw(st.booleans()):  # a thread that was given up says so again
            before = [list(inbox) for inbox in inboxes]
            assert not table.end(job, job.empty(Status.DONE), 0.0)
            late += 1
            assert before == [list(inbox) for inbox in inboxes]
    cut = sum(t is None for group in table.groups for t in group.ended.values())
    table.closing = True
    table.cancel("closed")
    n = table.counts
    assert n["members_submitted"] == sum(sizes) == n["members_scored"] + n["members_failed"] + n["members_cancelled"]
    assert n["groups_submitted"] == len(sizes) == n["groups_done"] + n["groups_dropped"] + n["groups_cancelled"]
    assert n["env_errors"] == n["infrastructure_errors"] + n["data_errors"] == n["members_failed"] + n["retries"]
    assert begun - len(running) == n["episodes"] == sum(sizes) - cut + n["retries"]
    assert n["late_attempts"] == late and not table.groups and not table.jobs
    delivered = [group for inbox in inboxes for group in inbox]
    assert all(len(group.trajectories) == sizes[group.ticket] for group in delivered)
    assert all(group.retries <= sizes[group.ticket] * (budget.infrastructure + budget.data) for group in delivered)


@pytest.mark.parametrize(
    ("failures", "pauses"),
    [  # (seconds, what came then) and the seconds from then on in which nothing begins
        ([(0, LOST), (0.1, LOST), (0.2, SLOW), (0.4, LOST), (0.8, LOST)], [0.1, 0.1, 0.2, 0.4, 0.8]),
        ([(0, LOST), (0, LOST), (0, LOST)], [0.1, 0.1, 0.1]),  # many at once are one outage
        ([(0, LOST), (300, LOST)], [0.1, 10.0]),
        ([(0, LOST), (300, Status.DONE), (301, LOST)], [0.1, 0.0, 0.1]),
        ([(0, BAD), (300, BAD)], [0.0, 0.0]),  # data is as bad at once as later
    ],
)
def test_the_longer_the_infrastructure_fails_the_longer_nothing_begins(failures, pauses):
    table, group = Table(Budget(9, 9, 9), min_scored=2), group_of(len(failures))
    table.add(group)
    for job, (now_s, outcome), pause_s in zip(list(table.jobs), failures, pauses, strict=True):
        failed = isinstance(outcome, Failure)
        facts = {"failure": outcome.kind, "signature": outcome.signature} if failed else {}
        table.end(job, job.empty(Status.ENV_ERROR if failed else outcome, **facts), now_s)
        assert max(0.0, table.not_before_s - now_s) == pytest.approx(pause_s)


def test_what_a_given_up_attempt_says_late_is_discarded():
    """The first attempt hangs, the second succeeds; then the first says that it succeeded too, with another text."""
    release, hung, seen = threading.Event(), threading.Event(), []

    def play(action):
        seen.append(action)
        if len(seen) == 1:
            hung.set()
            release.wait(10)
        return ok(action)

    def telling(env, task, codec, session, **how):
        trajectory = episode(env, task, codec, session, **how)
        session.engine.blocks = False
        return trajectory

    pool = make_pool(play, threads=2, call_deadline_s=0.05, episode=telling)
    pool.submit_group(0, TASK, 1)
    assert hung.wait(5)
    group = pool.next_group(5)
    assert [t.status for t in group.trajectories] == [Status.DONE] and group.retries == 1 and len(seen) == 2
    pool.submit_group(1, TASK, 1)
    release.set()
    assert [g.ticket for g in (pool.next_group(5),)] == [1]
    for _ in range(500):
        if pool.stats()["late_attempts"]:
            break
        threading.Event().wait(0.01)
    stats = pool.stats()
    assert (stats["late_attempts"], stats["lost_threads"], stats["groups_done"], stats["groups_open"]) == (1, 1, 2, 0)
    assert pool.close()


def failed(ticket, member, kind=DATA, signature="KeyError: 'rows'", again=True):
    facts = {"success": False, "error": "KeyError", "failure": kind, "signature": signature, "repeated": again}
    return Trajectory("task-0", ticket, member, Status.ENV_ERROR, (), facts, {})


def done(ticket, member, status=Status.DONE):
    return Trajectory("task-0", ticket, member, status, (), {"success": True}, {})


@pytest.mark.parametrize(
    ("members", "proved"),
    [
        ([failed(0, 0), failed(0, 1), failed(0, 2)], 3),
        ([failed(0, 0), failed(0, 1), failed(0, 2, INFRASTRUCTURE, "EOFError: ", False)], 2),
        ([failed(0, 0), failed(0, 1), failed(0, 2, again=False)], None),  # one was not tried again
        ([failed(0, 0), failed(0, 1), done(0, 2)], None),  # one came through
        ([failed(0, 0), failed(0, 1), done(0, 2, Status.CANCELLED)], None),
        ([failed(0, 0), *[failed(0, m, INFRASTRUCTURE, "EOFError: ", False) for m in (1, 2)]], None),  # one is few
        ([failed(0, 0)], 1),  # a group of one
        ([failed(0, 0, INFRASTRUCTURE, "EOFError: ", False)], None),
    ],
)
def test_what_proves_that_a_task_always_fails(members, proved):
    found = deterministic(members)
    want = {"task_id": "task-0", "signature": "KeyError: 'rows'", "count": proved, "error": "KeyError"}
    assert found == (None if proved is None else want)


def test_causes_that_go_in_a_circle_have_an_end():
    first, second = KeyError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert failure_facts(first)["error"] == "ValueError: b" and kind_of(first) == DATA


@pytest.mark.parametrize("data_retries", [1, 2])
def test_the_pool_proves_it_on_fresh_worlds_and_stops_trying(data_retries):
    """Member 1 fails with a text that differs in numbers alone; worlds that failed are not asked again."""
    worlds, calls = [], []

    def play(action):
        calls.append(action)
        raise KeyError(f"row {len(calls)} at 0x{len(calls):x}f")

    pool = make_pool(play, threads=1, budget=Budget(data=data_retries))
    make, pool.make_env = pool.make_env, lambda: worlds.append(make()) or worlds[-1]
    pool.submit_group(3, TASK, 2)
    group = pool.next_group(5)
    assert len(calls) == len(worlds) == 4 and all(world.closed for world in worlds)  # each member twice, and no more
    assert deterministic(group.trajectories)["signature"] == "KeyError: 'row # at #'"
    assert pool.close()


def test_a_further_attempt_has_a_fresh_world():
    """Whichever thread takes it: this one's world has played before, and well."""
    pool = make_pool(threads=1)
    pool.submit_group(0, TASK, 1)
    pool.next_group(5)
    slot = pool._slots[0]
    used, group = slot.env, group_of(1, ticket=1)
    for attempt, fresh_one in ((0, False), (1, True)):
        assert pool._play(slot, Job(group, 0, attempt)).status is Status.DONE
        assert (slot.env is not used) is fresh_one and used._env.closed is fresh_one
    assert pool.close()


class Broken(Worlds):
    """The tasks of these ids always fail; a refused group is played and dropped."""

    def __init__(self, picks=(0,), refused=frozenset(), broken=frozenset(), drawn=None):
        super().__init__(picks, refused)
        self.broken, self.played = broken, []

    def submit_group(self, ticket, task, size):
        super().submit_group(ticket, task, size)
        self.played.append(task.task_id)

    def next_group(self, timeout_s):
        group = super().next_group(timeout_s)
        if group.task.task_id not in self.broken:
            return group
        facts = failed(group.ticket, 0).facts
        members = tuple(
            Trajectory(group.task.task_id, group.ticket, m, Status.ENV_ERROR, (), facts, {}) for m in range(SIZE)
        )
        return Group(group.ticket, group.task, members, True, SIZE)


def expected(broken, n, steps, ticket=0, held=frozenset()):
    """Tickets of each batch, by epochs of the stream: a broken task is played until the cut that tells of it."""
    draw, held, batches = fresh().draw, set(held), []
    for _ in range(steps):
        batch, told = [], set()
        while len(batch) < n:
            task_id = draw(ticket).task_id
            if task_id in broken:
                told.add(task_id)
            else:
                batch.append(ticket)
            ticket += 1
        held |= told
        batches.append([(t, m) for t in batch for m in range(SIZE)])
    return batches


IDS = st.frozensets(st.sampled_from([task.task_id for task in TASKS]), max_size=6)


@given(st.integers(2, 4), st.integers(0, 2), PICKS, IDS, st.integers(1, 11))
@settings(max_examples=25)
def test_a_quarantined_task_is_not_played_again_also_after_a_resume(n, staleness, picks, broken, kill):
    """Three epochs of 24 tasks; killed once, and resumed from what was saved then."""
    if len(broken) >= MOST_REFUSED * n:
        return
    steps, saved, trained = 12, {}, {}

    class Killed(Exception):
        pass

    for dies in (True, False):
        progress = loop.Progress(**saved.get("progress", {}))
        pool, quarantine, curriculum = Broken(picks, broken=broken), Quarantine(len(TASKS)), fresh()
        if saved:
            quarantine.load_state_dict(saved["quarantine"])
            curriculum.load_state_dict(saved["tasks"])
        submitted_at = []

        def publish(params, version, pool=pool, quarantine=quarantine, submitted_at=submitted_at):
            # Held since the cut: of what is submitted from now on nothing may be.
            submitted_at.append((len(pool.played), {t.task_id for t in TASKS if quarantine.holds(t.task_id)}))
            Broken.publish(pool, params, version)

        def save(state, progress, score, quarantine=quarantine, curriculum=curriculum):
            tasks = curriculum.state_dict(progress.ticket)
            saved.update(progress=dict(vars(progress)), quarantine=quarantine.state_dict(), tasks=tasks)

        def log(step, dies=dies):
            if dies and step == kill:
                raise Killed

        own, start_held = {}, {held["task_id"] for held in saved.get("quarantine", {"held": []})["held"]}
        try:
            options = {"save_every": 1, "save": save, "log": log, "trained": own, "publish": publish}
            train(pool, progress, curriculum, n=n, staleness=staleness, steps=steps, quarantine=quarantine, **options)
        except Killed:
            assert dies
        trained |= {step: own[step] for step in own if not dies or step < kill}
        assert not start_held & set(pool.played)
        if staleness == 0:  # what is submitted after a cut knows of it
            for (begin, held), (end, _) in itertools.pairwise([*submitted_at, (len(pool.played), set())]):
                assert not held & set(pool.played[begin:end])
    if staleness == 0:
        assert tickets(trained) == expected(broken, n, steps)
    assert {t.task_id for t in TASKS if quarantine.holds(t.task_id)} <= broken
    played = [task_id for task_id in pool.played if task_id in broken]
    assert staleness or len(played) == len({*played})  # no broken task was played twice


def test_processes_hold_the_same_tasks_and_pass_them_alike():
    broken = frozenset(fresh().draw(ticket).task_id for ticket in (1, 4))

    def launch(hosts):
        pool, quarantine = Broken([3, 0, 1], broken=broken), Quarantine(len(TASKS))
        train(pool, loop.Progress(), fresh(), n=4, staleness=0, steps=12, quarantine=quarantine, hosts=hosts)
        return [held["task_id"] for held in quarantine.state_dict()["held"]], pool.played

    (first, one), (second, other) = in_threads(2, launch)
    assert first == second and {*first} == broken
    assert sorted(task_id for task_id in [*one, *other] if task_id in broken) == sorted(broken)  # each once in all


@pytest.mark.parametrize(
    ("tasks", "max_frac", "batches", "error"),
    [  # (new, played) of each batch
        (100, 0.1, [(2, 5)], None),  # 2 of 20, for 5 are few
        (
            100,
            0.1,
            [(3, 5)],
            "3 tasks on which .* want at most 0.1 of 20 met; .*, or raise rollout.max_quar",
        ),
        (100, 0.1, [(2, 15), (1, 15)], None),  # 3 of 30
        (100, 0.1, [(2, 15), (1, 10), (0, 2)], "3 tasks on which the world always fails, want at most 0.1 of 25 met"),
        (30, 0.1, [(3, 900)], None),  # of 30: the others were met again
        (30, 0.1, [(4, 900)], "4 tasks on which the world always fails, want at most 0.1 of 30 met"),
        (3, 1.0, [(2, 3)], None),
        (
            3,
            1.0,
            [(2, 3), (1, 3)],
            r"3 \(all\) tasks .* the last: task-2: no table; mend the world or its data .*them\)$",
        ),
    ],
)
def test_too_many_in_quarantine_are_an_error(tasks, max_frac, batches, error):
    quarantine, ids = Quarantine(tasks, max_frac=max_frac), itertools.count()

    def add():
        for new, played in batches:
            told = [f"task-{next(ids)}" for _ in range(new)]
            how = {"signature": "s", "count": 2, "error": "no table"}
            quarantine.add([{"task_id": task_id, **how} for task_id in told], played)

    if error is None:
        return add()
    with pytest.raises(QuarantineError, match=error):
        add()


def test_what_is_held_is_told_once():
    told = []
    quarantine = Quarantine(9, report=lambda new, held: told.append(([h.task_id for h in new], len(held))))
    one = {"task_id": "a", "signature": "s", "count": 2, "error": "e"}
    for proved in ([one], [], [one, {**one, "task_id": "b"}]):
        quarantine.add(proved, 1)
        before = len(told)
        quarantine.tell()
        assert len(told) - before == bool(proved)
    assert told == [(["a"], 1), (["b"], 2)]
    again = Quarantine(9, report=lambda new, held: told.append(([h.task_id for h in new], len(held))))
    again.load_state_dict(quarantine.state_dict())
    assert told[2:] == [([], 2)] and again.state_dict() == quarantine.state_dict() and again.holds("b")
