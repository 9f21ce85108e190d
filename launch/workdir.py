"""A run is a folder: `config.json`, `git.txt` and whatever the run writes; one process at a time."""

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_collections

from configs.arg import ConfigError
from configs.defaults import defaults

# For the type in signatures: a run's folder is a plain path.
Workdir = Path

FREE = ("world.options", "reward.terms", "reward.reach", "reward.options")  # sections with keys of any name
_OURS = {"config.json", "config.json.tmp", "git.txt", ".lock"}  # what a launch that died early may have left


def check_workdir(path: str | os.PathLike, config: ml_collections.ConfigDict | dict[str, Any]) -> bool:
    """True if `path` holds a run of exactly this config, False if a run can begin there; reads only.

    Errors (`ConfigError`): a run of another config (the differing keys are shown), a folder of something else.
    """
    path = Path(path)
    if (path / "config.json").exists():
        differing = _differences(config_of(path), _filled(_plain(config), _plain(defaults())))
        if differing:
            shown = "\n".join(f"  {key}: there {there}, here {here}" for key, there, here in differing)
            raise ConfigError(
                f"{path}: holds a run of another config; nothing was touched. Differing keys:\n{shown}\n"
                f"give another --workdir, or resume with --workdir={path} alone"
            )
        return True
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: got a file, want a folder for --workdir")
    if path.is_dir() and (foreign := sorted({p.name for p in path.iterdir()} - _OURS)):
        raise ConfigError(f"{path}: holds {foreign[0]!r} but no config.json, so it is not a run; give a new --workdir")
    return False


def config_of(path: str | os.PathLike) -> dict[str, Any]:
    """The config that the run in `path` was started with, lists read back as tuples; a key that was not there yet has
    its default.

    Errors (`ConfigError`): no run there, unreadable config.json.
    """
    file = Path(path) / "config.json"
    try:
        return _filled(_tupled(json.loads(file.read_text())), _plain(defaults()))
    except FileNotFoundError:
        inside = sorted(file.parent.name for file in Path(path).glob("*/config.json"))
        there = f"want one of the runs in it: {', '.join(inside)}; or" if inside else "want a run;"
        raise ConfigError(
            f"{path}: no run there (no config.json); {there} start one with --config=F.py --workdir={path}"
        ) from None
    except (OSError, ValueError) as err:
        raise ConfigError(f"{file}: unreadable ({err}); restore it, or start anew in another --workdir") from err


@contextlib.contextmanager
def open_workdir(path: str | os.PathLike, config: ml_collections.ConfigDict | dict[str, Any]) -> Iterator[Workdir]:
    """Makes or reopens the folder of a run and holds its lock until the block ends.

    Writes git.txt, then config.json (last: its presence means a whole start). Errors: those of `check_workdir`, and a
    folder that another live process holds. A lock dies with its process, so a killed run leaves none.
    """
    path = Path(path)
    check_workdir(path, config)
    with locked(path, "--workdir"):
        resumed = check_workdir(path, config)  # again: another process may have been quicker
        _note_git(path / "git.txt", resumed)
        if not resumed:
            write_json(path / "config.json", _plain(config), sort_keys=True)
        yield path


def write_json(path: Path, tree: Any, *, sort_keys: bool = False) -> None:
    """The file is replaced in one move: whoever reads it sees the old text or the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(tree, indent=1, sort_keys=sort_keys) + "\n")
    temporary.replace(path)


@contextlib.contextmanager
def locked(path: Path, flag: str) -> Iterator[None]:
    """Makes the folder that `flag` names and holds its lock. Errors (`ConfigError`): another live process holds it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "a+")
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written ({err}); give another {flag}") from err
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"{path}: in use by process {lock.read().strip() or '?'}; wait for it, or give another {flag}"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def git_state() -> str:
    """Commit and diff of the code that runs, without results/, which runs write; says so where there is no git."""
    root = Path(__file__).resolve().parents[1]

    def git(*args: str) -> str:
        return subprocess.run(
            ("git", "-C", str(root), *args), capture_output=True, text=True, check=True, timeout=30
        ).stdout

    try:
        return f"commit {git('rev-parse', 'HEAD').strip()}\n{git('diff', 'HEAD', '--', '.', ':!results')}"
    except (OSError, subprocess.SubprocessError) as err:
        return f"commit unknown ({type(err).__name__}: not in a git repository, or no commit)\n"


def git_commit() -> str:
    """The commit alone, with "+diff" where the tree differs from it; "unknown" outside git."""
    first, _, diff = git_state().partition("\n")
    commit = first.removeprefix("commit ").split(" ")[0]
    return f"{commit}+diff" if diff else commit


def _note_git(file: Path, resumed: bool) -> None:
    state = git_state()
    if resumed and file.exists():
        before = file.read_text()
        if not before.endswith(state):
            file.write_text(f"{before}\n== resumed with other code ==\n{state}")
        return
    file.write_text(state)


def _plain(config: ml_collections.ConfigDict | dict[str, Any]) -> dict[str, Any]:
    """The config as JSON reads it back."""
    tree = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
    try:
        return json.loads(json.dumps(tree))
    except TypeError as err:
        raise ConfigError(f"config: {err}; want numbers, strings, bools, None, tuples and sections only") from err


def _differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    found = []
    for name in sorted(there.keys() | here.keys()):
        old, new = there.get(name, _ABSENT), here.get(name, _ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif _tupled(old) != _tupled(new):
            found.append((f"{prefix}{name}", repr(old), repr(new)))
    return found


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


_ABSENT = _Absent()


def _tupled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tupled(item) for name, item in value.items()}
    return tuple(_tupled(item) for item in value) if isinstance(value, list | tuple) else value


def _filled(config: dict[str, Any], by: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`config` with what it lacks of `by`; sections whose keys are an experiment's own stay as they are."""
    out = dict(config)
    for name, value in by.items():
        key = f"{prefix}{name}"
        if key in FREE and name in config:
            continue
        if isinstance(value, dict) and isinstance(config.get(name, {}), dict):
            out[name] = _filled(config.get(name, {}), value, f"{key}.")
        else:
            out.setdefault(name, value)
    return out
