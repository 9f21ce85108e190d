"""Who did what when: spans of time on tracks, one for each thread that is watched, as a trace and as shares.

A recorder is `span(name, began_s, ended_s)`, in monotonic seconds; `unrecorded` is that of a run that keeps none.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Recorder = Callable[[str, float, float], None]


class Span(NamedTuple):
    name: str
    began_s: float
    ended_s: float


def unrecorded(name: str, began_s: float, ended_s: float) -> None:
    """Keeps nothing."""


class Timeline:
    """The newest `most` spans of each track; each track is written by one thread, its spans one after another."""

    def __init__(self, most: int = 500_000):
        self._most = most
        self._tracks: dict[str, deque[Span]] = {}

    def track(self, name: str) -> Recorder:
        """The recorder of a track."""
        spans = self._tracks.setdefault(name, deque(maxlen=self._most))
        return lambda *span: spans.append(Span(*span))

    def spans(self, name: str) -> list[Span]:
        """Those of a track, in the order in which they ended."""
        return list(self._tracks.get(name, ()))

    def write(self, path: Path) -> None:
        """A trace in the Chrome format, for ui.perfetto.dev or chrome://tracing: a thread each track, time from the
        first span on.
        """
        tracks = {name: self.spans(name) for name in self._tracks}
        start = min((span.began_s for spans in tracks.values() for span in spans), default=0.0)
        events: list[dict[str, Any]] = []
        for tid, (track, spans) in enumerate(tracks.items()):
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": track}})
            for name, began, ended in spans:
                at = {"ts": round(1e6 * (began - start), 1), "dur": round(1e6 * (ended - began), 1)}
                events.append({"ph": "X", "name": name, "pid": 0, "tid": tid, **at})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def shares(timeline: Timeline, *, idle: str = "idle", waits: str = "rollout") -> dict[str, dict[str, float]]:
    """By the spans of "learner" and "engine", from the learner's first to its last:

    `learner`, `engine`: of the wall time, by phase; `engine_idle`: of each of the learner's phases, the share in which
    the engine was `idle`; `learner_idle`: of each thing that the engine does, the share in which the learner `waits`.
    """
    learner, engine = timeline.spans("learner"), timeline.spans("engine")
    if not learner:
        return {}
    first, last = learner[0].began_s, learner[-1].ended_s
    phases, work = _by_name(learner, first, last), _by_name(engine, first, last)

    def of_wall(spans: dict[str, list[Span]]) -> dict[str, float]:
        return {name: _seconds(own) / (last - first) for name, own in spans.items()}

    def within(spans: dict[str, list[Span]], others: list[Span]) -> dict[str, float]:
        return {name: _shared_s(own, others) / _seconds(own) for name, own in spans.items() if _seconds(own)}

    return {
        "learner": of_wall(phases),
        "engine": of_wall(work),
        "engine_idle": within(phases, work.get(idle, [])),
        "learner_idle": within(work, phases.get(waits, [])),
    }


def _by_name(spans: Sequence[Span], first: float, last: float) -> dict[str, list[Span]]:
    """The parts of them within [first, last], by name."""
    found: dict[str, list[Span]] = defaultdict(list)
    for name, began, ended in spans:
        if ended > first and began < last:
            found[name].append(Span(name, max(began, first), min(ended, last)))
    return dict(found)


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.ended_s - span.began_s for span in spans)


def _shared_s(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Seconds that lie in a span of both; each in order, and without overlaps of its own."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i].ended_s, b[j].ended_s) - max(a[i].began_s, b[j].began_s))
        if a[i].ended_s < b[j].ended_s:
            i += 1
        else:
            j += 1
    return total
