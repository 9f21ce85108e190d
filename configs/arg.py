"""The one string after `--config=F.py:`, typed. Here, not in launch/, because config files import it."""

import difflib
from typing import Any

import ml_collections


class ConfigError(ValueError):
    """What the user asked for cannot be run; `launch.cli.run` prints it as one line, without a traceback."""


def nearest(name: str, known: list[str]) -> str:
    """`did you mean ...?` with the closest of `known`, else all of them (at most twelve)."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    shown = ", ".join(sorted(known)[:12]) or "(none)"
    return f"known: {shown}{', ...' if len(known) > 12 else ''}"


def _typed(name: str, text: str, default: Any) -> Any:
    """`text` as the type of `default`; bool is asked before int, whose subclass it is."""
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(default, int | float | str):
            return type(default)(text)
    except (KeyError, ValueError) as err:
        raise ConfigError(f"config argument {name}: got {text!r}, want a {type(default).__name__}") from err
    raise TypeError(f"default of {name}: got {default!r}, want a bool, int, float or str")


def parse_arg(arg: str | None, **defaults: bool | int | float | str) -> ml_collections.ConfigDict:
    """`"k=3,fast=true"` over `defaults`, each value typed by its default.

    Errors: an unknown name, a name given twice, a missing `=` or an unparsable value raises `ConfigError`.
    """
    values = dict(defaults)
    seen: set[str] = set()
    for item in filter(None, (arg or "").split(",")):
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"config argument: got {item!r}, want name=value[,name=value]")
        if name not in defaults:
            raise ConfigError(f"config argument: got unknown name {name!r}; {nearest(name, list(defaults))}")
        if name in seen:
            raise ConfigError(f"config argument {name}: given twice in {arg!r}; give it once")
        seen.add(name)
        values[name] = _typed(name, text, defaults[name])
    return ml_collections.ConfigDict(values)
