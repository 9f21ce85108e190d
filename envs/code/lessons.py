"""Lessons: bugs of the same operators in functions of Python's own library, under other names. Demonstrations are of
these; no policy is asked them.

A lesson is a file of one function. Its path and most of its words are drawn: whoever repairs it must read what stands
there, for there is nothing to remember. No test was run for any: a lesson is judged by its text, right is the one
without the bug. None of the functions is in a task. Which there are depends on the version of Python.
"""

import ast
import builtins
import functools
import io
import itertools
import keyword
import pathlib
import platform
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from envs.base import Message, Task
from envs.code import operators, syntax, tasks
from envs.code.packages import Package
from envs.code.tools import lines_of

VERSION = 4  # raise it when they would come out otherwise
FAMILY = "lesson"
PACKAGE = Package("python", platform.python_version(), "", ("",), ())
RENAMED = 0.7  # of the words of a function, those that are others in a lesson
COINED = 0.5  # of the words that are drawn, those that stand nowhere: a policy has to copy them piece by piece
_MOST_FILE_BYTES = 60_000
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings", "turtledemo"}
_KEPT = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls", "args", "kwargs"}
_PATHS = ("{0}.py", "{0}/__init__.py", "{0}/{1}.py", "src/{0}/{1}.py", "{0}/{1}/{2}.py", "src/{0}/_{1}.py")
_ERRORS = ("AssertionError", "TypeError", "ValueError", "KeyError", "AttributeError")
_WORD = re.compile(r"[^\W\d]\w{2,}")
_VALUES = ("None", "True", "False", "0", "1", "12", "'a'", "''", "[]", "[1, 2]", "{'b': 3}", "('x', 7)")

Snippet = tuple[str, str, str, str]  # a function's text with and without the bug, its name, and the operator


def build(n: int, data_dir: pathlib.Path, *, seed: int = 0, kinds: tasks.Kinds = tasks.ANY) -> list[Task]:
    """`n` lessons, drawn by `seed`: read where they have been made, made and kept otherwise. Where there are fewer
    places for a bug each comes again, under other names.

    Errors (ValueError): there is none.
    """
    made_by = {"version": VERSION, "python": PACKAGE.version, "n": n, "seed": seed}
    place = tasks.place_of(data_dir, "lessons", made_by | {"kinds": [list(kinds.only), kinds.max_lines]})
    if not place.is_file():
        found, words = _snippets(kinds)
        if not found:
            raise ValueError(f"lessons: got {kinds}, but Python's library has no place for such a bug; ask for others")
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(found))
        drawn = (found[int(i)] for i in itertools.cycle(order))
        rngs = (np.random.Generator(np.random.Philox(key=[seed, i])) for i in itertools.count())
        made = (_lesson(i, snippet, words, rng) for i, (snippet, rng) in enumerate(zip(drawn, rngs, strict=False)))
        tasks.write_tasks(place, list(itertools.islice(made, n)))
    return tasks.read_tasks(place)


def is_right(changed: Mapping[str, str | None], task: Task) -> bool:
    """Whether an episode's changes give the text without the bug, and nothing else."""
    return changed == task.data["files"]


def tree() -> Mapping[str, bytes]:
    """{path: source} of the library."""
    return _tree(pathlib.Path(sysconfig.get_path("stdlib")))


@functools.lru_cache(maxsize=1)
def _tree(root: pathlib.Path) -> Mapping[str, bytes]:
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in paths if not _LEFT_OUT & set(path.parts)]
    return {str(path): (root / path).read_bytes() for path in kept if (root / path).stat().st_size <= _MOST_FILE_BYTES}


def _snippets(kinds: tasks.Kinds) -> tuple[list[Snippet], dict[str, list[str]]]:
    """Every function of the library with every bug of `kinds`, and by style the words that stand in them."""
    found, words = [], set()
    for data in tree().values():
        try:
            data.decode()
            sites = [site for site in operators.sites(data) if site.function and kinds.has(site)]
            source = operators.Source(data) if sites else None
        except (SyntaxError, UnicodeDecodeError):  # made to be wrong, or in an old encoding
            continue
        spans = dict(_functions(source)) if source else {}
        for site in sites:
            name = site.function.rpartition(".")[2]
            begin, end = spans[site.function]
            if not begin <= site.start < site.end <= end:  # of an earlier function of that name
                continue
            bug = [(site.start - begin, site.end - begin, site.text)]
            right = data[begin:end]
            snippet = (right.decode(), operators.apply(right, bug).decode(), name, site.operator)
            if all(_words(_whole(text, "A")) is not None for text in snippet[:2]):
                found.append(snippet)
                words |= {word for word, _ in _words(_whole(snippet[0], "A"))}
    by_style: dict[str, list[str]] = {"lower": ["thing"], "title": ["Thing"]}
    for word in sorted(words):
        if 1 < len(word) <= 20:
            by_style.setdefault(_style(word), []).append(word)
    return found, by_style


def _functions(source: operators.Source) -> Iterator[tuple[str, tuple[int, int]]]:
    """(dotted name, the bytes of its lines) of each function; of those of one name, the last."""

    def within(node: ast.AST, dotted: str):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{dotted}.{child.name}" if dotted else child.name
                if not isinstance(child, ast.ClassDef):
                    yield name, (source.start(child) - child.col_offset, source.end(child))
                yield from within(child, name)
            else:
                yield from within(child, dotted)

    return within(source.tree, "")


def _whole(text: str, name: str) -> str:
    """A file of the function alone: within a class where it is indented."""
    return (f"class {name}:\n" if text[:1].isspace() else "") + text.rstrip("\n") + "\n"


def _words(text: str) -> list[tuple[str, int]] | None:
    """(word, where it begins) of the names in a source that a lesson may change, and of the words of its comments and
    plain strings; None where it is none.
    """
    try:
        syntax.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return None
    begins = list(itertools.accumulate(map(len, lines_of(text)), initial=0))
    found = []
    for token in tokens:
        begin = begins[token.start[0] - 1] + token.start[1]
        if token.type == tokenize.NAME:
            found.append((token.string, begin))
        elif token.type == tokenize.COMMENT or (token.string[:1] in "'\"" and "\\" not in token.string):
            found += [(match.group(), begin + match.start()) for match in _WORD.finditer(token.string)]
    return [(word, at) for word, at in found if word not in _KEPT and not word.startswith("__")]


def _style(word: str) -> str:
    """Of one style: _private, CONSTANT, Class and the others."""
    bare = word.lstrip("_")
    kind = "upper" if bare.isupper() else "title" if bare[:1].isupper() else "lower"
    return "_" * (bare != word) + kind


def _renamed(text: str, new: Mapping[str, str]) -> str:
    for word, at in sorted(_words(text) or [], key=lambda found: -found[1]):
        text = text[:at] + new.get(word, word) + text[at + len(word) :]
    return text


def _lesson(index: int, snippet: Snippet, words: Mapping[str, Sequence[str]], rng: np.random.Generator) -> Task:
    right, wrong, name, operator = snippet

    def pick(found: Sequence[str]) -> str:
        return found[int(rng.integers(len(found)))]

    def word_of(found: Sequence[str]) -> str:
        word, other = pick(found), pick(found)
        if rng.random() < COINED:
            coined = word[: 1 + int(rng.integers(len(word)))] + other[int(rng.integers(len(other))) :]
            word = word if coined in _KEPT or coined.startswith("__") else coined
        return word

    a, b, c = (word_of(words["lower"]) for _ in range(3))
    path, owner = pick(_PATHS).format(a, b, c), word_of(words["title"])
    right, wrong = _whole(right, owner), _whole(wrong, owner)
    old = list(dict.fromkeys(word for word, _ in [*(_words(right) or []), *(_words(wrong) or [])]))
    new, taken = {}, set(old)
    for word in old:
        other = word_of(words.get(_style(word), (word,)))
        if word != owner and rng.random() < RENAMED and other not in taken:
            new[word] = other
            taken.add(other)
    right, wrong, name = _renamed(right, new), _renamed(wrong, new), new.get(name, name)
    said = name.strip("_").replace("_", " ") if rng.random() < 0.5 else f"{pick(words['lower'])} {b}".replace("_", " ")
    issue = (
        f"{a}: something is wrong with {said}",
        f"{a}: something is wrong with {said}: {pick(_ERRORS)}",
        f"{a}.{b}: {name}({pick(_VALUES)}) gives {pick(_VALUES)}, it should have given {pick(_VALUES)}.",
        f"{a}.{b}: {name}({pick(_VALUES)}) raises {pick(_ERRORS)}, it should have given {pick(_VALUES)}.",
    )[int(rng.integers(4))]
    dotted = f"{owner}.{name}" if right.startswith("class ") else name
    data = {
        "lesson": True, "files": {path: right}, "bug": {path: [[0, len(right.encode()), wrong]]},
        "operators": [operator], "functions": [f"{path}:{dotted}"], "lines": right.count("\n"), "issue": issue,
    }  # fmt: skip
    return Task(f"code/lesson/{index}", FAMILY, "train", index, (Message("user", issue),), data, 1.0)
