"""What a task's repository is: the released tree, what the task changes in it, and what an episode sees of it.

Packages come from source distributions (packages.py). Instances in SWE-bench's form come from git repositories at
hand: a JSONL line has repo, instance_id, base_commit, patch, test_patch, problem_statement, FAIL_TO_PASS, PASS_TO_PASS.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import subprocess
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from envs.base import Message, Task
from envs.code import hiding, lessons, tasks, tools
from envs.code.grade import configures, literals
from envs.code.packages import PACKAGES, Package, is_test, package_tree
from envs.code.suite import TEST_LIMITS, Suites

_TEST_FOLDERS = ("test", "tests", "testing")
_TEXTS = ("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement")
_MEASURED_BY = 1  # raise it when an instance would be measured otherwise
_MEASURED_S = 300.0  # that a suite may take then


@dataclasses.dataclass(frozen=True)
class Repository:
    """Of one task. `tree`: with the gold change. `buggy`, `hidden`: sources and tests that an episode has instead."""

    name: str  # of the tree, in the sandboxes
    package: Package
    tree: Mapping[str, bytes]
    buggy: Mapping[str, str]
    hidden: Mapping[str, str | None]
    graded_tests: Mapping[str, str]  # where the tests that grade differ from the tree's
    absent: frozenset[str] = frozenset()  # files of the tree that an episode begins without: the gold change adds them

    @property
    def start(self) -> dict[str, str | None]:
        """Sources that an episode and its grading begin with instead of the tree's; None: there is no such file."""
        return {**self.buggy, **dict.fromkeys(self.absent)}

    def released(self, path: str) -> str | None:
        """Text of a file of the tree; None of one that is not there or no text."""
        return _text(self.tree.get(path))

    def seen(self, path: str) -> str | None:
        """Text of a file before the episode changes it."""
        if path in self.buggy or path in self.absent:
            return self.buggy.get(path)
        return self.hidden[path] if path in self.hidden else self.released(path)

    @functools.cached_property
    def test_literals(self) -> frozenset:
        """Values that stand in the tests that grade."""
        paths = [path for path in self.tree if is_test(self.package, path) and path.endswith(".py")]
        texts = (self.graded_tests.get(path) or self.released(path) for path in paths)
        return literals([text for text in texts if text is not None])


def _text(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


class Repositories:
    """Repositories of tasks, cached; threads may share it."""

    def __init__(self, data_dir: pathlib.Path, suites: Suites, checkouts: pathlib.Path | None = None) -> None:
        self._data_dir, self._suites, self._checkouts = data_dir, suites, checkouts
        self._lock = threading.Lock()
        self._known: dict[str, Repository] = {}
        self._measured: dict[pathlib.Path, Mapping[str, Any]] = {}

    def of(self, task: Task) -> Repository:
        """The repository of a task. Raises NoPackage, ValueError where it cannot be had."""
        with self._lock:
            if task.task_id not in self._known:
                if len(self._known) > 4096:
                    self._known.clear()
                if "lesson" in task.data:
                    made = _lesson(task)  # nothing of it is ever run
                else:
                    made = self._instance(task) if "instance" in task.data else self._released(task)
                    self._suites.add(made.name, made.tree)
                self._known[task.task_id] = made
            return self._known[task.task_id]

    def data(self, task: Task) -> Mapping[str, Any]:
        """What grading needs to know of a task: its data; of an instance, as its gold tree was measured, once.

        Raises ValueError where not every test of an instance passes with its gold patch.
        """
        if "instance" not in task.data:
            return task.data
        made_by = {"version": _MEASURED_BY, "data": dict(task.data)}
        place = tasks.place_of(self._data_dir, task.data["instance"].replace("/", "__"), made_by)
        if not place.is_file():
            tasks.write_tasks(place, [_measured(self.of(task), task, self._suites)])
        with self._lock:
            if place not in self._measured:
                self._measured[place] = tasks.read_tasks(place)[0].data
            return self._measured[place]

    def _released(self, task: Task) -> Repository:
        package = PACKAGES[task.data["package"]]
        tree = package_tree(self._data_dir, package)
        tests = tasks.buggy_files(tree, task.data["tests"])
        hidden: Mapping[str, Any] = tests
        if not hiding.hides_nothing(task):
            hidden = _Hidden(package, tree, task.data["f2p"])
        return Repository(package.name, package, tree, tasks.buggy_files(tree, task.data["bug"]), hidden, tests)

    def _instance(self, task: Task) -> Repository:
        data = task.data
        base = _checkout(self._checkouts, data["repo"], data["base_commit"])
        after, touched = dict(base), {}
        for name in ("patch", "test_patch"):
            read = lambda path, files=after: _text(files.get(path))  # noqa: E731
            try:
                touched[name] = tools.apply_diff(data[name], read) if data[name].strip() else {}
            except tools.Malformed as wrong:
                raise ValueError(f"{data['instance']}: {name}: {wrong}") from wrong
            after = {path: content for path, content in after.items() if path not in touched[name]}
            after |= {path: text.encode() for path, text in touched[name].items() if text is not None}
        package = _package(data, {*base, *after}, {*touched["patch"]} - {*touched["test_patch"]}, touched["test_patch"])
        changed = {p: _text(base.get(p)) for p in {**base, **after} if base.get(p) != after.get(p)}
        hidden = {path: text for path, text in changed.items() if is_test(package, path)}
        # Configuration is nobody's to change: where the gold patch does, an episode begins with its version.
        sources = {path: text for path, text in changed.items() if path not in hidden and not configures(path)}
        buggy = {path: text for path, text in sources.items() if text is not None}
        patched = hashlib.sha256(f"{data['patch']}\0{data['test_patch']}".encode()).hexdigest()
        name = f"{data['instance']}-{data['base_commit'][:12]}-{patched[:8]}"  # of a tree that the sandboxes keep
        return Repository(name, package, after, buggy, hidden, {}, frozenset(sources) - frozenset(buggy))


def _measured(repository: Repository, task: Task, suites: Suites) -> Task:
    """The task with what two runs of its suite over the gold tree do that is unusual, and how long the longer takes."""
    limits = dataclasses.replace(TEST_LIMITS, wall_s=_MEASURED_S, cpu_s=int(_MEASURED_S))
    reports = [suites.tests(repository.name, repository.package, limits=limits) for _ in range(2)]
    wanted = (*task.data["f2p"], *task.data["p2p"])
    wrong = [test for test in wanted if any(report.outcomes.get(test) != "passed" for report in reports)]
    if wrong or any(report.broken for report in reports):
        raise ValueError(
            f"{task.data['instance']}: with its gold patch {len(wrong)} of its {len(wanted)} tests do not pass "
            f"({', '.join(wrong[:3])}; stopped: {reports[0].stopped}; replaced: {reports[0].broken}); leave it out, or "
            f"see to what its suite needs: {reports[0].output[-300:]}"
        )
    events = sorted({event for report in reports for event in report.events})
    seconds = round(max(report.seconds for report in reports), 2)
    return dataclasses.replace(task, data={**task.data, "events": events, "seconds": seconds})


def _lesson(task: Task) -> Repository:
    files = {path: text.encode() for path, text in task.data["files"].items()}
    buggy = tasks.buggy_files(files, task.data["bug"])
    return Repository(lessons.PACKAGE.name, lessons.PACKAGE, files, buggy, {}, {})


def _package(data: Mapping[str, Any], paths: set[str], gold: set[str], test_patch: Iterable[str]) -> Package:
    """What is whose in the repository of an instance. `gold`: what its patch changes, which is a source.

    The tests' are the files of the named tests, all that the test patch changes, the folders of the named tests, and
    folders with a test folder's name. Of a folder in which the gold patch changes something, the files that are there.
    """
    named = list(dict.fromkeys(test.partition("::")[0] for test in (*data["f2p"], *data["p2p"])))
    parents = {str(folder) for path in paths for folder in pathlib.PurePosixPath(path).parents} - {"."}
    folders = {folder for folder in parents if pathlib.PurePosixPath(folder).name in _TEST_FOLDERS}
    beside = {str(pathlib.PurePosixPath(path).parent) for path in named} - {"."}
    mixed = {folder for folder in folders | beside if any(path.startswith(f"{folder}/") for path in gold)}
    helpers = {*test_patch, *(f"{folder}/" for folder in (folders | beside) - mixed)}
    helpers |= {path for path in paths - gold for folder in mixed & folders if path.startswith(f"{folder}/")}
    tops = {path.partition("/")[0] + "/" if "/" in path else path for path in paths if path.endswith(".py")}
    sources, helpers = tuple(sorted(tops | gold)), tuple(sorted(helpers - set(named)))
    version = data["base_commit"]
    return Package(data["instance"], version, "", sources, tuple(named), (".", "src"), helpers=helpers)


class _Hidden(Mapping):
    """Test files without the tests that fail for the bug, made when they are asked for."""

    def __init__(self, package: Package, tree: Mapping[str, bytes], failing: list[str]) -> None:
        self._of = package, tree, failing

    @functools.cached_property
    def _made(self) -> Mapping[str, str]:
        return hiding.hidden_tests(*self._of)

    def __getitem__(self, path: str) -> str:
        return self._made[path]

    def __iter__(self):
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


@functools.lru_cache(maxsize=16)
def _checkout(checkouts: pathlib.Path, repo: str, commit: str) -> Mapping[str, bytes]:
    """{path: content} of a commit of `checkouts`/OWNER__NAME (or /NAME), by git alone: no working tree is touched."""
    places = [checkouts / repo.replace("/", "__"), checkouts / repo.rpartition("/")[2]]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise ValueError(f"{repo}: got no folder {places[0]}, want a git repository that has {commit}")
    listed = _git(place, "ls-tree", "-r", "-z", commit).decode().split("\0")
    entries = [line.partition("\t") for line in listed if line]
    blobs = [(head.split()[2], path) for head, _, path in entries if head.split()[0] in ("100644", "100755")]
    asked = "\n".join(blob for blob, _ in blobs).encode()
    out, files, at = _git(place, "cat-file", "--batch", stdin=asked), {}, 0
    for _, path in blobs:
        end = out.index(b"\n", at)
        size = int(out[at:end].split()[2])
        files[path] = out[end + 1 : end + 1 + size]
        at = end + size + 2
    return files


def _git(place: pathlib.Path, *arguments: str, stdin: bytes = b"") -> bytes:
    command = ["git", "-c", f"safe.directory={place}", "-C", str(place), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True)
    if done.returncode:
        raise ValueError(f"{place}: git {arguments[0]} ended with {done.returncode}: {done.stderr.decode()[-200:]}")
    return done.stdout


def read_instances(file: pathlib.Path, split: str) -> list[Task]:
    """Tasks of a JSONL file in SWE-bench's form. Raises ValueError naming the line."""
    found, lines = [], {}
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):  # in a text there may be other ends of lines
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            wrong = [name for name in _TEXTS if not isinstance(row[name], str)]
            if wrong:
                raise TypeError(f"{wrong[0]}: got {row[wrong[0]]!r}, want a text")
            f2p, p2p = (_listed(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
            data = {
                "instance": row["instance_id"], "repo": row["repo"], "base_commit": row["base_commit"],
                "patch": row["patch"], "test_patch": row["test_patch"], "f2p": f2p, "p2p": p2p,
                "issue": row["problem_statement"], "events": [], "functions": [], "lines": 0,
            }  # fmt: skip
        except (ValueError, KeyError, TypeError) as err:
            raise ValueError(f"{file}:{number}: got no instance in SWE-bench's form ({err!r})") from err
        if not f2p:
            raise ValueError(f"{file}:{number}: FAIL_TO_PASS is empty, want at least one test")
        if lines.setdefault(row["instance_id"], number) != number:
            raise ValueError(
                f"{file}:{number}: got instance_id {row['instance_id']!r}, which is that of line "
                f"{lines[row['instance_id']]}; give each its own"
            )
        prompt = (Message("user", data["issue"]),)
        found.append(Task(f"code/{row['instance_id']}", "instance", split, number, prompt, data, 2.0))
    return found


def _listed(value: Any) -> list[str]:
    """SWE-bench writes lists as JSON texts."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(test, str) for test in found):
        raise TypeError(f"got {value!r}, want a list of test ids")
    return found
