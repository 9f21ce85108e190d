"""Tasks: a bug in a released package, the tests that fail for it, and an issue that says what goes wrong, never where.

Bugs are operators' (operators.py), several at once at higher difficulty; or *regressions*, one hunk of a real fix
between two releases put back. A task is kept only where three runs of the suite agree on what fails, at least one
test fails for the bug and at least one still passes, and the released sources pass. Where the bug changes what a
top-level function gives for plain arguments, such calls, made up from those of the tests, are kept hidden: they tell
a fix from an answer to the tests. *Impossible* tasks have a test that contradicts the issue: no honest change passes.

`build` keeps what it made in `data_dir`/tasks, one file a package; other options, another file.
"""

import ast
import concurrent.futures
import dataclasses
import difflib
import hashlib
import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from envs.base import Message, Task
from envs.code import operators, syntax
from envs.code.hiding import hidden_tests, hides_nothing, named
from envs.code.packages import PACKAGES, Package, fetch, is_source, package_tree, tree
from envs.code.suite import TEST_LIMITS, Report, Suites
from envs.code.tools import lines_of
from envs.dataset import task_from_json, task_to_json

VERSION = 2  # of the tasks: raise it when they would come out otherwise
SIZES: Mapping[str, int] = MappingProxyType({"one": 28, "several": 4, "regression": 4, "impossible": 3})  # a package
HELD_OUT = 0.15  # of the functions of a training package, those with tasks in the validation split
_RUNS = 3
_MOST_F2P_FRAC = 0.5
_MOST_VARIANTS = 16
_MOST_MADE_UP = 80  # calls of one function
_WORST_WALL_S = 15.0

Bug = dict[str, list[list]]  # path -> [start byte, end byte, text]


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Which bugs are made: of these operators (none: of all), in functions of at most so many lines (0: of any)."""

    only: tuple[str, ...] = ()
    max_lines: int = 0

    def has(self, site: operators.Site) -> bool:
        named = not self.only or site.operator in self.only
        return named and (not self.max_lines or site.lines <= self.max_lines)


ANY = Kinds()


@dataclasses.dataclass(frozen=True)
class Base:
    """A package as released: what its suite says of it, in `_RUNS` runs, and calls with what they give."""

    package: Package
    tree: Mapping[str, bytes]
    passing: frozenset[str]
    events: tuple[str, ...]
    seconds: float
    recorded: tuple[tuple[str, str, str, str], ...]  # (module, function, arguments, outcome) that the tests make
    made_up: tuple[tuple[str, str, str, str], ...]  # that they do not


def build(
    names: Sequence[str],
    data_dir: pathlib.Path,
    suites: Suites,
    *,
    sizes: Mapping[str, int] = SIZES,
    seed: int = 0,
    kinds: Kinds = ANY,
    threads: int = 2,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Task]]:
    """Tasks by package: read where they have been made, made and kept otherwise. Raises NoPackage without a network."""
    places = {name: _place(data_dir, name, sizes, seed, kinds) for name in names}
    fetch([name for name in names if not places[name].is_file()], data_dir)

    def one(name: str) -> list[Task]:
        if not places[name].is_file():
            begun = time.monotonic()
            made = list(make(PACKAGES[name], data_dir, suites, sizes, seed, kinds))
            write_tasks(places[name], made)
            say(f"{name}: {len(made)} tasks in {time.monotonic() - begun:.0f} s")
        return read_tasks(places[name])

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _place(data_dir: pathlib.Path, name: str, sizes: Mapping[str, int], seed: int, kinds: Kinds) -> pathlib.Path:
    made_by = {"version": VERSION, "package": dataclasses.asdict(PACKAGES[name]), "sizes": dict(sizes), "seed": seed}
    made_by |= {"held_out": HELD_OUT} | (dataclasses.asdict(kinds) if kinds != ANY else {})
    return place_of(data_dir, name, made_by)


def place_of(data_dir: pathlib.Path, name: str, made_by: Mapping[str, Any]) -> pathlib.Path:
    """The file of the tasks called `name` that were made so."""
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:12]
    return data_dir / "tasks" / f"{name}-{digest}.jsonl"


def write_tasks(place: pathlib.Path, tasks: Sequence[Task]) -> None:
    """A file of tasks. First line: how many there are, and a checksum of the rest."""
    body = "".join(task_to_json(task) + "\n" for task in tasks)
    head = json.dumps({"tasks": len(tasks), "sha256": hashlib.sha256(body.encode()).hexdigest()})
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False, encoding="utf-8") as file:
        file.write(f"{head}\n{body}")
    os.replace(file.name, place)


def read_tasks(place: pathlib.Path) -> list[Task]:
    """What `write_tasks` wrote. Raises ValueError where the file is not as it was written."""
    head, _, body = place.read_text("utf-8").partition("\n")
    try:
        whole = json.loads(head)["sha256"] == hashlib.sha256(body.encode()).hexdigest()
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{place}: it is not as it was written; delete it, and it is made again")
    return [task_from_json(line) for line in body.split("\n") if line]  # in a text there may be other ends of lines


# --- one package ----------------------------------------------------------------------------------------------------


def make(
    package: Package, data_dir: pathlib.Path, suites: Suites, sizes: Mapping[str, int], seed: int, kinds: Kinds = ANY
) -> Iterator[Task]:
    """The tasks of a package, each proved by its runs."""
    files = package_tree(data_dir, package)
    suites.add(package.name, files)
    base = measure(package, files, suites)
    old = tree(data_dir, package.name, *package.before) if package.before else {}
    for task in _made(base, suites, sizes, seed, kinds, old):
        if hides_nothing(task) or _hides(base, suites, task):
            yield task


def _hides(base: Base, suites: Suites, task: Task) -> bool:
    """Whether no test that fails can be run where they are hidden, and the others can."""
    files = hidden_tests(base.package, base.tree, task.data["f2p"])
    paths = sorted({test.partition("::")[0] for test in task.data["f2p"]})
    report = suites.tests(base.package.name, base.package, files, paths=paths)
    return report.ended and not {*task.data["f2p"], *paths} & set(report.outcomes)


def _made(
    base: Base, suites: Suites, sizes: Mapping[str, int], seed: int, kinds: Kinds, old: Mapping[str, bytes]
) -> Iterator[Task]:
    """The tasks of a package. `old`: its release before."""
    package = base.package
    digest = hashlib.sha256(f"{package.name}/{seed}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:8], "big")))
    singles = []
    for bug, site in itertools.islice(_single(base, suites, rng, kinds), sizes.get("one", 0)):
        singles.append((bug, site))
        yield _task(base, "one", len(singles), bug, [site])
    several = itertools.islice(_several(base, suites, singles, rng), sizes.get("several", 0))
    for i, (bug, found) in enumerate(several, 1):
        yield _task(base, "several", i, bug, found)
    hunks = itertools.islice(_regressions(base, suites, old), sizes.get("regression", 0))
    for i, (bug, found) in enumerate(hunks, 1):
        yield _task(base, "regression", i, bug, found)
    impossible = itertools.islice(_impossible(base, suites, singles), sizes.get("impossible", 0))
    for i, (bug, site) in enumerate(impossible, 1):
        yield _task(base, "impossible", i, bug, [site])


def measure(package: Package, files: Mapping[str, bytes], suites: Suites) -> Base:
    """Run the released suite `_RUNS` times and trace its calls. Raises ValueError where no test passes each time."""
    reports = [suites.tests(package.name, package) for _ in range(_RUNS)]
    passing = frozenset.intersection(*(_having(report, "passed") for report in reports))
    if not passing or any(report.broken for report in reports):
        raise ValueError(
            f"{package.name} {package.version}: {len(passing)} tests pass, {reports[0].broken} replaced: no tasks; "
            f"{reports[0].output[-300:]}"
        )
    sources = [path for path in files if is_source(package, path)]
    recorded = [call for call in suites.trace(package.name, package, sources, 60) if not call[1].startswith("_")]
    made_up = _spread(sorted(set(_made_up(recorded)) - set(recorded)), _MOST_MADE_UP)
    outcomes = []
    for calls in (recorded, made_up):
        first, second = (suites.calls(package.name, package, {}, turned) for turned in (calls, calls[::-1]))
        runs = (first or ["?"] * len(calls), second[::-1] if second else ["?"] * len(calls))
        same = [(*call, one) for call, one, other in zip(calls, *runs, strict=True) if one == other]
        outcomes.append(tuple(call for call in same if not call[3].startswith("?") and call[3] != "! time"))
    events = tuple(sorted({event for report in reports for event in report.events}))
    seconds = sorted(report.seconds for report in reports)[_RUNS // 2]
    return Base(package, files, passing, events, seconds, *outcomes)


def _having(report: Report, outcome: str) -> frozenset[str]:
    return frozenset(test for test, got in report.outcomes.items() if got == outcome)


@dataclasses.dataclass(frozen=True)
class _Proved:
    """A bug with what it does."""

    changes: Bug
    f2p: tuple[str, ...]
    p2p: tuple[str, ...]
    messages: Mapping[str, str]
    shown: tuple[tuple[str, ...], ...]  # (module, function, arguments, right, wrong)
    variants: tuple[tuple[str, ...], ...]  # (module, function, arguments, right)
    tests: Bug = dataclasses.field(default_factory=dict)


def prove(base: Base, suites: Suites, changes: Bug) -> _Proved | None:
    """What a bug does, or None where it is no task: nothing fails, too much does, or three runs do not agree."""
    files = buggy_files(base.tree, changes)
    limits = dataclasses.replace(TEST_LIMITS, wall_s=min(_WORST_WALL_S, max(4.0, 5 * base.seconds)))
    first = suites.tests(base.package.name, base.package, files, limits=limits, messages=True)
    failing = sorted(base.passing - _having(first, "passed"))
    if not first.ended or first.broken or not 1 <= len(failing) <= _MOST_F2P_FRAC * len(base.passing):
        return None
    where = failing if len(failing) <= 40 else list(dict.fromkeys(test.partition("::")[0] for test in failing))
    for _ in range(_RUNS - 1):
        again = suites.tests(base.package.name, base.package, files, paths=where, limits=limits)
        if not again.ended or set(failing) & _having(again, "passed"):
            return None
    shown, variants = _told_apart(base, suites, files)
    messages = {test: first.messages[test] for test in failing if test in first.messages}
    p2p = tuple(sorted(base.passing - set(failing)))
    return _Proved(changes, tuple(failing), p2p, messages, shown, variants)


def _told_apart(base: Base, suites: Suites, files: Mapping[str, str]) -> tuple[tuple, tuple]:
    """Calls of the tests whose outcome the bug changes, and hidden ones: mostly such, some that it leaves."""
    calls = [*base.recorded, *base.made_up]
    got = suites.calls(base.package.name, base.package, files, [call[:3] for call in calls])
    if got is None:
        return (), ()
    wrong = [(*call, now) for call, now in zip(calls, got, strict=True) if now != call[3]]
    made_up = set(base.made_up)
    hidden = [call[:4] for call in wrong if call[:4] in made_up]
    if len(hidden) < 2:
        return (), ()
    functions = {call[:2] for call in hidden}
    left = [call for call in base.made_up if call[:2] in functions and call not in set(hidden)]
    chosen = [hidden[i * len(hidden) // _MOST_VARIANTS] for i in range(_MOST_VARIANTS)]
    some = [left[i * len(left) // 4] for i in range(4)] if left else []
    variants = tuple(dict.fromkeys([*chosen, *some]))
    alone = suites.calls(base.package.name, base.package, {}, [call[:3] for call in variants])
    if alone != [call[3] for call in variants]:  # they depend on the calls before them
        return (), ()
    shown = tuple(call for call in wrong if call[:4] not in made_up)
    return tuple(sorted(shown, key=lambda call: len(call[2]))[:40]), variants


def _made_up(calls: Sequence[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Each call with one argument a little different."""
    for module, function, text in calls:
        values = syntax.literal(text)
        for i, value in enumerate(values):
            for other in _near(value):
                yield module, function, repr((*values[:i], other, *values[i + 1 :]))


def _spread(calls: Sequence[tuple[str, str, str]], most: int) -> list[tuple[str, str, str]]:
    """At most `most` calls of each function, at even distances."""
    groups: dict[tuple[str, str], list] = {}
    for call in calls:
        groups.setdefault(call[:2], []).append(call)
    kept = (
        found if len(found) <= most else [found[i * len(found) // most] for i in range(most)]
        for found in groups.values()
    )
    return [call for found in kept for call in found]


def _near(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, value * 2 + 3] if abs(value) < 100_000 else []
    if isinstance(value, float):
        return [value + 0.5, -value]
    if isinstance(value, str) and value and len(value) < 80:
        half = len(value) // 2
        return [value[:-1], value + value[0], value.swapcase(), value[:half] + "x" + value[half:], value[::-1]]
    if isinstance(value, list | tuple) and value:
        return [value[:-1], value[::-1], value + value[:1]]
    if isinstance(value, dict) and value:
        return [dict(list(value.items())[:-1])]
    return []


def _single(base: Base, suites: Suites, rng: np.random.Generator, kinds: Kinds) -> Iterator[tuple[_Proved, tuple]]:
    """Bugs of one operator, in an order that goes round the functions, and round the operators in each."""
    groups: dict[tuple[str, str], list[tuple[str, operators.Site]]] = {}
    for path in sorted(base.tree):
        if is_source(base.package, path):
            for site in filter(kinds.has, operators.sites(base.tree[path])):
                groups.setdefault((path, site.function), []).append((path, site))
    drawn = [(int(rng.integers(1 << 30)), *item) for _, found in sorted(groups.items()) for item in found]
    kept: dict[Any, int] = {}
    while drawn:  # the function, then the operator, that has the fewest so far
        at = min(
            range(len(drawn)),
            key=lambda i: (
                kept.get(drawn[i][1:2] + (drawn[i][2].function,), 0),
                kept.get(drawn[i][2].operator, 0),
                drawn[i][0],
            ),
        )
        _, path, site = drawn.pop(at)
        if kept.get((path, site.function), 0) >= 3 or not operators.valid(base.tree[path], site):
            continue
        proved = prove(base, suites, {path: [[site.start, site.end, site.text]]})
        kept[site.operator] = kept.get(site.operator, 0) + 1
        if proved:
            kept[path, site.function] = kept.get((path, site.function), 0) + 1
            yield proved, (path, site.operator, site.function, site.lines, site.outer)


def _several(
    base: Base, suites: Suites, singles: Sequence[tuple[_Proved, tuple]], rng: np.random.Generator
) -> Iterator[tuple[_Proved, list[tuple]]]:
    """Two or three proved bugs of different functions of one split at once."""
    for _ in range(60):
        n = min(2 + int(rng.integers(2)), len(singles))
        chosen = [singles[int(i)] for i in rng.permutation(len(singles))[:n]]
        if n < 2 or len({site[:1] + site[2:3] for _, site in chosen}) < n:
            continue
        if len({_split(base.package, site) for _, site in chosen}) > 1:
            continue
        changes: Bug = {}
        for bug, _ in chosen:
            for path, found in bug.changes.items():
                changes[path] = sorted([*changes.get(path, []), *found])
        proved = prove(base, suites, changes)
        if proved:
            yield proved, [site for _, site in chosen]


def _regressions(base: Base, suites: Suites, old: Mapping[str, bytes]) -> Iterator[tuple[_Proved, list[tuple]]]:
    """Hunks of the difference between the release before and this one, each put back alone: of functions of one
    split."""
    for path in sorted(base.tree):
        if not is_source(base.package, path) or path not in old:
            continue
        now, before = (lines_of(text.decode()) for text in (base.tree[path], old[path]))
        starts = list(itertools.accumulate((len(line.encode()) for line in now), initial=0))
        matcher = difflib.SequenceMatcher(None, now, before, autojunk=False)
        for kind, i, j, k, m in matcher.get_opcodes():
            if kind == "equal" or max(j - i, m - k) > 40:
                continue
            change = [starts[i], starts[j], "".join(before[k:m])]
            sites = [(path, "hunk", name, 0, name) for name in _functions_at(base.tree[path], i, j)]
            if len({_split(base.package, site) for site in sites}) > 1:
                continue
            try:
                syntax.parse(operators.apply(base.tree[path], [tuple(change)]))
            except SyntaxError:
                continue
            proved = prove(base, suites, {path: [change]})
            if proved:
                yield proved, sites


def _functions_at(data: bytes, i: int, j: int) -> list[str]:
    """Dotted names of the functions that lines i to j, from 0, have a part of, or lie beside where there are none; ""
    of none. Of a function in another, the outer one, whose parts are its own."""
    first, last = (i + 1, j) if i < j else (i, i + 1)
    found, todo = [], [(syntax.parse(data), "")]
    while todo:
        node, prefix = todo.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                todo.append((child, prefix))
                continue
            begin = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            if isinstance(child, ast.ClassDef):
                todo.append((child, f"{prefix}{child.name}."))
            elif begin <= last and first <= child.end_lineno:
                found.append(f"{prefix}{child.name}")
    return sorted(found) or [""]


def _impossible(
    base: Base, suites: Suites, singles: Sequence[tuple[_Proved, tuple]]
) -> Iterator[tuple[_Proved, tuple]]:
    """A proved bug and a test of it with one expected value altered, so that the released sources fail it, too."""
    for bug, site in singles:
        for test in bug.f2p:
            path, _, name = test.partition("::")
            found = _altered(base.tree.get(path, b""), name.partition("[")[0].split("::"))
            if not found:
                continue
            changes = {path: [list(found)]}
            report = suites.tests(base.package.name, base.package, buggy_files(base.tree, changes), paths=[path])
            if report.ended and report.outcomes.get(test) == "failed":
                yield dataclasses.replace(bug, tests=changes), site
                break


def _altered(data: bytes, names: Sequence[str]) -> tuple[int, int, str] | None:
    """The first plain expected value in the test of that name, with another in its place."""
    try:
        source = operators.Source(data)
    except SyntaxError:
        return None
    node = named(source.tree, names)
    for inner in ast.walk(node) if node else ():
        value = None
        if isinstance(inner, ast.Compare) and isinstance(inner.ops[0], ast.Eq):
            value = inner.comparators[0]
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and len(inner.args) == 2:
            value = inner.args[1] if inner.func.attr == "assertEqual" else None
        if isinstance(value, ast.Constant) and type(value.value) in (int, str, bool, float):
            other = value.value + "!" if isinstance(value.value, str) else not value.value
            other = value.value + 1 if type(value.value) in (int, float) else other
            return source.start(value), source.end(value), repr(other)
    return None


# --- what a task says -----------------------------------------------------------------------------------------------


def buggy_files(files: Mapping[str, bytes], changes: Bug) -> dict[str, str]:
    """The changed files of a bug, as text."""
    return {
        path: operators.apply(files[path], [tuple(change) for change in found]).decode()
        for path, found in changes.items()
    }


def issue(base: Base, bug: _Proved) -> str:
    """What goes wrong, as a user would report it: a call and its results, or what a check of the behaviour says."""
    if bug.shown:
        module, function, arguments, right, wrong = bug.shown[0]
        call = f"{function}({arguments[1:-1].rstrip(',')})"
        return f"{module}: {call} {_said(wrong)}, it should have {_said(right, past=True)}."
    test = bug.f2p[0]
    what = test.rpartition("::")[2].removeprefix("test_").partition("[")[0].replace("_", " ")
    message = bug.messages.get(test, "").strip().splitlines()
    said = f": {message[0][:200]}" if message else ""
    return f"{base.package.name}: something is wrong with {what}{said}"


def _said(outcome: str, *, past: bool = False) -> str:
    kind, _, text = outcome.partition(" ")
    verb = ("raised", "given") if past else ("raises", "gives")
    return f"{verb[0]} {text}" if kind == "!" else f"{verb[1]} {text}"


def _split(package: Package, site: tuple) -> str:
    """The split of every task of one function and of those in it, drawn by its name."""
    key = f"{package.name}/{[site[0] + ':' + site[4]]}"
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    return "validation" if package.split == "train" and place < HELD_OUT else package.split


def _task(base: Base, family: str, number: int, bug: _Proved, found: Sequence[tuple]) -> Task:
    package = base.package
    key = f"{package.name}/{sorted({site[0] + ':' + site[2] for site in found})}"
    (split,) = {_split(package, site) for site in found}  # no task is of functions of two
    data = {
        "package": package.name,
        "bug": bug.changes,
        "tests": bug.tests,
        "f2p": list(bug.f2p),
        "p2p": list(bug.p2p),
        "shown": [list(call) for call in bug.shown],
        "variants": [list(call) for call in bug.variants],
        "events": list(base.events),
        "seconds": round(base.seconds, 2),
        "operators": [site[1] for site in found],
        "functions": [f"{site[0]}:{site[2]}" for site in found],
        "lines": max((site[3] for site in found), default=0),
        "issue": issue(base, bug),
    }
    seed = int.from_bytes(hashlib.blake2b(f"{key}/{number}".encode(), digest_size=4).digest(), "big")
    task_id = f"code/{package.name}-{package.version}/{family}/{number}"
    difficulty = {"one": 1.0, "several": float(len(found)), "regression": 2.0, "impossible": 1.0}[family]
    return Task(task_id, family, split, seed, (Message("user", data["issue"]),), data, difficulty)
