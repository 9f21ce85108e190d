"""Prove a world: its laws, and the score of every scripted policy on every task (gold 1, everything else 0), in every
form that the world has (`envs.variants`; the search world under real and under invented names).

Run: python -m launch.check --world=search [--limit=200] [--options='{"k": 5}']
Exit status 0 when all holds, 1 when anything is wrong, 2 on bad input.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tqdm
from absl import flags

from envs import SPLITS, WORLDS, checks, make_world, variants
from envs.base import Task, World
from launch import cli

_WORLD = flags.DEFINE_string("world", "search", f"One of {', '.join(WORLDS)}")
_LIMIT = flags.DEFINE_integer("limit", 0, "Tasks per split, spread over it; 0 plays every task", lower_bound=0)
_OPTIONS = flags.DEFINE_string("options", "{}", "Options of the world, as a JSON object")
_LAW_TASKS = flags.DEFINE_integer("law_tasks", 24, "Tasks per split on which the laws are tried", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    del argv
    with cli.validating():
        options = json.loads(_OPTIONS.value)
        if not isinstance(options, dict):
            raise ValueError(f'--options: got {_OPTIONS.value!r}, want a JSON object such as {{"k": 5}}')
        forms = [(how, *_form(how, splits)) for how, splits in variants(_WORLD.value, options)]
    if not any(tasks for _, _, tasks in forms):
        sys.exit(f"world {_WORLD.value} has no task in any of {', '.join(SPLITS)}")
    begun, wrong = time.monotonic(), []
    for how, world, tasks in forms:
        print(f"{_WORLD.value} {json.dumps(how, default=dict)}")
        wrong += [*_laws(world, tasks), *_scores(world, tasks)] if tasks else []
    total = sum(len(found) for _, _, tasks in forms for found in tasks.values())
    print(f"{total} tasks, {time.monotonic() - begun:.0f} s:", "FAILED" if wrong else "all as it should be")
    if wrong:
        print("\n".join(text[:2000] for text in wrong[:10]), file=sys.stderr)
        sys.exit(1)


def _form(options: Mapping[str, Any], splits: Sequence[str]) -> tuple[World, dict[str, Sequence[Task]]]:
    """A world with its tasks by split; splits without tasks are left out."""
    world = make_world(_WORLD.value, **options)
    tasks = {split: _tasks(world, split) for split in splits}
    return world, {split: found for split, found in tasks.items() if found}


def _tasks(world: World, split: str) -> Sequence[Task]:
    found = world.tasks(split)
    return _spread(found, _LIMIT.value) if _LIMIT.value else found


def _spread(tasks: Sequence[Task], n: int) -> Sequence[Task]:
    """`n` tasks at even distances: tasks are often sorted by kind."""
    return [tasks[i * len(tasks) // n] for i in range(n)] if n < len(tasks) else tasks


def _laws(world: World, tasks: dict[str, Sequence[Task]]) -> list[str]:
    few = [task for found in tasks.values() for task in _spread(found, _LAW_TASKS.value)]
    wrong = []
    for name, law in checks.LAWS.items():
        found = law(world, few)
        print(f"{name:32} {'FAILED' if found else 'ok'}  ({len(few)} tasks)", flush=True)
        wrong += [f"{name}: {text}" for text in found]
    return wrong


def _scores(world: World, tasks: dict[str, Sequence[Task]]) -> list[str]:
    total = sum(map(len, tasks.values())) * len(world.policies)
    scores = []
    with tqdm.tqdm(total=total, unit="episode", mininterval=1.0) as bar:
        for split, found in tasks.items():
            for policy in world.policies:
                bar.set_description(f"{split} {policy}")
                scores.append(checks.score(world, policy, split, found, progress=bar.update))
    print(f"{'policy':20} {'split':12} {'tasks':>7} {'success':>8} {'want':>5} {'seconds':>8}")
    for s in scores:
        mark = "" if not s.failures else "  FAILED"
        print(f"{s.policy:20} {s.split:12} {s.n:7} {s.successes:8} {s.wanted * s.n:5} {s.seconds:8.1f}{mark}")
    return [text for s in scores for text in s.failures]


if __name__ == "__main__":
    cli.run(main)
