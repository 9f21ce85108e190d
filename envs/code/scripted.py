"""Scripted policies of the code world: gold puts the released text back, the idler submits, the wrong one edits
elsewhere; and an imperfect demonstrator. Each knows the repository as the grader does, and reads no observation.
"""

import ast
import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from envs.base import ScriptedPolicy, Task
from envs.code import syntax
from envs.code.repositories import Repositories, Repository
from envs.code.tools import diff_of, lines_of

Write = Callable[..., str]  # (kind, **arguments) -> an action

VERSION = 5  # of the demonstrator: raise it when it would act otherwise
# What a demonstration does, and how often: the right edit; another line; a wrong text in the right line; none.
SHARES: Mapping[str, float] = MappingProxyType({"good": 0.4, "elsewhere": 0.25, "wrong_text": 0.25, "none": 0.1})
SLIPS = 0.15  # of the demonstrations that edit: an edit that is refused comes first, and is then done as it was meant
_OPPOSITES = (
    ("<", "<="), ("==", "!="), ("True", "False"), (" and ", " or "), ("+", "-"), ("1", "2"), ("0", "1"),
    ("if ", "if not "),
)  # fmt: skip


def edits(before: str, after: str) -> list[tuple[str, str]]:
    """(search, replace) by which `before` becomes `after`, in order: whole lines, as few as occur once."""
    found, now = [], before
    while now != after:
        if len(found) > len(lines_of(after)):  # lines that are alike may undo each other's edits for ever
            return [(before, after)]
        lines, wanted = lines_of(now), lines_of(after)
        i, j, k, m = _first_change(lines, wanted)
        while not lines[i:j] or now.count("".join(lines[i:j])) != 1:
            grow_down = j < len(lines) and (lines[j] == wanted[m] if m < len(wanted) else False)
            if i > 0 and (k > 0 and lines[i - 1] == wanted[k - 1]):
                i, k = i - 1, k - 1
                grow_down = grow_down and now.count("".join(lines[i:j])) != 1
            elif not grow_down:
                i, j, k, m = 0, len(lines), 0, len(wanted)
                break
            if grow_down:
                j, m = j + 1, m + 1
        search, replace = "".join(lines[i:j]), "".join(wanted[k:m])
        found.append((search, replace))
        now = now.replace(search, replace, 1)
    return found


def _first_change(lines: Sequence[str], wanted: Sequence[str]) -> tuple[int, int, int, int]:
    """lines[i:j] became wanted[k:m]. The matcher, which is slow, sees what is not alike at both ends."""
    most = min(len(lines), len(wanted))
    begin = next((n for n in range(most) if lines[n] != wanted[n]), most)
    left = most - begin
    end = next((n for n in range(left) if lines[-1 - n] != wanted[-1 - n]), left)
    between = lines[begin : len(lines) - end], wanted[begin : len(wanted) - end]
    codes = difflib.SequenceMatcher(None, *between, autojunk=False).get_opcodes()
    _, i, j, k, m = next(code for code in codes if code[0] != "equal")
    return begin + i, begin + j, begin + k, begin + m


def plan(actions: Sequence[str]) -> ScriptedPolicy:
    """The policy that does one action after the other, and the last again and again."""
    return lambda observations: actions[min(len(observations), len(actions) - 1)]


def function_text(repository: Repository, name: str) -> tuple[str, str]:
    """(path, source) of a function "path:dotted.name" as an episode sees it; the whole file where it is not found."""
    path, _, dotted = name.partition(":")
    text = repository.seen(path) or ""
    node: Any = syntax.parse(text)
    for part in dotted.split("."):
        node = next((child for child in _within(node) if child.name == part), None)
        if node is None:
            return path, text
    return path, "".join(lines_of(text)[node.lineno - 1 : node.end_lineno])


def _within(node: ast.AST) -> Iterator[Any]:
    """Functions and classes whose dotted name has one part more than that of `node`: those under an `if`, too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
        else:
            yield from _within(child)


def policies(repositories: Repositories, write: Write) -> dict[str, Callable[[Task], ScriptedPolicy]]:
    """gold, noop and wrong."""

    def gold(task: Task) -> ScriptedPolicy:
        if task.family == "impossible":
            return plan([write("give_up", reason="a test contradicts the issue: no honest change passes it")])
        return plan(_repair(repositories.of(task), write))

    def wrong(task: Task) -> ScriptedPolicy:
        repository = repositories.of(task)
        if not repository.buggy:  # an instance whose gold patch makes new files alone
            return plan([write("submit")])
        path = sorted(repository.buggy)[0]
        first = next(line for line in lines_of(repository.buggy[path]) if line.strip())
        return plan([_commented(repository, write, path, first), write("submit")])

    return {"gold": gold, "noop": lambda task: plan([write("submit")]), "wrong": wrong}


def _edit(write: Write, path: str, search: str, replace: str) -> str:
    return write("edit", path=path, search=search, replace=replace)


def _commented(repository: Repository, write: Write, path: str, line: str) -> str:
    text = repository.buggy[path]
    search, replace = edits(text, text + "\n# it is right as it is\n")[0]
    return _edit(write, path, search, replace)


def _repair(repository: Repository, write: Write) -> list[str]:
    actions = []
    for path, text in sorted(repository.buggy.items()):
        for search, replace in edits(text, repository.released(path) or ""):
            actions.append(_edit(write, path, search, replace))
    added = [diff_of(path, None, repository.tree[path].decode()) for path in sorted(repository.absent)]
    if added:
        actions.append(write("patch", diff="".join(added)))
    return [*actions, write("submit")]


def write_patch(kind: str, **arguments: Any) -> str:
    """An action of the one-turn form: an edit is a whole answer, and there is nothing else."""
    if kind != "edit":
        return "<think> I do not know. </think>"
    search, replace = arguments["search"], arguments["replace"]
    return (
        f"<think> The bug is in {arguments['path']}. </think>\n<solution>\n### {arguments['path']}\n"
        f"<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n</solution>"
    )


def demonstrator(
    task: Task,
    seed: int,
    *,
    repositories: Repositories,
    write: Write,
    shares: Mapping[str, float] = SHARES,
    slips: float = SLIPS,
) -> ScriptedPolicy:
    """A demonstration that is right only sometimes; a pure function of (task, seed)."""
    if abs(sum(shares.values()) - 1) > 1e-6 or not set(shares) <= set(SHARES):
        raise ValueError(f"demonstration shares: got {dict(shares)}, want {sorted(SHARES)} with sum 1")
    if not 0 <= slips <= 1:
        raise ValueError(f"demonstration slips: got {slips}, want a share from 0 to 1")
    digest = hashlib.blake2b(f"{task.task_id}/{seed}".encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "big"))
    how = str(rng.choice(list(shares), p=list(shares.values())))
    if task.family == "impossible" and how == "good":
        return plan([write("give_up", reason="a test contradicts the issue")])
    repository = repositories.of(task)
    if not repository.buggy:  # an instance whose gold patch makes new files alone
        return plan(_repair(repository, write) if how == "good" else [write("submit")])
    path = sorted(repository.buggy)[0]
    text, released = repository.buggy[path], repository.released(path) or ""
    right = edits(text, released)
    if how == "none":
        return plan([write("submit")])
    if how == "good":
        meant, actions = (path, *right[0]), _repair(repository, write)
    else:
        meant = (path, *_wrong_edit(task, repository, text, right[0], elsewhere=how == "elsewhere", rng=rng))
        actions = [_edit(write, *meant), write("submit")]
    return plan([_edit(write, *_slip(text, *meant, rng)), *actions] if rng.random() < slips else actions)


def _wrong_edit(
    task: Task, repository: Repository, text: str, right: tuple[str, str], *, elsewhere: bool, rng: np.random.Generator
) -> tuple[str, str]:
    """(search, replace) of an edit that mends nothing: another line, or a wrong text in the right one. Where nothing
    can be turned into its opposite, a comment is added.
    """
    search, replace = right
    if not elsewhere and search != (other := _turned(replace) or _remarked(replace)):
        return search, other
    shown = [function_text(repository, name)[1] for name in task.data["functions"]] or [text]
    lines = [line for part in shown for line in lines_of(part) if line.strip() and text.count(line) == 1]
    others = [line for line in lines if line not in search] or lines or [search]
    likely = [line for line in others if _turned(line)] or others
    line = likely[int(rng.integers(len(likely)))]
    return line, _turned(line) or _remarked(line)


def _turned(line: str) -> str | None:
    """A line with the first thing in it that has an opposite turned into that; None where there is none."""
    return next((line.replace(a, b, 1) for a, b in _OPPOSITES if a in line), None)


def _remarked(line: str) -> str:
    return line.rstrip("\n") + "  # ?\n"


def _slip(text: str, path: str, search: str, replace: str, rng: np.random.Generator) -> tuple[str, str, str]:
    """An edit of `text` that is refused: as it is meant, without a word of the path, or of the lines, or any change."""
    kind = str(rng.choice(["path", "search", "same"]))
    where = path if kind == "path" else search
    words = list(re.finditer(r"\w+", where))
    word = words[int(rng.integers(len(words)))] if words else None
    fewer = where[: word.start()] + where[word.end() :] if word else where
    if kind == "path":
        return fewer.lstrip("/"), search, replace  # a path from the root would be an attempt to get out
    return (path, search, search) if kind == "same" or fewer in text else (path, fewer, replace)
