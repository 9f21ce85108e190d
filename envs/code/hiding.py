"""Which tests an episode may see: of half of the tasks those that fail are taken out, wherever they are written."""

import ast
import functools
import pathlib
from collections.abc import Mapping, Sequence

from envs.base import Task
from envs.code import operators, syntax
from envs.code.packages import Package, is_test
from envs.code.tools import lines_of


def hides_nothing(task: Task) -> bool:
    """Whether the failing tests may be seen: of half of the tasks, and of every impossible one, which they show."""
    return task.family == "impossible" or task.seed % 2 == 1


def hidden_tests(package: Package, files: Mapping[str, bytes], failing: Sequence[str]) -> dict[str, str]:
    """The test modules without the tests that fail: wherever they are written, be it a base class of another module.

    What is written nowhere (it is made as the module runs, or comes from elsewhere) is overridden at the module's end.
    """
    left: dict[str, set[str]] = {}
    over: dict[str, set[str]] = {}
    for path, _, name in (test.partition("::") for test in failing):
        parts = tuple(name.partition("[")[0].split("::"))
        found = _written(package, files, path, parts)
        for place, named in found:
            left.setdefault(place, set()).add("::".join(named))
        if not found:
            over.setdefault(path, set()).add(".".join(parts))
    made = {path: without_tests(files[path].decode(), sorted(names)) for path, names in left.items()}
    for path, names in over.items():
        text = made.get(path) or files[path].decode()
        made[path] = text.rstrip("\n") + "\n\n\n" + "".join(f"{name} = None\n" for name in sorted(names))
    return made


def _written(
    package: Package, files: Mapping[str, bytes], path: str, parts: tuple[str, ...]
) -> list[tuple[str, tuple[str, ...]]]:
    """(module, name) of each test function that a test may be: its own, and what it has where that is taken away."""
    found, seen, todo = [], set(), [(path, parts)]
    while todo:
        path, parts = todo.pop()
        if (path, parts) in seen or path not in files or not is_test(package, path):
            continue
        seen.add((path, parts))
        module, imports = _parsed(files[path])
        if named(module, parts) is not None:
            found.append((path, parts))
        owner = named(module, parts[:-1])
        bases = owner.bases if isinstance(owner, ast.ClassDef) else ()
        todo += [(path, (base.id, parts[-1])) for base in bases if isinstance(base, ast.Name)]
        for node, name in imports.get(parts[0], ()):
            todo += [(place, (name, *parts[1:])) for place in _modules(package, path, node)]
    return found


@functools.lru_cache(maxsize=256)
def _parsed(data: bytes) -> tuple[ast.Module, Mapping[str, list[tuple[ast.ImportFrom, str]]]]:
    """A module, empty where it does not parse, and (statement, name there) of what it imports by each name."""
    try:
        module = syntax.parse(data)
    except SyntaxError:
        module = ast.Module([], [])
    imports: dict[str, list[tuple[ast.ImportFrom, str]]] = {}
    for node in ast.walk(module):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            imports.setdefault(alias.asname or alias.name, []).append((node, alias.name))
    return module, imports


def _modules(package: Package, path: str, node: ast.ImportFrom) -> list[str]:
    """Where the module of `from module import name` in the module at `path` may lie."""
    folders = list(pathlib.PurePosixPath(path).parents)
    roots = [folders[0], *map(pathlib.PurePosixPath, package.python_path)]
    if node.level:
        roots = folders[node.level - 1 : node.level]
    places = [str(root.joinpath(*(node.module or "").split("."))) for root in roots]
    return [end for place in places for end in (f"{place}.py", f"{place}/__init__.py".removeprefix("./"))]


def without_tests(text: str, names: Sequence[str]) -> str:
    """A test module in which each of the dotted test names ("Class::test") is nothing but `pass`."""
    source = operators.Source(text.encode())
    lines = lines_of(text)
    nodes = [node for name in set(names) if (node := named(source.tree, name.split("::"))) is not None]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1
        lines[first : node.end_lineno] = [" " * node.col_offset + "pass\n"]
    return "".join(lines)


def named(tree: ast.AST, names: Sequence[str]) -> ast.AST | None:
    """The function or class of a dotted name."""
    node = tree
    for name in names:
        node = next((child for child in getattr(node, "body", ()) if getattr(child, "name", None) == name), None)
    return node
