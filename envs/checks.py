"""What every world must keep: each check plays a world and returns what it found wrong, as text; [] is a pass."""

import dataclasses
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from envs.base import Env, Step, Task, World
from envs.play import play


@dataclasses.dataclass(frozen=True)
class Score:
    """How one policy did on one split."""

    policy: str
    split: str
    n: int
    successes: int
    wanted: int  # success of each task: 1 or 0
    failures: tuple[str, ...]  # the first few, in words
    seconds: float


def same(left: Any, right: Any) -> bool:
    """Equality over turns and facts in which NaN equals NaN."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right):
        return True
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def _episode(world: World, task: Task, policy: str) -> tuple:
    env = world.make_env()
    try:
        return play(env, task, world.policies[policy](task))
    finally:
        env.close()


def same_seed_twice(world: World, tasks: Sequence[Task]) -> list[str]:
    """The same task, played twice by the same policy, gives the same text and facts, in new and in used instances."""
    wrong = []
    used = world.make_env()
    for task in tasks:
        for name, policy in world.policies.items():
            first, second = _episode(world, task, name), play(used, task, policy(task))
            if not same(first, second):
                wrong.append(f"{task.task_id}: two runs of {name} differ: {first} and {second}")
    used.close()
    return wrong


def instances_are_apart(world: World, tasks: Sequence[Task], n: int = 8) -> list[str]:
    """`n` instances played at once, turn by turn in one thread and freely in many, do what each does alone."""
    jobs = [(tasks[i % len(tasks)], list(world.policies)[i % len(world.policies)]) for i in range(n)]
    alone = [_episode(world, *job) for job in jobs]
    with ThreadPoolExecutor(n) as threads:
        together = list(threads.map(lambda job: _episode(world, *job), jobs))
    for result, what in ((together, "threads"), (_in_turns(world, jobs), "turns")):
        for job, got, wanted in zip(jobs, result, alone, strict=True):
            if not same(got, wanted):
                return [
                    f"{job[0].task_id}: {n} instances in {what}: {job[1]} got {got}, alone {wanted}; state is shared"
                ]
    return []


def _in_turns(world: World, jobs: Sequence[tuple[Task, str]]) -> list[tuple]:
    envs = [world.make_env() for _ in jobs]
    policies = [world.policies[name](task) for task, name in jobs]
    first = [env.reset(task).text for env, (task, _) in zip(envs, jobs, strict=True)]
    read = [[text] if text else [] for text in first]
    turns: list[list] = [[] for _ in jobs]
    facts: list[Mapping] = [{} for _ in jobs]
    live = set(range(len(jobs)))
    while live:
        for i in sorted(live):
            action = policies[i](read[i])
            step = envs[i].step(action)
            turns[i].append((action, step.observation.text))
            read[i].append(step.observation.text)
            facts[i] = step.facts
            if step.done or len(turns[i]) == envs[i].spec.max_turns:
                live.remove(i)
    for env in envs:
        env.close()
    return list(zip(turns, facts, strict=True))


def snapshots_go_on(world: World, tasks: Sequence[Task]) -> list[str]:
    """After snapshot → restore into another instance every step is as without. Worlds without snapshots pass."""
    wrong = []
    for task in tasks:
        for name, policy in world.policies.items():
            env, other = world.make_env(), world.make_env()
            if not hasattr(env, "snapshot"):
                return []
            plain = play(env, task, policy(task))
            stepped = play(_Restored(env, other), task, policy(task))
            if not same(plain, stepped):
                wrong.append(f"{task.task_id}: {name} restored at each turn got {stepped}, without {plain}")
            env.close()
            other.close()
    return wrong


class _Restored:
    """Two instances taking turns: each step is taken by the one that has just been restored from the other."""

    def __init__(self, here: Env, there: Env) -> None:
        self.spec = here.spec
        self._here, self._there = here, there

    def reset(self, task: Task):
        return self._here.reset(task)

    def step(self, action: str) -> Step:
        state = self._here.snapshot()
        self._here.step(action)  # goes astray: the restored one must not notice
        self._there.restore(state)
        self._here, self._there = self._there, self._here
        return self._here.step(action)

    def close(self) -> None: ...


def close_frees(world: World, tasks: Sequence[Task], rounds: int = 3) -> list[str]:
    """Opening, playing and closing eight instances again and again leaves no more threads and open files than once."""
    counts = []
    for _ in range(rounds + 1):  # the first round may load things for good
        envs = [world.make_env() for _ in range(8)]
        for env, task in zip(envs, list(tasks) * 8, strict=False):
            play(env, task, world.policies["gold"](task))
        for env in envs:
            env.close()
        del envs, env
        gc.collect()
        counts.append((threading.active_count(), _entries("/proc/self/task"), _entries("/proc/self/fd")))
    grown = [
        name
        for name, first, last in zip(("threads", "tasks", "files"), counts[1], counts[-1], strict=True)
        if last > first
    ]
    return [f"after close, {grown} grow by round: {counts}"] if grown else []


def _entries(folder: str) -> int:
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0  # /proc is Linux's


def score(
    world: World, policy: str, split: str, tasks: Sequence[Task], *, progress: Callable[[int], None] = lambda n: None
) -> Score:
    """Play every task: gold must succeed on each, every other policy on none; TypeError if `success` is no bool."""
    wanted = int(policy == "gold")
    env, begun = world.make_env(), time.monotonic()
    successes, failures = 0, []
    for task in tasks:
        turns, facts = play(env, task, world.policies[policy](task))
        success = facts["success"]
        if not isinstance(success, bool):
            raise TypeError(f"{task.task_id}: facts['success'] is {success!r}, want a bool")
        successes += success
        if success != wanted and len(failures) < 5:
            failures.append(
                f"{policy} on {task.task_id}: success {int(success)}, want {wanted}; turns {turns}; facts {dict(facts)}"
            )
        progress(1)
    env.close()
    return Score(policy, split, len(tasks), successes, wanted, tuple(failures), time.monotonic() - begun)


LAWS: Mapping[str, Callable[[World, Sequence[Task]], list[str]]] = {
    "same seed, same episode": same_seed_twice,
    "8 instances share nothing": instances_are_apart,
    "snapshot, restore, go on": snapshots_go_on,
    "close frees everything": close_frees,
}
