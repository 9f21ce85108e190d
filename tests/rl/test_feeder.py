"""Groups that waited when a run was saved: which of them are kept, and which are played again."""

import pytest

from envs.base import Task
from rl.rollout.feeder import Feeder, Judged
from rl.rollout.staleness import StalenessGate
from rl.rollout.worker import Record
from rl.types import Status, Trajectory, Turn


class Pool:
    """Nothing that is submitted finishes."""

    def __init__(self):
        self.submitted = []

    def submit_group(self, ticket, task, size):
        self.submitted.append(ticket)

    def next_group(self, timeout_s):
        raise TimeoutError


def saved(ticket, *, sampled, admitted=True, task_id=None):
    """What `Feeder.waiting` said of a group whose oldest token version `sampled` sampled."""
    record = Record()
    record.given([1], -1)
    record.sampled(Turn([2, 2], [-1.0, -1.0], [sampled, sampled], "stop"), 0)
    episode = Trajectory(task_id or f"task-{ticket}", ticket, 0, Status.DONE, record.rows(), {}, {})
    how = {"ticket": ticket, "admitted": admitted, "dropped": False, "retries": 0}
    return how | {"episodes": [episode.to_bytes()]}


def resumed(waiting, *, version=4, batch=1, staleness=2, batches=9, tickets=range(4, 99), held=()):
    """(tickets kept, tickets submitted) by a run that goes on at `version`."""
    gate, pool = StalenessGate(batch=batch, max_staleness=staleness, max_running=99), Pool()
    gate.start_at(version)
    draw = {ticket: Task(f"task-{ticket}", "toy", "train", 0, (), {}) for ticket in tickets}.__getitem__
    judge = lambda group: Judged(group, True)  # noqa: E731
    how = {"size": 1, "batch": batch, "batches": batches, "passes": lambda task: task.task_id in held}
    with Feeder(pool, gate, draw, judge, tickets, waiting=waiting, **how) as feeder:
        feeder.let_in(version)
        return [own["ticket"] for own in feeder.waiting()], pool.submitted


def test_what_is_young_enough_by_its_turn_is_kept():
    # Tickets 4, 5, 6 are trained at versions 4, 5, 6: two versions behind is the most.
    assert resumed([saved(4, sampled=2), saved(5, sampled=2), saved(6, sampled=4)]) == ([4, 6], [5])


@pytest.mark.parametrize("task_id, kept", [(None, [4, 5]), ("task of another data set", [])])
def test_a_refused_group_takes_a_place_only_if_it_is_played_again(task_id, kept):
    """Ticket 5's tokens are of version 2: in the first place they may be trained on, in the second they may not."""
    waiting = [saved(4, sampled=4, admitted=False, task_id=task_id), saved(5, sampled=2)]
    assert resumed(waiting)[0] == kept


@pytest.mark.parametrize("held, kept", [({"task-4"}, [4]), ((), [])])
def test_a_ticket_that_passed_is_settled_only_while_its_task_is_passed(held, kept):
    """Its place is another data set's now, say: then it is played."""
    passed = {"ticket": 4, "admitted": False, "dropped": True, "retries": 0, "episodes": []}
    waiting, submitted = resumed([passed], held=held)
    assert waiting == kept and (4 in submitted) == (not held)


def test_what_no_batch_would_hold_leaves_its_place_to_what_comes_before():
    """One batch is left and its first ticket was under way: it is played, whatever waited behind it."""
    kept, submitted = resumed([saved(5, sampled=4), saved(6, sampled=4)], batches=1)
    assert submitted == [4] and kept == []
