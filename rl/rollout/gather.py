"""What several threads ask at once, as one call."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class Gathered:
    """`self(item)` is `of([item])[0]`: while one call runs, whoever comes waits and is in the next, with all others.

    `of` must give an item the same answer whatever stands beside it. What it raises is raised in each thread of that
    call. Nobody waits for company.
    """

    def __init__(self, of: Callable[[Sequence[Any]], Sequence[Any]]):
        self._of = of
        self._changed = threading.Condition()  # guards the two below
        self._waiting: list[tuple[Any, Future]] = []
        self._busy = False

    def __call__(self, item: Any) -> Any:
        own: Future = Future()
        with self._changed:
            self._waiting.append((item, own))
            self._changed.wait_for(lambda: own.done() or not self._busy)
            if own.done():
                return own.result()
            self._busy, some, self._waiting = True, self._waiting, []
        try:
            answers = list(self._of([asked for asked, _ in some]))
            if len(answers) != len(some):
                raise ValueError(f"got {len(answers)} answers, want {len(some)}, one for each that asked")
            for (_, future), answer in zip(some, answers, strict=True):
                future.set_result(answer)
        except BaseException as error:
            for _, future in some:
                future.set_exception(error)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return own.result()
