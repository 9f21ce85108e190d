"""Python's parser, in one thread at a time. CPython (3.11 at least) counts how deep it is for all threads together: one
that comes in while a tree is made leaves the other with "AST constructor recursion depth mismatch".
"""

import ast
import threading
from typing import Any

_LOCK = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """`ast.parse`. Raises as that: SyntaxError, ValueError, RecursionError, MemoryError."""
    with _LOCK:
        return ast.parse(source)


def literal(text: str) -> Any:
    """`ast.literal_eval`. Raises as that."""
    with _LOCK:
        return ast.literal_eval(text)
