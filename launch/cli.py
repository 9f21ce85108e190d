"""From a command line to a checked config and a workdir; nothing here imports jax, nor may a main before its flags.

A main looks like this:

    def main(argv):
        with cli.validating():
            config = cli.resolve(flags.FLAGS.config, flags.FLAGS.workdir)
            plan = make_plan(config)  # reads through ReadTracker, ends with assert_all_read
            from launch import build  # jax starts here, after the flags and before a workdir is made
        with cli.open_workdir(flags.FLAGS.workdir, config) as workdir:
            ...

    if __name__ == "__main__":
        cli.define_config()  # flags belong to the program alone: the mains import one another
        cli.define_workdir()
        cli.run(main)
"""

import contextlib
import dataclasses
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from configs.arg import ConfigError, nearest, parse_arg
from launch.workdir import Workdir, check_workdir, config_of, open_workdir

__all__ = [
    "ConfigError",
    "ReadTracker",
    "Workdir",
    "assert_all_read",
    "check_init",
    "check_workdir",
    "define_config",
    "define_processes",
    "define_workdir",
    "leaves",
    "open_workdir",
    "override",
    "parse_arg",
    "processes",
    "resolve",
    "run",
    "validating",
    "want_workdir",
]

EXIT_BAD_INPUT = 2
MOST_SEED = 2**31 - 1  # jax keys and NumPy generators both take it
EXIT_STOPPED = 0  # who was asked to stop and left a checkpoint has not failed: a scheduler starts it again as it was


def define_config(default: str | None = None) -> flags.FlagHolder:
    """`--config=F.py[:k=v,k=v]` and `--config.a.b=c`: a locked ConfigDict; the part after ':' is `get_config`'s."""
    flag = config_flags.DEFINE_config_file(
        "config",
        default,
        "Experiment file, e.g. configs/quickstart.py[:k=v,k=v]; override with --config.a.b=c",
        lock_config=True,
    )
    _show_in_help("config")
    return flag


def define_workdir(default: str | None = None) -> flags.FlagHolder:
    """`--workdir=D`: the folder that is the run; alone, it resumes."""
    flag = flags.DEFINE_string("workdir", default, "Folder of the run; without --config it is resumed")
    _show_in_help("workdir")
    return flag


def define_processes() -> None:
    """`--coordinator`, `--num_processes`, `--process_id`: several processes as one run (launch/distributed.py)."""
    flags.DEFINE_string(
        "coordinator", "", "host:port where process 0 listens; auto: the cluster knows (TPU pod, Slurm, Open MPI)"
    )
    flags.DEFINE_integer("num_processes", None, "Processes of this run, with --coordinator=host:port", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "This one's number, from 0; all else is the same in each", lower_bound=0)


def processes() -> tuple[str, int, int]:
    """(coordinator, processes, this one's number) of the command line; "" for one alone. Errors: ConfigError."""
    coordinator, count, index = (flags.FLAGS[name].value for name in ("coordinator", "num_processes", "process_id"))
    if coordinator in ("", "auto"):
        if (count, index) != (None, None):
            raise ConfigError(
                f"--num_processes={count} --process_id={index}: got --coordinator={coordinator!r}, want host:port with "
                "them; auto finds both out"
            )
        return coordinator, 1, 0
    if not coordinator.rpartition(":")[2].isdecimal() or ":" not in coordinator:
        raise ConfigError(f"--coordinator: got {coordinator!r}, want host:port or auto")
    if count is None or index is None or index >= count:
        raise ConfigError(
            f"--coordinator={coordinator}: got --num_processes={count} --process_id={index}, want both, with "
            "0 <= process_id < num_processes"
        )
    return coordinator, count, index


def resolve(config: Any, workdir: str | None) -> ml_collections.ConfigDict:
    """The config of a launch: the one given, else the one that `workdir` was started with.

    Errors (`ConfigError`): neither given, an unreadable config file, a workdir of another config.
    """
    if config is None:
        if not workdir:
            raise ConfigError(
                "got neither --config nor --workdir; want --config=F.py --workdir=D, or --workdir=D to resume"
            )
        return ml_collections.ConfigDict(config_of(workdir)).lock()
    if not isinstance(config, ml_collections.ConfigDict):
        raise ConfigError(f"--config: get_config() gave a {type(config).__name__}, want a ConfigDict")
    if workdir:
        check_workdir(workdir, config.to_dict())
    return config


def override(config: ml_collections.ConfigDict, key: str, value: Any) -> None:
    """Sets one existing leaf by its dotted name, as `--config.a.b=c` does. Errors: ConfigError if it is not there."""
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node.get(parent, {})
    if last not in node:
        raise ConfigError(f"config has no key {key!r} to set to {value!r}; this experiment's world does not take it")
    try:
        node[last] = value
    except TypeError as err:
        raise ConfigError(f"config key {key}: got {value!r}, want a {type(node[last]).__name__}") from err


def want_workdir(workdir: str | None) -> str:
    """`workdir`, which a training launch cannot do without. Errors: ConfigError."""
    if not workdir:
        raise ConfigError("--workdir: got nothing, want the folder of the run, e.g. --workdir=runs/mine")
    return workdir


def check_init(init: Path | None, workdir: str | None = None) -> None:
    """`--init` must name a run that left a checkpoint and a tokenizer, and `workdir` have no start yet.

    Errors: ConfigError.
    """
    if init is None:
        return
    for part in ("config.json", "ckpt", "tokenizer/tokenizer.json"):
        if not (init / part).exists():
            raise ConfigError(f"--init: no {init / part}; want the folder of a finished launch.sft or launch.train run")
    if workdir and (Path(workdir) / "init").exists():
        raise ConfigError(f"--init: {workdir} has its start already; resume with --workdir={workdir} alone")


_KINDS = {bool: "bool", int: "whole number", float: "finite number", str: "string"}


class ReadTracker:
    """A config that remembers which leaves were read, so that a key nobody looks at is an error and not a surprise.

    Keys are dotted: `read["loss.clip_low"]`. There is no default: a key that is missing is an error.
    """

    def __init__(self, config: ml_collections.ConfigDict | dict[str, Any]):
        self._leaves = leaves(config)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        if key not in self._leaves:
            if any(name.startswith(f"{key}.") for name in self._leaves):
                raise ConfigError(f"config key {key}: got a section, want a leaf; read it with section({key!r})")
            raise ConfigError(f"config has no key {key!r}; {nearest(key, list(self._leaves))}")
        self._read.add(key)
        return self._leaves[key]

    def typed(self, key: str, wanted: type) -> Any:
        """`self[key]`, which must be a `wanted` (bool, int, float or str; an int is a float, floats are finite)."""
        value = self[key]
        right = isinstance(value, int | float if wanted is float else wanted)
        if not right or isinstance(value, bool) != (wanted is bool) or (wanted is float and not math.isfinite(value)):
            raise ConfigError(f"config key {key}: got {value!r}, want a {_KINDS[wanted]}")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """All of a section as a nested plain dict, every leaf counted as read: for options that are handed on whole."""
        tree: dict[str, Any] = {}
        prefix = f"{key}."
        names = [name for name in self._leaves if name.startswith(prefix)]
        if not names and self._leaves.get(key) != {}:  # an empty section is flattened to a leaf {}
            raise ConfigError(f"config has no section {key!r}; {nearest(key, self._sections())}")
        self._read.add(key)
        for name in names:
            *parents, last = name.removeprefix(prefix).split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = self[name]
        return tree

    def into(self, cls: Callable[..., Any], key: str, **given: Any) -> Any:
        """`cls` built from the leaves of a section that have the names of its fields; other leaves stay unread.

        A field with a default need not be there; plain types are checked.
        """
        values = dict(given)
        for field in dataclasses.fields(cls):
            name = f"{key}.{field.name}"
            if field.name in given or (name not in self._leaves and field.default is not dataclasses.MISSING):
                continue
            values[field.name] = self.typed(name, field.type) if field.type in _KINDS else self[name]
        return cls(**values)

    def unread(self) -> list[str]:
        """Leaves that nothing has read; an empty section does not count."""
        return sorted(name for name, value in self._leaves.items() if name not in self._read and value != {})

    def read(self) -> list[str]:
        """Leaves that were read."""
        return sorted(self._read)

    def _sections(self) -> list[str]:
        parts = [name.split(".") for name in self._leaves]
        return sorted({".".join(p[:i]) for p in parts for i in range(1, len(p))})


def assert_all_read(tracker: ReadTracker) -> None:
    """Errors: `ConfigError` that lists every unread leaf, with the closest keys that *were* read."""
    unread = tracker.unread()
    if unread:
        lines = "\n".join(f"  {name} ({nearest(name, tracker.read())})" for name in unread)
        raise ConfigError(f"config sets {len(unread)} key(s) that nothing reads; remove or rename:\n{lines}")


@contextlib.contextmanager
def validating() -> Iterator[None]:
    """All that precedes the first compute: a ValueError or a missing file in here is the user's: one line."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as err:
        raise ConfigError(str(err)) from err


def _show_in_help(name: str) -> None:
    """`--help` shows the flags that the program's own file defines; this one is defined here, for several."""
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def run(main: Callable[[Sequence[str]], Any], *, positional: bool = False) -> None:
    """`absl.app.run`, but bad input ends with one `error: ...` on stderr and exit status 2, not with a traceback.

    Arguments that are no flags are refused unless `positional`.
    """

    def guarded(argv: Sequence[str]) -> Any:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # jax and orbax tell a lot; a run has its own log
        # Until a loop takes over (launch/runs.py), Ctrl-C ends the program. As an exception it would be a traceback and
        # lost where it meets one of jax's callbacks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            if len(argv) > 1 and not positional:
                raise ConfigError(f"got arguments {list(argv[1:])}; want flags only (--name=value), see --help")
            return main(argv)
        except ConfigError as err:
            _die(err)

    app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses `argv`; unknown flags, unknown config keys and a missing config file end the program with one line."""
    for arg in argv[1:]:
        file = arg.removeprefix("--config=").split(":")[0]
        if arg.startswith("--config=") and file and not Path(file).is_file():
            _die(
                ConfigError(
                    f"--config: no file {file!r}; want a Python file with get_config(), e.g. configs/quickstart.py"
                )
            )
    try:
        return flags.FLAGS(argv)
    except flags.Error as err:
        _die(ConfigError(_innermost(str(err))))
    except (AttributeError, KeyError) as err:  # what ml_collections raises for a key that the locked config lacks
        overrides = " ".join(arg.split("=")[0] for arg in argv if arg.startswith("--config."))
        if not overrides:
            raise
        said = _innermost(str(err)).replace("\\n", " ").replace("\\", "").replace("'", "")  # a repr of what it says
        _die(ConfigError(f"unknown config key in {overrides}: {said}"))


def _innermost(message: str) -> str:
    """Without the traceback that config_flags quotes in its own message: the last line says what is wrong."""
    if "Traceback" not in message:
        return message.strip()
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return lines[-1].removeprefix("configs.arg.ConfigError: ").removeprefix("ValueError: ")


def leaves(config: ml_collections.ConfigDict | dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every leaf by its dotted name; an empty section is a leaf {}."""
    found: dict[str, Any] = {}
    for name, value in (config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config).items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _die(err: BaseException) -> None:
    print(f"error: {err}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)
