"""The plan's curriculum and hints: each name makes one, what a world cannot do is said before a workdir is made."""

import dataclasses
import warnings

import pytest

from configs import r1_arith
from envs import choose_tasks, make_world
from launch import draws
from launch.plan import HintsPlan, make_plan
from launch.plan_checks import CURRICULA
from rl.hosts import ALONE
from tests.rl.test_hosts import in_threads

SIZES = {"train": 30, "validation": 20, "test": 20}


@pytest.fixture(scope="module")
def plan():
    config = r1_arith.get_config()
    config.world.options.sizes = SIZES
    return make_plan(config)


@pytest.fixture(scope="module")
def world(plan):
    return make_world(plan.world, **plan.world_options)


def named(plan, name, **options):
    return dataclasses.replace(plan, curriculum=dataclasses.replace(plan.curriculum, name=name, **options))


@pytest.mark.parametrize("name", CURRICULA)
def test_every_name_makes_a_curriculum(plan, world, name):
    tasks = world.tasks("train")
    curriculum = draws.build_curriculum(named(plan, name, epsilon=0.5, target=100.0), tasks)
    first = [curriculum.draw(ticket) for ticket in range(0, 30)]
    assert {task.task_id for task in first} <= {task.task_id for task in tasks}
    own = [task.difficulty for task in first[0::2]]  # the other half is the stream's
    if name == "easy_to_hard":
        assert set(own) == {1.0}
    if name == "adarft":
        hardest = [task.difficulty for task in tasks].count(3.0)
        assert set(own[:hardest]) == {3.0} != set(own[hardest:])


def test_difficulties_must_differ_where_they_count(plan):
    flat = make_world("arith", levels={"sum": (2,)}, sizes=SIZES).tasks("train")
    for name in ("easy_to_hard", "adarft"):
        with pytest.raises(ValueError, match=f"curriculum.name='{name}': all 30 tasks .* have difficulty 2"):
            draws.build_curriculum(named(plan, name), flat)
    draws.build_curriculum(named(plan, "plr"), flat)


def test_hints_are_in_what_is_drawn_and_in_nothing_that_is_evaluated(plan, world):
    hinted = dataclasses.replace(plan, hints=HintsPlan(prob=1.0, steps=2))
    draw = draws.build_draw(hinted, world, draws.build_curriculum(hinted, world.tasks("train")))
    prompts = [draw(ticket).prompt[-1].content for ticket in range(60)]
    tickets = 2 * plan.rl.groups_per_batch
    assert any("\nHint: Begin with" in prompt for prompt in prompts[:tickets])
    assert not any("Hint" in prompt for prompt in prompts[tickets:])
    for split in ("validation", "test"):
        assert not any("Hint" in task.prompt[-1].content for task in choose_tasks(world, split, 20, 0))
    plain = draws.build_draw(plan, world, draws.build_curriculum(plan, world.tasks("train")))
    assert not any("Hint" in plain(ticket).prompt[-1].content for ticket in range(60))


def test_hints_of_a_world_that_has_none(plan, world):
    hinted = dataclasses.replace(plan, hints=HintsPlan(prob=0.5, steps=2))
    with pytest.raises(ValueError, match="hints.prob=0.5: the world 'arith' has no hints; set it to 0"):
        draws.check_hints(hinted, dataclasses.replace(world, hint=None))
    with pytest.raises(ValueError, match="demos.hinted=True: the world 'arith' has no hints; set it to False"):
        draws.check_hints(dataclasses.replace(plan, demos_hinted=True), dataclasses.replace(world, hint=None))


def test_a_checkpoint_has_what_every_process_has_drawn(plan, world):
    """Two processes, of tickets 0 to 5 each its own; what was read from an earlier checkpoint is the owner's to say."""

    def work(hosts):
        curriculum = draws.build_curriculum(plan, choose_tasks(world, "train", 30, 0))
        tasks = [curriculum.draw(ticket).task_id for ticket in range(hosts.index, 6, 2)]
        return draws.saved(curriculum, 0, hosts), tasks

    states, tasks = zip(*in_threads(2, work), strict=True)
    assert [ticket for ticket, _ in states[0]["drawn"]] == [*range(6)] and states[0] == states[1]
    resumed = draws.build_curriculum(plan, choose_tasks(world, "train", 30, 0))
    resumed.load_state_dict(states[0])
    assert [resumed.draw(ticket).task_id for ticket in (0, 2, 4, 1, 3, 5)] == [*tasks[0], *tasks[1]]

    def again(hosts):
        curriculum = draws.build_curriculum(plan, choose_tasks(world, "train", 30, 0))
        curriculum.load_state_dict(states[0])
        curriculum.outcome(hosts.index, [])  # told of: drawn no more
        return [ticket for ticket, _ in draws.saved(curriculum, 2, hosts)["drawn"]]

    assert in_threads(2, again) == [[2, 3, 4, 5]] * 2


def test_of_another_data_set_no_task_is_held(plan, world, tmp_path):
    """Whoever mends the data a quarantine names begins with all of it."""
    tasks = world.tasks("train")
    kept = draws.build_quarantine(plan, len(tasks), tmp_path, ALONE)
    kept.add([{"task_id": tasks[3].task_id, "signature": "s", "count": 4, "error": "no file"}], played=9)
    host = {
        "tasks": draws.build_curriculum(plan, tasks).state_dict(9),
        "quarantine": kept.state_dict(),
    }
    mended = [*tasks[:3], dataclasses.replace(tasks[3], data={**tasks[3].data, "mended": True}), *tasks[4:]]
    for again, held in ((tasks, True), (mended, False)):
        quarantine = draws.build_quarantine(plan, len(again), tmp_path, ALONE)
        with warnings.catch_warnings(record=True):
            draws.resume(host, draws.build_curriculum(plan, again), quarantine)
        assert quarantine.holds(tasks[3].task_id) == held
