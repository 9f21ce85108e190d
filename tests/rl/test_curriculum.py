"""A ticket plays the same task in a resumed run as in an uninterrupted one; another data set is noticed."""

import dataclasses

import pytest

from envs.base import Message, Task
from rl.curriculum import TaskStream, fingerprint, permutation


def tasks(n, word="Peru"):
    return [Task(f"t{i}", "hop1", "train", i, (Message("user", f"{word} {i} ?"),), {}) for i in range(n)]


def test_each_epoch_is_another_permutation():
    stream = TaskStream(tasks(7), seed=3)
    epochs = [[stream.draw(7 * e + i).task_id for i in range(7)] for e in range(6)]
    assert all(sorted(epoch) == [f"t{i}" for i in range(7)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert epochs[0] != [stream.draw(i).task_id for i in range(7, 14)]
    assert [TaskStream(tasks(7), seed=4).draw(i).task_id for i in range(7)] != epochs[0]


def test_permutation_is_pinned():
    # addressed randomness: a change here silently changes the data order of every run that resumes
    assert permutation(7, 3, 0).tolist() == [4, 1, 5, 6, 0, 2, 3]


@pytest.mark.parametrize("k", [0, 1, 6, 7, 9, 14, 20])
def test_resume_equals_uninterrupted(k):
    whole = [TaskStream(tasks(7), seed=1).draw(ticket).task_id for ticket in range(20)]
    first = TaskStream(tasks(7), seed=1)
    got = [first.draw(ticket).task_id for ticket in range(k)]
    second = TaskStream(tasks(7), seed=1)
    second.load_state_dict(first.state_dict(next_ticket=k))
    assert got + [second.draw(ticket).task_id for ticket in range(k, 20)] == whole


def test_order_of_draws_does_not_matter():
    a, b = TaskStream(tasks(5), seed=1), TaskStream(tasks(5), seed=1)
    assert [a.draw(t).task_id for t in range(30)] == [b.draw(t).task_id for t in reversed(range(30))][::-1]


def test_another_data_set_starts_at_its_first_epoch():
    old = TaskStream(tasks(7), seed=1)
    new = TaskStream(tasks(5), seed=1)
    with pytest.warns(UserWarning, match="the saved run drew from 7 tasks .* now there are 5"):
        new.load_state_dict(old.state_dict(next_ticket=9))
    assert sorted(new.draw(t).task_id for t in range(9, 14)) == [f"t{i}" for i in range(5)]  # no task skipped
    fresh = TaskStream(tasks(5), seed=1)
    assert [new.draw(9 + i).task_id for i in range(5)] == [fresh.draw(i).task_id for i in range(5)]
    with pytest.raises(IndexError, match="got ticket 8, want at least 9"):
        new.draw(8)
    again = TaskStream(tasks(5), seed=1)
    again.load_state_dict(new.state_dict(next_ticket=12))  # the base is remembered, without a second warning
    assert again.draw(12).task_id == new.draw(12).task_id


def test_fingerprint_sees_a_changed_a_cut_and_a_reordered_set():
    prints = {fingerprint(t) for t in (tasks(70), tasks(70, "Chad"), tasks(69), tasks(70)[::-1])}
    other = [dataclasses.replace(task, data={"answers": ["another"]}) for task in tasks(70)]
    assert len(prints | {fingerprint(other)}) == 5
    assert fingerprint(tasks(70)) == fingerprint(tuple(tasks(70)))


def test_errors():
    with pytest.raises(ValueError, match="got 0 tasks"):
        TaskStream([], seed=1)
    with pytest.raises(ValueError, match="got seed 2, want 1 of the saved run"):
        TaskStream(tasks(3), seed=2).load_state_dict(TaskStream(tasks(3), seed=1).state_dict(next_ticket=0))
