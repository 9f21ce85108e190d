"""Where metrics go: `metrics.jsonl`, TensorBoard and one line on the console. Injected; nothing else in rl/ records."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from rl.metrics.alarms import NAMES, WATCHED, Limits, ringing
from rl.types import Mean, Metric

# What the console line shows, label -> metric, those that are there. (tokens a second and phases: see rl/loop.py)
CONSOLE = {
    "success": "episode/success",
    "reward": "episode/reward",
    "turns": "episode/turns",
    "tokens": "episode/tokens",
    "searches": "episode/searches",
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "ref_kl": "policy/ref_kl",
    "gap_max": "policy/engine_gap_max",
    "clip": "policy/clip_frac",
    "stale": "policy/staleness",
    "env_error": "episode/env_error_frac",
    "nll": "sft/nll",
    "loss": "loss",
    "grad": "optim/grad_norm",
    "skipped": "optim/skipped",
    "pad": "batch/pad_frac",
    "tok/s": "time/tokens_per_s",
    "rollout_s": "time/rollout_s",
    "learn_s": "time/learn_s",
    "eval_s": "time/eval_s",
    "eval": "eval/sampled",
    "eval_greedy": "eval/greedy",
}


class Monitor:
    """Sinks of one run. `write` is called by one thread, with host values.

    A run that resumes passes `first_step`, the first step it will write: later records, which the checkpoint does not
    know, are dropped, so that the file reads as if nothing had happened; so is a last line cut short by a crash. By
    default nothing is dropped. With `limits` each record says which alarms ring (`alarm/NAME`, 0 or 1), by all records
    of the run so far, and those that ring have a line on the console each.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        first_step: int | None = None,
        console: Mapping[str, str] = CONSOLE,
        console_every: int = 1,
        stream: TextIO | None = None,
        tensorboard: bool = True,
        limits: Limits | None = None,
    ):
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.exists() and first_step is not None:
            _drop_from(path, first_step)
        self._limits, self._history = limits, _history(path) if limits else []
        self._file = path.open("a")
        self._events = _Events(folder / "tensorboard", first_step) if tensorboard else None
        self._folder, self._broken = folder, False
        self._console, self._console_every, self._stream = console, console_every, stream or sys.stdout
        self._started_s = time.monotonic()

    def write(self, step: int, metrics: Mapping[str, Metric | float]) -> None:
        """Record {"step", "time_s", name: value, "count": {name: count}}; what is not finite is null.

        Errors (OSError): it cannot be written; a run that goes on later drops what is there of it.
        """
        values = {name: _number(getattr(metric, "value", metric)) for name, metric in metrics.items()}
        counts = {name: _number(metric.count) for name, metric in metrics.items() if isinstance(metric, Mean)}
        rung = []
        if self._limits is not None:
            self._history.append({name: values.get(name) for name in WATCHED})
            rung = ringing(self._history, self._limits)
            values |= {f"alarm/{name}": float(any(alarm.name == name for alarm in rung)) for name in NAMES}
        record = {"step": int(step), "time_s": round(time.monotonic() - self._started_s, 3), **values, "count": counts}
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            if self._events is not None:
                self._events.write(step, {name: value for name, value in values.items() if value is not None})
        except OSError as err:
            self._broken = True
            raise OSError(f"{self._folder}: step {step} was not recorded ({err}); is the disk full?") from err
        if step % self._console_every == 0 or step == 1:
            self._stream.write(_line(step, values, self._console) + "\n")
        for alarm in rung:
            self._stream.write(f"step {step:>5} | ALARM {alarm}\n")
        self._stream.flush()

    def close(self) -> None:
        """Flush and close every sink; a second call does nothing. What could not be written was said before."""
        with contextlib.suppress(*[OSError] * self._broken), contextlib.ExitStack() as closing:
            closing.callback(self._file.close)
            if self._events is not None:
                events, self._events = self._events, None
                closing.callback(events.close)


class _Events:
    """Scalars for TensorBoard, written by who calls. The library's SummaryWriter has a thread for it, which ends at the
    first error of the disk; whoever records then waits for it, for ever.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        if purge_step is not None:  # what was shown from there on is void
            self._write(purge_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._write(step, summary=scalar(name, value))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=int(step), **what))


def _number(value: Any) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _line(step: int, values: Mapping[str, float | None], console: Mapping[str, str]) -> str:
    shown = [(label, values[name]) for label, name in console.items() if name in values]
    parts = [f"{label} {'-' if value is None else format(value, '.3g')}" for label, value in shown]
    return " | ".join([f"step {step:>5}", *parts])


def _history(path: Path) -> list[dict[str, float | None]]:
    """What the alarms watch of the records that are in the file already."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [{name: record.get(name) for name in WATCHED} for record in map(json.loads, lines)]


def _drop_from(path: Path, first_step: int) -> None:
    """Keep the whole records of steps before `first_step`; the file is replaced in one move."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a line that a crash cut short, or what follows it: not a record
            continue
        if record["step"] < first_step:
            kept.append(line + "\n")
    fresh = path.with_suffix(".jsonl.tmp")
    fresh.write_text("".join(kept))
    fresh.replace(path)
