"""Where a stop string ends a turn: on the device where one id holds it, else on the host, after the round."""

import threading
from collections.abc import Callable, Sequence


class StopIds:
    """Ids whose own text holds a stop string, by stop strings; safe to call from any thread.

    With tags as single tokens nearly every turn ends at one, on the device; where a tag is several tokens there are
    none, and turns end on the host.
    """

    def __init__(self, view: Callable[[list[int]], str], vocab_size: int):
        self._view, self._vocab_size = view, vocab_size
        self._lock = threading.Lock()  # one caller looks and the others wait: a large vocabulary takes a second
        self._found: dict[tuple[str, ...], tuple[int, ...]] = {}

    def __call__(self, stop: tuple[str, ...]) -> tuple[int, ...]:
        """Errors: ValueError for an empty string."""
        if not stop:
            return ()
        if any(not s for s in stop):
            raise ValueError(f"generate: got stop={stop}, want non-empty strings")
        with self._lock:
            if stop not in self._found:
                texts = (self._view([i]) for i in range(self._vocab_size))
                self._found[stop] = tuple(i for i, text in enumerate(texts) if any(s in text for s in stop))
            return self._found[stop]


def first_stop(view: Callable[[list[int]], str], ids: list[int], seen: int, stop: Sequence[str]) -> int | None:
    """Least n > `seen` such that the text of ids[:n] holds a stop string; None if there is none. ids[:seen] is known to
    hold none.
    """
    if not stop or not any(s in view(ids) for s in stop):
        return None
    return next(n for n in range(seen + 1, len(ids) + 1) if any(s in view(ids[:n]) for s in stop))
