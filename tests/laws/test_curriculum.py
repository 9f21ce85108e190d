"""Law: what a ticket plays is a function of what was cut before it. A curriculum that is saved and restored at any
point, and the same one in every process, draws the same tasks; the order in which groups finish is no matter.

Law: every task is played again within 2n/ε tickets, whatever the sampler prefers.

Law: a hint is in training prompts alone, for a whole group or not at all, and never once the steps are over.
"""

import dataclasses
from functools import partial

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import Message, Task
from rl import credit, loop, task_samplers
from rl.curriculum import Curriculum, Hints, TaskStream
from rl.rollout.pool import Group
from tests.rl.test_hosts import in_threads
from tests.rl.test_loop import SIZE, TERMS, FakeLearner, FakePool, FakeState, gate, trajectory

N, SEED = 12, 5
PACKING = ("pad_frac", "rows", "tokens", "action_tokens")
TASKS = [Task(f"t{i}", "toy", "train", i, (Message("user", f"{i} ?"),), {}, float(i % 4)) for i in range(N)]
DIFFICULTY = np.array([task.difficulty for task in TASKS])
SAMPLERS = {
    "uniform": lambda: None,
    "easy_to_hard": lambda: task_samplers.easy_to_hard(DIFFICULTY, start_frac=0.25, tickets=40),
    "success_band": lambda: task_samplers.success_band(N, low=0.3, high=0.7, decay=0.9),
    "learnability": lambda: task_samplers.learnability(N, decay=0.9),
    "adarft": lambda: task_samplers.adarft(
        DIFFICULTY, target=0.0, step=50.0, sensitivity=2.0, wanted=0.5, seed=SEED
    ),
    "plr": lambda: task_samplers.plr(N, temperature=0.5, staleness=0.1, replay=0.5),
}  # fmt: skip


def fresh(name, epsilon=0.2):
    return Curriculum(TaskStream(TASKS, SEED), SAMPLERS[name](), epsilon=epsilon)


def scored(ticket, task):
    """The group of a ticket: which members succeed is said by task and ticket."""
    rng = np.random.default_rng([task.seed, ticket])
    members = [trajectory(ticket, m, float(rng.random() < 0.5)) for m in range(SIZE)]
    return [dataclasses.replace(t, scores={"outcome": t.facts["score"]}) for t in members]


def play(curriculum, first, batches, size=3, shuffle=0):
    """Task ids of `batches` batches from ticket `first` on; groups finish in the order that `shuffle` addresses."""
    drawn = []
    for batch in range(batches):
        tickets = range(first + batch * size, first + (batch + 1) * size)
        tasks = {ticket: curriculum.draw(ticket) for ticket in tickets}
        drawn += [tasks[ticket].task_id for ticket in tickets]
        order = np.random.default_rng([shuffle, batch]).permutation(tickets)
        outcomes = [curriculum.outcome(int(t), scored(int(t), tasks[int(t)])) for t in order]
        curriculum.observe(outcomes, tickets[-1] + 1)
    return drawn


@pytest.mark.parametrize("name", SAMPLERS)
@given(st.integers(0, 8), st.integers(0, 3))
@settings(max_examples=20)
def test_saved_and_restored_at_any_point_it_draws_the_same(name, cut, shuffle):
    whole = play(fresh(name), 0, 10)
    first = fresh(name)
    before = play(first, 0, cut, shuffle=shuffle)
    ahead = [first.draw(3 * cut + i).task_id for i in range(2)]  # drawn, and not cut yet
    saved = msgpack.unpackb(msgpack.packb(first.state_dict(3 * cut)))
    second = fresh(name)
    second.load_state_dict(saved)
    assert before + play(second, 3 * cut, 10 - cut) == whole
    assert ahead == whole[3 * cut : 3 * cut + 2]


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_in_which_groups_finish_is_no_matter(name):
    states = []
    for order in (range(36), reversed(range(36))):
        curriculum = fresh(name)
        tasks = [curriculum.draw(ticket) for ticket in range(36)]  # each of 12 tasks, some of them often
        curriculum.observe([curriculum.outcome(t, scored(t, tasks[t])) for t in order], 36)
        states.append(curriculum.state_dict(36))
    assert states[0] == states[1]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_ticket_under_way_keeps_its_task(name):
    curriculum, restored = fresh(name), fresh(name)
    tasks = [curriculum.draw(ticket) for ticket in range(60)]
    curriculum.observe([curriculum.outcome(t, scored(t, tasks[t])) for t in range(30)], 60)
    restored.load_state_dict(curriculum.state_dict(60))
    for goes_on in (curriculum, restored):
        assert [goes_on.draw(ticket) for ticket in range(30, 60)] == tasks[30:]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_all_processes_draw_what_one_would(name, processes):
    def run(hosts):
        curriculum, drawn = fresh(name), {}

        def draw(ticket):
            drawn[ticket] = curriculum.draw(ticket)
            return drawn[ticket]

        pool = FakePool(lambda ticket: Group(ticket, drawn[ticket], tuple(scored(ticket, drawn[ticket])), False, 0))
        pool.submit_group = lambda ticket, task, size: pool.open.append(ticket)
        share = 6 // hosts.count
        loop.train(
            FakeLearner, FakeState(), None, pool, gate(share), loop.Progress(),
            draw=draw, outcome=curriculum.outcome, observe=curriculum.observe, admit=lambda trajectories: True,
            terms=TERMS, pack=lambda *args, **options: ("", dict.fromkeys(PACKING, 1)),
            publish=lambda params, version: None, keep_episodes=lambda step, kept: None, log=lambda step, record: None,
            evaluate=lambda: {}, save=lambda *args: None, steps=6, groups_per_batch=6, group_size=SIZE,
            credit=partial(credit.relative, scale="none"), drop_equal_groups=False, eval_every=0, save_every=0,
            hosts=hosts,
        )  # fmt: skip
        return {ticket: task.task_id for ticket, task in drawn.items()}, curriculum.state_dict(36)

    alone = dict(enumerate(play(fresh(name), 0, 6, size=6)))
    own = in_threads(processes, run)
    assert {ticket: task for drawn, _ in own for ticket, task in drawn.items()} == alone
    assert all(state == own[0][1] for _, state in own)
    if name == "uniform":
        assert alone == {t: TaskStream(TASKS, SEED).draw(t).task_id for t in range(36)}


@pytest.mark.parametrize("name", SAMPLERS)
@given(st.sampled_from([0.05, 0.1, 0.3, 0.77, 1.0]), st.integers(0, 200))
@settings(max_examples=15)
def test_every_task_comes_again(name, epsilon, first):
    curriculum = fresh(name, epsilon)
    played = {curriculum.draw(ticket).task_id for ticket in range(first, first + int(2 * N / epsilon))}
    assert played == {task.task_id for task in TASKS}


HELD_OUT = [dataclasses.replace(task, split=split) for task in TASKS for split in ("validation", "test")]


@given(st.integers(0, 10_000), st.floats(0.1, 1.0), st.sampled_from(TASKS + HELD_OUT))
def test_a_hint_is_in_training_prompts_alone(ticket, prob, task):
    hints = Hints(lambda task: f"think of {task.seed} <answer>", prob, tickets=5_000, seed=SEED)
    asked = hints.add(task, ticket)
    assert asked == hints.add(task, ticket)
    if task.split != "train" or ticket >= 5_000:
        assert asked is task
    elif asked is not task:
        assert asked.prompt[-1].content == f"{task.seed} ?\nHint: think of {task.seed} ‹answer>"
        assert asked.prompt[-1].role == "user" and asked.task_id == task.task_id and "hint" in asked.data


def test_hints_fade():
    hints = Hints(lambda task: "so", 0.8, tickets=2_000, seed=SEED)
    shares = [np.mean([hints.add(TASKS[0], t) is not TASKS[0] for t in range(a, a + 500)]) for a in range(0, 2500, 500)]
    np.testing.assert_allclose(shares, [0.7, 0.5, 0.3, 0.1, 0], atol=0.08)
    assert Hints(lambda task: None, 1.0, tickets=10, seed=SEED).add(TASKS[0], 0) is TASKS[0]
