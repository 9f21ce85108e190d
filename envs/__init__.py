"""Worlds by name. A world is imported only when it is made: nothing here drags in what another world needs."""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from envs.base import Task, World

WORLDS: dict[str, str] = {
    "search": "envs.search.world:make_world",
    "qa": "envs.qa:make_world",
    "arith": "envs.arith:make_world",
    "credit": "envs.credit:make_world",
    "code": "envs.code.world:make_world",
    "chaos": "envs.chaos:make_world",
}
SPLITS = ("train", "validation", "test")


def make_world(name: str, **options: Any) -> World:
    """The world called `name`, or that of the function that "MODULE:FUNCTION" names, with its own options. Raises
    ValueError for a name or an option that does not exist.
    """
    module, function = _module(name)
    make = getattr(module, function)
    unknown = sorted(set(options) - set(make.__kwdefaults__ or {}) - set(make.__annotations__))
    if unknown:
        known = sorted(set(make.__annotations__) - {"return"})
        raise ValueError(f"world {name}: got options {unknown}, want some of {known}")
    try:
        return make(**options)
    except TypeError as err:  # an option of another type
        raise ValueError(f"world {name}: options {options}: {err}") from err


def variants(name: str, options: Mapping[str, Any]) -> Sequence[tuple[Mapping[str, Any], Sequence[str]]]:
    """(options, splits) of each form in which the world called `name` must keep the laws, given a user's `options`.

    A world that has more forms than one says so by a function `variants(options)` beside its `make_world`.
    """
    module, _ = _module(name)
    return module.variants(options) if hasattr(module, "variants") else [(options, SPLITS)]


def _module(name: str) -> tuple[ModuleType, str]:
    """The module of a world, and the name of its function that makes it."""
    module, colon, function = WORLDS.get(name, name).partition(":")
    if not colon:
        raise ValueError(f"world: got {name!r}, want one of {', '.join(WORLDS)}, or MODULE:FUNCTION")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if name in WORLDS or not module.startswith(error.name or module):
            raise
        raise ValueError(f"world: got {name!r}, and there is no module {module!r}") from error
    if not hasattr(found, function):
        raise ValueError(f"world: got {name!r}, and {module!r} has no {function!r}")
    return found, function


def choose_tasks(world: World, split: str, n: int, seed: int) -> list[Task]:
    """`n` tasks of a split, chosen and ordered by `seed`; a larger `n` begins with the same.

    Raises ValueError if the split has fewer.
    """
    tasks = world.tasks(split)
    if n > len(tasks):
        raise ValueError(
            f"got n={n} tasks to choose, but split {split!r} of the world {world.name!r} has {len(tasks)}; lower n "
            "(eval.n, eval.final_n, --n), or give the world more tasks or this split a larger share (world.options)"
        )
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(tasks))
    return [tasks[int(i)] for i in order[:n]]


def task_at(world: World, split: str, index: int) -> Task:
    """Task `index` of a split. Raises ValueError beyond its end."""
    tasks = world.tasks(split)
    if not 0 <= index < len(tasks):
        raise ValueError(f"task index: got {index}, want 0 to {len(tasks) - 1} in {split!r}")
    return tasks[index]
