"""Worlds by name. A world is imported only when it is made: nothing here drags in what another world needs."""

import importlib
from typing import Any

from envs.base import World

WORLDS: dict[str, str] = {
    "search": "envs.search.world:make_world",
    "qa": "envs.qa:make_world",
}


def make_world(name: str, **options: Any) -> World:
    """The world called `name`, with its own options. Raises ValueError for a name or an option that does not exist."""
    if name not in WORLDS:
        raise ValueError(f"world: got {name!r}, want one of {', '.join(WORLDS)}")
    module, _, function = WORLDS[name].partition(":")
    make = getattr(importlib.import_module(module), function)
    unknown = sorted(set(options) - set(make.__kwdefaults__ or {}) - set(make.__annotations__))
    if unknown:
        known = sorted(set(make.__annotations__) - {"return"})
        raise ValueError(f"world {name}: got options {unknown}, want some of {known}")
    return make(**options)
