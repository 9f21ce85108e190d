"""Bugs by syntax tree: each operator names places in a source and what stands there instead. Pure functions of the
text.

A site is a byte range and its replacement, so that everything around a bug keeps its form, and the gold patch is the
range put back. Kinds after SWE-smith's procedural ones (2504.21798, table 8) and the usual mutants of testing.
"""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from envs.code import syntax

_SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in", "is": "is not",
    "is not": "is", "+": "-", "-": "+", "*": "+", "/": "*", "//": "/", "%": "//", "**": "*", "<<": ">>", ">>": "<<",
    "and": "or", "or": "and", "|": "&", "&": "|", "+=": "-=", "-=": "+=", "*=": "+=", "|=": "&=", "&=": "|=",
}  # fmt: skip
_METHODS = {
    "lower": "upper", "upper": "lower", "startswith": "endswith", "endswith": "startswith", "strip": "lstrip",
    "lstrip": "rstrip", "rstrip": "lstrip", "split": "rsplit", "rsplit": "split", "find": "rfind", "rfind": "find",
    "partition": "rpartition", "rpartition": "partition", "match": "search", "search": "match", "keys": "values",
    "append": "extend", "isdigit": "isalpha", "title": "upper", "ljust": "rjust", "rjust": "ljust", "items": "keys",
}  # fmt: skip
_BUILTINS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "set": "list", "abs": "int"}


@dataclasses.dataclass(frozen=True, order=True)
class Site:
    """Where a bug goes: bytes start..end of a source become `text`. `function` is dotted, "" at the top level."""

    start: int
    end: int
    text: str
    operator: str
    function: str
    lines: int  # of the function
    outer: str = ""  # the function that it is in, itself or around the one it is of


class Source:
    """A source with its tree, and byte offsets of nodes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.tree = syntax.parse(data)
        self._lines = [0]
        for line in data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()


Change = tuple[int, int, str]
Operator = Callable[[Source, ast.AST], Iterator[Change]]


def _whole(source: Source, node: ast.AST, text: str) -> Change:
    return source.start(node), source.end(node), text


def _token(source: Source, left: ast.AST, right: ast.AST) -> Iterator[Change]:
    """The one operator between two nodes, swapped; nothing where a comment stands between."""
    start, end = source.end(left), source.start(right)
    between = source.data[start:end].decode()
    if "#" in between:
        return
    found = re.search(r"not\s+in|is\s+not|[a-z]+|[-+*/%<>=!|&]+", between)
    swapped = _SWAPPED.get(" ".join(found.group().split())) if found else None
    if swapped:
        yield start + len(between[: found.start()].encode()), start + len(between[: found.end()].encode()), swapped


def _compare(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _token(source, node.left, node.comparators[0])


def _arithmetic(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BinOp):
        yield from _token(source, node.left, node.right)


def _augmented(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.AugAssign):
        yield from _token(source, node.target, node.value)


def _boolean(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        yield from _token(source, node.values[0], node.values[1])


def _negate(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.UnaryOp):
        yield _whole(source, node.test, f"not ({source.text(node.test)})")


def _drop_not(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _whole(source, node, source.text(node.operand))


def _integer(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10_000:
        yield _whole(source, node, str(node.value + 1))
        if node.value > 0:
            yield _whole(source, node, str(node.value - 1))


def _truth(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield _whole(source, node, str(not node.value))


def _string(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) <= 20:
        written = source.text(node)
        if re.fullmatch(r"""(['"])[^'"\\{}\n]+\1""", written):
            yield _whole(source, node, f"{written[0]}{node.value[:-1]}{written[0]}")


def _return_none(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield _whole(source, node.value, "None")


def _swap_arguments(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call) and len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second = node.args
        between = source.data[source.end(first) : source.start(second)].decode()
        if between.strip() == "," and source.text(first) != source.text(second):
            text = f"{source.text(second)}{between}{source.text(first)}"
            yield source.start(first), source.end(second), text


def _drop_keyword(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg and node.args:
        before = node.keywords[-2].value if len(node.keywords) > 1 else node.args[-1]
        if source.start(before) < source.start(node.keywords[-1]):
            yield source.end(before), source.end(node.keywords[-1]), ""


def _drop_statement(source: Source, node: ast.AST) -> Iterator[Change]:
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    attribute = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    if call or attribute or isinstance(node, ast.AugAssign):
        yield _whole(source, node, "pass")


def _index(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.UnaryOp):
        operand = node.slice.operand
        if isinstance(operand, ast.Constant) and operand.value == 1:
            yield _whole(source, node.slice, "0")


def _slice(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield _whole(source, bound, "" if isinstance(bound, ast.Constant) else f"{source.text(bound)} + 1")


def _branches(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.IfExp):
        test, body, other = (source.text(part) for part in (node.test, node.body, node.orelse))
        yield _whole(source, node, f"{other} if {test} else {body}")


def _method(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        end = source.end(node.func)
        yield end - len(node.func.attr), end, _METHODS[node.func.attr]


def _builtin(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BUILTINS:
        yield _whole(source, node.func, _BUILTINS[node.func.id])


def _jump(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Break | ast.Continue):
        yield _whole(source, node, "continue" if isinstance(node, ast.Break) else "break")


def _exception(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
        yield _whole(source, node.exc.func, "KeyError" if node.exc.func.id != "KeyError" else "ValueError")


OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {
        "compare": _compare, "arithmetic": _arithmetic, "augmented": _augmented, "boolean": _boolean,
        "negate": _negate, "drop_not": _drop_not, "integer": _integer, "truth": _truth, "string": _string,
        "return_none": _return_none, "swap_arguments": _swap_arguments, "drop_keyword": _drop_keyword,
        "drop_statement": _drop_statement, "index": _index, "slice": _slice, "branches": _branches,
        "method": _method, "builtin": _builtin, "jump": _jump, "exception": _exception,
    }
)  # fmt: skip


def sites(data: bytes) -> list[Site]:
    """Every site of every operator inside functions, in the order of the source; `valid` says which give a program."""
    source, found = Source(data), []

    def visit(node: ast.AST, function: str, lines: int, outer: str) -> None:
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if inside or isinstance(node, ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
            lines = node.end_lineno - node.lineno + 1 if inside else 0
            outer = outer or (function if inside else "")
        body = getattr(node, "body", ()) if inside or isinstance(node, ast.ClassDef | ast.Module) else ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and child in body:
                continue  # a docstring
            if isinstance(child, ast.JoinedStr):  # its parts have no places of their own before Python 3.12
                continue
            if inside and child not in body:  # decorators, defaults, annotations
                continue
            if function and lines:
                for name, operator in OPERATORS.items():
                    found.extend(Site(*change, name, function, lines, outer) for change in operator(source, child))
            visit(child, function, lines, outer)

    visit(source.tree, "", 0, "")
    return sorted(set(found))


def valid(data: bytes, site: Site) -> bool:
    """Whether the bug changes the source and leaves one that parses."""
    changed = apply(data, [(site.start, site.end, site.text)])
    try:
        return changed != data and bool(syntax.parse(changed))
    except SyntaxError:
        return False


def apply(data: bytes, changes: list[Change]) -> bytes:
    """`data` with each byte range replaced. The ranges must not overlap."""
    for start, end, text in sorted(changes, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data
