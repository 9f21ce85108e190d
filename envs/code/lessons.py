"""Lessons: bugs of the same operators in functions of Python's own library. Demonstrations are of these; no policy is
asked them.

No test was run for any: a lesson is judged by its text, right is the released one. They teach how a repair is written,
by thousands of functions, of which none is in a task. Which there are depends on the version of Python.
"""

import functools
import itertools
import pathlib
import platform
import sysconfig
from collections.abc import Mapping, Sequence

import numpy as np

from envs.base import Message, Task
from envs.code import operators, tasks
from envs.code.packages import Package

VERSION = 1  # raise it when they would come out otherwise
FAMILY = "lesson"
PACKAGE = Package("python", platform.python_version(), "", ("",), ())
_MOST_FILE_BYTES = 60_000
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings", "turtledemo"}


def build(n: int, data_dir: pathlib.Path, *, seed: int = 0, kinds: tasks.Kinds = tasks.ANY) -> list[Task]:
    """`n` lessons in an order drawn by `seed`: read where they have been made, made and kept otherwise.

    Errors (ValueError): the library has fewer.
    """
    made_by = {"version": VERSION, "python": PACKAGE.version, "n": n, "seed": seed}
    place = tasks.place_of(data_dir, "lessons", made_by | {"kinds": [list(kinds.only), kinds.max_lines]})
    if not place.is_file():
        found = _sites(kinds)
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(found))
        drawn = (found[int(i)] for i in order)
        chosen = list(itertools.islice((it for it in drawn if operators.valid(tree()[it[0]], it[1])), n))
        if len(chosen) < n:
            raise ValueError(f"lessons: got n={n}, but Python's library has {len(chosen)} sites of {kinds}; lower n")
        tasks.write_tasks(place, [_lesson(i, *site) for i, site in enumerate(chosen)])
    return tasks.read_tasks(place)


def tree() -> Mapping[str, bytes]:
    """{path: source} of the library."""
    return _tree(pathlib.Path(sysconfig.get_path("stdlib")))


@functools.lru_cache(maxsize=1)
def _tree(root: pathlib.Path) -> Mapping[str, bytes]:
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in paths if not _LEFT_OUT & set(path.parts)]
    return {str(path): (root / path).read_bytes() for path in kept if (root / path).stat().st_size <= _MOST_FILE_BYTES}


def _sites(kinds: tasks.Kinds) -> list[tuple[str, operators.Site]]:
    found = []
    for path, data in tree().items():
        try:
            data.decode()
            found += [(path, site) for site in operators.sites(data) if kinds.has(site)]
        except (SyntaxError, UnicodeDecodeError):  # made to be wrong, or in an old encoding
            continue
    return found


def _lesson(index: int, path: str, site: operators.Site) -> Task:
    what = site.function.rpartition(".")[2].strip("_").replace("_", " ")
    issue = f"{pathlib.PurePosixPath(path).parts[0].removesuffix('.py')}: something is wrong with {what}"
    data = {
        "lesson": True, "bug": {path: [[site.start, site.end, site.text]]}, "operators": [site.operator],
        "functions": [f"{path}:{site.function}"], "lines": site.lines, "issue": issue,
    }  # fmt: skip
    return Task(f"code/lesson/{index}", FAMILY, "train", index, (Message("user", issue),), data, 1.0)


def is_right(changed: Mapping[str, str | None], buggy: Sequence[str]) -> bool:
    """Whether an episode's changes give the released texts and nothing else."""
    now = {path: text.encode() for path, text in changed.items() if text is not None}
    return set(buggy) <= set(changed) and now == {path: tree().get(path) for path in changed}
