"""A ticket plays the same task in a resumed run as in an uninterrupted one; another data set is noticed;
what a group says of its task, and which groups are admitted.
"""

import dataclasses
import json
import math

import numpy as np
import pytest

from envs.base import Message, Task
from rl.curriculum import Curriculum, TaskStream, address, admits, fingerprint, outcome, permutation
from rl.metrics.episodes import episode_means
from rl.metrics.majority import judged
from rl.task_samplers import adarft, learnability
from rl.types import Status, Trajectory


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


# --- what a group says --------------------------------------------------------------------------------------------


def episode(score, *, success=None, status=Status.DONE):
    facts = {} if success is None else {"success": success}
    return Trajectory("t", 7, 0, status, (), facts, {} if math.isnan(score) else {"reward": score})


def test_the_outcome_of_a_group():
    group = [episode(1.2, success=True), episode(0.2, success=False), episode(0.2, success=True), episode(math.nan)]
    got = outcome(7, 3, group)
    assert got[:3] == (7, 3, 3)
    # mean reward 1.6/3 = .5333; |.6667| + .3333 + .3333 over 3
    assert got[3:] == pytest.approx((2 / 3, 1.6 / 3, 4 / 9))
    assert all(map(math.isnan, outcome(7, 3, [episode(math.nan)])[3:]))


@pytest.mark.parametrize("status", [Status.DONE, Status.GAVE_UP])
def test_a_world_without_labels_may_be_given_up_on(status):
    """Its reward stands for success, in every number that there is of it."""
    scored = [episode(0.75, status=status), episode(0.25, status=status)]
    group = [dataclasses.replace(t, facts={"answer": "a"}) for t in scored]
    assert outcome(0, 0, group).success == 0.5
    assert episode_means(group)["episode/success"].count == 0 and judged(group)[1] is None


def test_who_was_given_up_has_failed_also_where_nothing_is_learnt_from_it():
    """Or a task on which all are given up would stay one that nobody knows, which samplers ask for again and again."""
    given_up = episode(math.nan, status=Status.ABANDONED)
    assert outcome(7, 3, [given_up] * 8) == (7, 3, 8, 0.0, 0.0, 0.0)
    assert outcome(7, 3, [episode(1.0, success=True), *[given_up] * 3])[2:] == pytest.approx((4, 0.25, 0.25, 0.375))
    called_failure = episode(-0.1, status=Status.ABANDONED)  # it has a reward of its own
    assert outcome(7, 3, [called_failure] * 2)[2:] == pytest.approx((2, 0.0, -0.1, 0.0))


def test_where_no_success_is_reported_reward_stands_for_it():
    cut = episode(0.4, status=Status.TOKEN_LIMIT)  # a limit is failure
    assert outcome(0, 0, [episode(1.2), episode(0.5), episode(-1.0), cut]).success == pytest.approx(1.5 / 4)


@pytest.mark.parametrize(
    ("successes", "low", "high", "want"),
    [(0, 0, 1, True), (0, 0.2, 0.8, False), (1, 0.2, 0.8, False), (2, 0.2, 0.8, True), (6, 0.2, 0.8, True),
     (7, 0.2, 0.8, False), (1, 1 / 16, 15 / 16, True), (8, 1 / 16, 15 / 16, False)],
)  # fmt: skip
def test_groups_are_admitted_by_their_success_rate(successes, low, high, want):
    group = [episode(float(i < successes), success=i < successes) for i in range(8)]
    assert admits(group, low, high) is want


def test_a_group_that_was_not_judged_is_admitted_as_it_was():
    assert admits([episode(math.nan)], 0.2, 0.8)


def test_a_curriculum_without_a_share_for_all_tasks_is_refused():
    with pytest.raises(ValueError, match="got epsilon 0, want more than 0"):
        Curriculum(TaskStream(tasks(3), seed=1), learnability(3, decay=1.0), epsilon=0)


def test_another_data_set_begins_as_from_nothing():
    old = Curriculum(TaskStream(tasks(7), seed=1), learnability(7, decay=1.0), epsilon=0.5)
    told = [old.outcome(t, [episode(1.0, success=True)]) for t in range(9) if old.draw(t)]
    old.observe(told, 9)
    new = Curriculum(TaskStream(tasks(5), seed=1), learnability(5, decay=1.0), epsilon=0.5)
    with pytest.warns(UserWarning, match="the saved run drew from 7 tasks"):
        new.load_state_dict(old.state_dict(next_ticket=9))
    fresh = Curriculum(TaskStream(tasks(5), seed=1), learnability(5, decay=1.0), epsilon=0.5)
    stream = [[c.draw(base + t).task_id for t in range(1, 20, 2)] for c, base in ((new, 9), (fresh, 0))]
    assert stream[0] == stream[1]


def test_the_numbers_of_a_ticket_are_pinned():
    assert [round(address(3, ticket, 1), 6) for ticket in (0, 1)] == [0.88042, 0.183823]
    assert len({address(s, t, p) for s in (0, 1) for t in (0, 1) for p in (1, 2)}) == 8


def test_what_comes_next_to_the_target_is_drawn_next_however_many_were_refused():
    """With groups under way an update counts from the first ticket that was not drawn; so does the run that resumes."""
    every = [dataclasses.replace(task, difficulty=float(i)) for i, task in enumerate(tasks(60))]

    def fresh():
        sampler = adarft(np.arange(60.0), target=0.0, step=1e-6, sensitivity=2.0, wanted=0.5, seed=0)
        return Curriculum(TaskStream(every, 0), sampler, epsilon=0.1)  # tickets 9, 19, 29, ... are the stream's

    def drawn(curriculum, *tickets):
        return [int(curriculum.draw(ticket).difficulty) for ticket in tickets]

    def settle(curriculum, upto):
        settled = [t for t in curriculum._drawn if t < upto]
        curriculum.observe([curriculum.outcome(t, ()) for t in settled], upto)

    one = fresh()
    assert drawn(one, *range(9)) == [*range(9)]
    settle(one, 4)  # five are under way
    assert drawn(one, 10, 11, 12) == [0, 1, 2]
    settle(one, 12)  # eight were settled for the next batch: most were refused, and only one is under way
    again = fresh()
    again.load_state_dict(json.loads(json.dumps(one.state_dict(12))))
    assert drawn(one, 12, 13, 14) == drawn(again, 12, 13, 14) == [2, 0, 1]
    settle(one, 15)  # nothing is under way
    assert drawn(one, 15, 16) == [0, 1]
