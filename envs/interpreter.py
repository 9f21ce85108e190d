"""One interpreter, many threads.

A thread that waits for the interpreter lock wakes once every switch interval to ask for it (CPython with that lock). A
thousand that wait at the default of 5 ms cost more CPU by waking than by what they wait to do.
"""

import contextlib
import sys
from collections.abc import Iterator

MOST_WAKES = 20_000  # a second, of all threads together
DEFAULT_S = 0.005  # CPython's


def switch_interval_s(threads: int) -> float:
    """max(5 ms, threads / 20,000): 5 ms for up to 100 threads, 50 ms for 1,000."""
    return max(DEFAULT_S, threads / MOST_WAKES)


@contextlib.contextmanager
def shared_by(threads: int) -> Iterator[None]:
    """So many threads may wait for the interpreter for as long as the block runs."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(max(before, switch_interval_s(threads)))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
