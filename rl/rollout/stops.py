"""Where a stop string ends a turn: on the device where one id holds it, else on the host, after the round."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

MOST_STRINGS = 1024  # stop strings whose ids are remembered: callers choose them, and there is no end of those


class StopIds:
    """Ids whose own text holds a stop string, the lowest `most` of each; safe to call from any thread.

    With tags as single tokens nearly every turn ends at one, on the device; where a tag is several tokens there are
    none, and turns end on the host.
    """

    def __init__(self, view: Callable[[list[int]], str], vocab_size: int, *, most: int, remembered: int = MOST_STRINGS):
        self._view, self._vocab_size, self._most, self._remembered = view, vocab_size, most, remembered
        self._lock = threading.Lock()  # guards what is known, and is never held while anybody looks
        self._looking = threading.Lock()  # one caller looks, and those whose strings are new wait
        self._texts: list[str] | None = None  # each id's own: making them takes a second for a large vocabulary
        self._found: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # the string that was asked for last comes last

    def __call__(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Rising ids. Errors: ValueError for an empty string."""
        if any(not s for s in stop):
            raise ValueError(f"generate: got stop={tuple(stop)}, want non-empty strings")
        return tuple(sorted({i for s in stop for i in self._of(s)}))

    def _of(self, string: str) -> tuple[int, ...]:
        known = self._known(string)
        if known is not None:
            return known
        with self._looking:
            known = self._known(string)  # another may have looked meanwhile
            if known is not None:
                return known
            if self._texts is None:
                self._texts = [self._view([i]) for i in range(self._vocab_size)]
            holds = (i for i, text in enumerate(self._texts) if string in text)
            found = tuple(itertools.islice(holds, self._most))
            with self._lock:
                self._found[string] = found
                if len(self._found) > self._remembered:
                    self._found.popitem(last=False)
            return found

    def _known(self, string: str) -> tuple[int, ...] | None:
        with self._lock:
            if string in self._found:
                self._found.move_to_end(string)
            return self._found.get(string)


def first_stop(view: Callable[[list[int]], str], ids: list[int], seen: int, stop: Sequence[str]) -> int | None:
    """Least n > `seen` such that the text of ids[:n] holds a stop string; None if there is none. ids[:seen] is known to
    hold none.
    """
    if not stop or not any(s in view(ids) for s in stop):
        return None
    return next(n for n in range(seen + 1, len(ids) + 1) if any(s in view(ids[:n]) for s in stop))
