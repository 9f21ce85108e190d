"""A package's own tests, run in the sandbox: what came of each, and calls of its functions."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import pathlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.code.packages import TREE_TIME, Package
from envs.sandbox import Limits, Sandbox, SandboxError

_LIBRARIES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_LEXERS = ("__init__", "_mapping", "python", "diff")  # the others of pygments are many, and nothing needs them
_RANK = {"skipped": 0, "passed": 1, "failed": 2, "error": 3}
TEST_LIMITS = Limits(wall_s=30.0, cpu_s=30)
CALL_LIMITS = Limits(wall_s=10.0, cpu_s=10)


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one run of a suite. `ended`: it came to its own end and the report is whole; else there are no outcomes."""

    ended: bool
    outcomes: Mapping[str, str]  # test id -> passed, failed, error, skipped
    broken: tuple[str, ...] = ()  # names in pytest, unittest, builtins that were replaced
    events: tuple[str, ...] = ()  # unusual things that were done
    messages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    output: str = ""
    stopped: str | None = None
    seconds: float = 0.0


@functools.cache
def site_files() -> Mapping[str, Any]:
    """pytest and what it needs, from this environment, as files for a sandbox's `site`. Raises ValueError."""
    files: dict[str, Any] = {}
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin:
            raise ValueError(f"the code world runs tests by pytest, and {name} is not installed: pip install pytest")
        origin = pathlib.Path(spec.origin)
        if origin.name != "__init__.py":
            files[origin.name] = origin.read_bytes()
            continue
        for path in origin.parent.rglob("*.py"):
            if path.parent.name == "lexers" and path.stem not in _LEXERS:
                continue
            place = f"{name}/{path.relative_to(origin.parent)}"
            files[place] = path.read_bytes(), int(path.stat().st_mtime)
            compiled = pathlib.Path(importlib.util.cache_from_source(str(path)))
            if compiled.is_file():  # valid where the interpreter inside is of the same version
                files[f"{name}/{path.parent.relative_to(origin.parent)}/__pycache__/{compiled.name}"] = (
                    compiled.read_bytes()
                )
    return files


class Suites:
    """Warm sandboxes for the suites of many packages, shared by threads. Each is made when it is first needed."""

    def __init__(self, most: int, *, accept_rlimits: bool = False, isolate: bool | None = None) -> None:
        if most < 1:
            raise ValueError(f"sandboxes: got {most}, want at least 1")
        self._how = {"accept_rlimits": accept_rlimits, "isolate": isolate}
        self._free = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._idle: list[Sandbox] = []
        self._trees: dict[str, Mapping[str, Any]] = {}

    def add(self, name: str, tree: Mapping[str, bytes]) -> None:
        """Make a tree known by a name."""
        with self._lock:
            if name not in self._trees:
                self._trees[name] = {path: (data, TREE_TIME) for path, data in tree.items()}

    @contextlib.contextmanager
    def sandbox(self, tree: str) -> Iterator[Sandbox]:
        """A sandbox that has the tree, for one thread."""
        with self._free:
            with self._lock:
                sandbox = self._idle.pop() if self._idle else None
            if sandbox is None:
                program = pathlib.Path(__file__).with_name("inside.py").read_text()
                sandbox = Sandbox(site=site_files(), program=program, **self._how)
            try:
                sandbox.load(tree, self._trees[tree])
                yield sandbox
            finally:
                with self._lock:
                    self._idle.append(sandbox)

    def tests(
        self, tree: str, package: Package, files: Mapping[str, Any] | None = None, *, paths: Sequence[str] = (),
        limits: Limits = TEST_LIMITS, show: bool = False, messages: bool = False,
    ) -> Report:  # fmt: skip
        """Run the package's tests, or those at `paths` (files or ids), over the tree with `files` changed."""
        nonce = secrets.token_hex(16)
        arguments = {
            "nonce": nonce, "paths": list(paths or package.tests), "python_path": list(package.python_path),
            "show": show, "messages": messages, "options": list(package.options),
        }  # fmt: skip
        with self.sandbox(tree) as sandbox:
            ran = sandbox.run(tree=tree, call="tests", arguments=arguments, files=files, limits=limits)
        whole = _told(ran.report, nonce)
        more = {"output": ran.output, "stopped": ran.stopped, "seconds": ran.seconds}
        if whole is None:
            return Report(False, {}, **more)
        outcomes, messages, broken, events = whole
        return Report(True, outcomes, tuple(broken), tuple(events), messages, **more)

    def calls(
        self, tree: str, package: Package, files: Mapping[str, Any], calls: Sequence[Sequence[str]],
        limits: Limits = CALL_LIMITS,
    ) -> list[str] | None:  # fmt: skip
        """What comes of each call (see inside.py), in a process without pytest; None if it did not come to its end."""
        nonce = secrets.token_hex(16)
        arguments = {"nonce": nonce, "python_path": list(package.python_path), "calls": [list(c) for c in calls]}
        with self.sandbox(tree) as sandbox:
            ran = sandbox.run(tree=tree, call="calls", arguments=arguments, files=files, limits=limits)
        whole = _whole(ran.report, nonce)
        if whole is None or not isinstance(whole.get("results"), list) or len(whole["results"]) != len(calls):
            return None
        return [str(result) for result in whole["results"]]

    def trace(self, tree: str, package: Package, sources: Sequence[str], most: int) -> list[tuple[str, str, str]]:
        """(module, function, arguments) of the plain calls that the tests make of top-level functions."""
        nonce = secrets.token_hex(16)
        arguments = {
            "nonce": nonce, "paths": list(package.tests), "python_path": list(package.python_path),
            "sources": list(sources), "most": most, "options": list(package.options),
        }  # fmt: skip
        limits = dataclasses.replace(TEST_LIMITS, wall_s=300.0, cpu_s=300, report_bytes=64 << 20)
        with self.sandbox(tree) as sandbox:
            ran = sandbox.run(tree=tree, call="trace", arguments=arguments, limits=limits)
        whole = _whole(ran.report, nonce)
        if whole is None:
            raise SandboxError(f"{package.name}: no trace of its tests: {ran.output[-500:]}")
        return [tuple(call) for call in whole["calls"]]

    def command(self, tree: str, command: str, files: Mapping[str, Any], limits: Limits) -> tuple[str, dict[str, Any]]:
        """What a shell command printed, with its status, and what it changed (Sandbox.run, keep)."""
        with self.sandbox(tree) as sandbox:
            ran = sandbox.run(["sh", "-c", command], tree=tree, files=files, keep=True, limits=limits)
        ended = f"stopped: {ran.stopped}" if ran.stopped else f"exit status {ran.rc}"
        changed = json.loads(ran.report) if ran.report else {"files": {}, "refused": [], "gone": []}
        return f"{ran.output.rstrip()}\n({ended})".lstrip(), {**changed, "stopped": ran.stopped}

    def close(self) -> None:
        """End the sandboxes that no thread uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for sandbox in idle:
            sandbox.close()


def _told(report: bytes, nonce: str) -> tuple[dict[str, str], dict[str, str], list[str], list[str]] | None:
    """(outcomes, messages, broken, events) of the lines of `tests` (inside.py), or None if they are not whole.

    The worst that was said of a test counts, whatever was said before or after. What was said twice, or by a line that
    is not the next, somebody else has said, and is broken.
    """
    lines = [_whole(line, nonce) for line in report.splitlines()]
    if not lines or None in lines or "broken" not in lines[-1]:
        return None
    *said, end = lines
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    broken, times = list(end["broken"]), set()
    if [line.get("n") for line in lines] != list(range(len(lines))):
        broken.append("the order of the report")
    for line in said:
        test, when, outcome = line.get("id"), line.get("when"), line.get("outcome")
        if outcome not in _RANK:
            return None
        if when != "part" and (test, when) in times:
            broken.append(f"{test} was reported twice")
        times.add((test, when))
        if test not in outcomes or _RANK[outcome] >= _RANK[outcomes[test]]:
            outcomes[test] = outcome
        if line.get("message") is not None:
            messages[test] = line["message"]
    return outcomes, messages, broken, end["events"]


def _whole(report: bytes, nonce: str) -> dict[str, Any] | None:
    """The one JSON object of a report with the run's nonce; anything else, more or less is none."""
    try:
        value = json.loads(report)
    except ValueError:
        return None
    return value if isinstance(value, dict) and secrets.compare_digest(str(value.get("nonce")), nonce) else None
