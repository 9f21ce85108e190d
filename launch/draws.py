"""From a plan to what a ticket plays: the curriculum, its sampler, and hints; and to what no ticket plays any more."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import Task, World
from launch.plan import Plan
from rl import task_samplers
from rl.curriculum import Curriculum, Hints, TaskStream
from rl.hosts import Hosts
from rl.quarantine import Held, Quarantine


def build_curriculum(plan: Plan, tasks: Sequence[Task]) -> Curriculum:
    """The plan's way through `tasks`; one that goes by difficulty reads each of them once.

    Errors (ValueError): the tasks do not differ in difficulty, where that is what counts.
    """
    c, n = plan.curriculum, len(tasks)
    stream = TaskStream(tasks, plan.seed)

    def difficulty() -> np.ndarray:
        found = np.array([task.difficulty for task in tasks])
        if found.min() == found.max():
            raise ValueError(
                f"curriculum.name={c.name!r}: all {n} tasks of the world {plan.world!r} have difficulty {found[0]:g}; "
                "want several, or another curriculum"
            )
        return found

    samplers = {
        "uniform": lambda: None,
        "easy_to_hard": lambda: task_samplers.easy_to_hard(
            difficulty(),
            start_frac=c.start_frac,
            tickets=max(1, round((1 - c.epsilon) * c.steps * plan.rl.groups_per_batch)),
        ),
        "success_band": lambda: task_samplers.success_band(n, low=c.low, high=c.high, decay=c.decay),
        "learnability": lambda: task_samplers.learnability(n, decay=c.decay),
        "adarft": lambda: task_samplers.adarft(
            difficulty(),
            target=c.target,
            step=c.step,
            sensitivity=c.sensitivity,
            wanted=c.wanted,
            seed=plan.seed,
        ),
        "plr": lambda: task_samplers.plr(n, temperature=c.temperature, staleness=c.staleness, replay=c.replay),
    }
    return Curriculum(stream, samplers[c.name](), epsilon=c.epsilon)


def build_draw(plan: Plan, world: World, curriculum: Curriculum) -> Callable[[int], Task]:
    """ticket -> task as the policy is asked: the curriculum's, with a hint now and then. Errors: as `check_hints`."""
    check_hints(plan, world)
    if not plan.hints.prob:
        return curriculum.draw
    hints = Hints(world.hint, plan.hints.prob, plan.hints.steps * plan.rl.groups_per_batch, plan.seed)
    return lambda ticket: hints.add(curriculum.draw(ticket), ticket)


def check_hints(plan: Plan, world: World) -> None:
    """Errors (ValueError): hints are wanted of a world that has none."""
    for name, wanted in {"hints.prob": plan.hints.prob, "demos.hinted": plan.demos_hinted}.items():
        if wanted and world.hint is None:
            raise ValueError(f"{name}={wanted}: the world {world.name!r} has no hints; set it to {type(wanted)(0)}")


def saved(curriculum: Curriculum, next_ticket: int, hosts: Hosts) -> dict[str, Any]:
    """`Curriculum.state_dict` with what every process has drawn and not told of yet: each has its own tickets, and the
    host tree that a checkpoint keeps is process 0's. All processes call it together.
    """
    state = curriculum.state_dict(next_ticket)
    own = [[ticket, index] for ticket, index in state["drawn"] if ticket % hosts.count == hosts.index]
    return state | {"drawn": sorted(drawn for each in hosts.exchange(own) for drawn in each)}


def resume(host: Mapping[str, Any], curriculum: Curriculum, quarantine: Quarantine) -> None:
    """Goes on from the host tree of a checkpoint. Of another data set no task is held; a run from before there was a
    quarantine has none.
    """
    same = curriculum.load_state_dict(host["tasks"])
    if same and "quarantine" in host:
        quarantine.load_state_dict(host["quarantine"])


def build_quarantine(plan: Plan, n_tasks: int, workdir: Path, hosts: Hosts) -> Quarantine:
    """Empty; what it holds is kept in workdir/quarantine.jsonl, a line a task, and said once on the console, by process
    0 for all. A file that is there was written by an earlier launch: what still holds of it is in the checkpoint.
    """
    file = workdir / "quarantine.jsonl"

    def report(new: Sequence[Held], held: Sequence[Held]) -> None:
        temporary = file.with_name(f"{file.name}.tmp")
        temporary.write_text("".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in held))
        temporary.replace(file)
        for each in new:
            print(f"quarantined: task {each.task_id} is not drawn any more: {each.error}", flush=True)

    if hosts.index:
        return Quarantine(n_tasks, max_frac=plan.rollout.max_quarantined_frac)
    file.unlink(missing_ok=True)
    return Quarantine(n_tasks, max_frac=plan.rollout.max_quarantined_frac, report=report)
