"""What a world's failure was: the infrastructure's, or of the task's own data; and by what it is known again.

| kind | what it was |
|---|---|
| `infrastructure` | a hang, a deadline, a lost process or connection, no memory, a system call that failed |
| `data` | anything else: the world raised, or answered garbage; if it does so again on a fresh world, it always does |

Does not cover: a task that always takes its world's process down or always hangs; it counts as infrastructure. A
client's error that is no OSError (an HTTP status in its text, say) is data, whatever its number: raise EnvLost from it.
"""

import concurrent.futures
import multiprocessing
import pathlib
import re
import subprocess
import traceback
from collections.abc import Iterator

from envs.base import EnvLost

INFRASTRUCTURE, DATA = "infrastructure", "data"
_LOST = (
    *(EnvLost, OSError, MemoryError, EOFError, subprocess.TimeoutExpired, multiprocessing.ProcessError),
    concurrent.futures.BrokenExecutor,
)
# System calls that failed for the name they were given: it is the task's, and another try gives it again.
_NAMED = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
# What differs from run to run of one failure: addresses and other hexadecimal ids, paths, numbers.
_VARIES = re.compile(r"0x[0-9a-fA-F]+|(?:/[\w.+-]+){2,}/?|\b[0-9a-f]*[0-9][0-9a-f]{7,}\b|\d+(?:\.\d+)?")
_SIGNATURE_CHARS = 200
_LOOKED_AT_CHARS = 1000  # of a text for what varies: the pattern takes quadratic time, and holds up every thread
_MOST_CHARS = 4000  # of an error's text: a world may quote all that it was told


def kind_of(error: BaseException) -> str:
    """`INFRASTRUCTURE` or `DATA`, by the types of the error and of what caused it."""
    lost = any(isinstance(each, _LOST) and not isinstance(each, _NAMED) for each in causes(error))
    return INFRASTRUCTURE if lost else DATA


def signature_of(error: BaseException) -> str:
    """Type and text of its first cause, without what varies: the same failure has the same signature again."""
    *_, root = causes(error)
    return f"{type(root).__name__}: {stable(said(root))}"


def stable(text: str) -> str:
    """`text` with each address, path and number as `#`, cut to 200 characters."""
    return _VARIES.sub("#", text[:_LOOKED_AT_CHARS])[:_SIGNATURE_CHARS]


def said(error: BaseException) -> str:
    """Its text, fit to be stored; a world's error may fail even at that."""
    try:
        return _storable(str(error))
    except BaseException as err:  # whatever it is, it is the world's
        return f"(no text: {type(err).__name__})"


def placed(error: BaseException) -> str:
    """Its type and text, and where it was raised: file, line and what stands there."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}: {said(error)}{_storable(where)}"


def _storable(text: str) -> str:
    """Of bounded length, and without the halves of surrogate pairs that names of files are decoded to."""
    return text[:_MOST_CHARS].encode("utf-8", "replace").decode()


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on; each once."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is before for before in seen):
        seen.append(each)
        yield each
        each = each.__cause__
