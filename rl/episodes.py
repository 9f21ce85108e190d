"""Every finished episode, kept: `workdir/episodes/00000012.array_record` holds what step 12 finished, in order; of
several processes, number p > 0 writes its own into `00000012.p.array_record`.

An array_record file can be read only once it is closed, so there is one file a step: a crash loses the step that was
being written, never an earlier one. A resumed run writes a step again under the same name, which replaces it.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from rl.types import Trajectory

_SUFFIX = ".array_record"


class EpisodeLog:
    """The writer of `workdir/folder`. `append` may be called from any thread.

    `process` is this one's number among those of the run. A run that resumes passes `first_step`, the first step it
    will write: what is there of later steps is dropped, of every process. It is of another history, which may have come
    further, with more processes.
    Does not cover: two runs that write one folder (the workdir's lock sees to it).
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        folder: str = "episodes",
        process: int = 0,
        first_step: int | None = None,
    ):
        self._folder, self._part = Path(workdir) / folder, f".{process}" if process else ""
        self._folder.mkdir(parents=True, exist_ok=True)
        if process == 0:  # no other writes here before all of them have agreed on a batch
            for leftover in self._folder.glob("*.tmp"):  # of one that was killed: unreadable without its footer
                leftover.unlink()
            for step, path in _files(self._folder):
                if first_step is not None and step >= first_step:
                    path.unlink()
        self._lock = threading.Lock()
        self._writer: ArrayRecordWriter | None = None
        self._closed = False

    @property
    def _open_file(self) -> Path:
        return self._folder / f"open{self._part}{_SUFFIX}.tmp"

    def append(self, trajectory: Trajectory) -> None:
        """Adds one finished episode to the step that is open. Errors: a closed log."""
        data = trajectory.to_bytes()
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._folder}: the episode log is closed; append before close()")
            if self._writer is None:
                # group_size:1 makes each episode readable alone, for play and for the page that shows one.
                self._writer = ArrayRecordWriter(str(self._open_file), "group_size:1")
            self._writer.write(data)

    def end_step(self, step: int) -> None:
        """Closes the file of `step`: from now on its episodes can be read. A step without episodes leaves no file.

        Errors (OSError): they could not be written, and are gone.
        """
        with self._lock:
            self._finish(step)

    def close(self) -> None:
        """Closes the log; episodes of a step that was not ended are kept under the number after the last."""
        with self._lock:
            if not self._closed:
                self._finish(max((step for step, _ in _files(self._folder)), default=-1) + 1)
                self._closed = True

    def __enter__(self) -> "EpisodeLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _finish(self, step: int) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            writer.close()
        except Exception as err:  # the C++ side raises several types
            raise OSError(f"{self._open_file}: step {step} was not written ({err}); is the disk full?") from err
        os.replace(self._open_file, self._folder / f"{step:08d}{self._part}{_SUFFIX}")


def read_episodes(
    workdir: str | os.PathLike, *, folder: str = "episodes", first: int = 0, last: int | None = None
) -> Iterator[Trajectory]:
    """Episodes of the steps `first..last` (inclusive; None = all), by step, process, and in the order they finished.

    Memory: one file's worth of bytes at a time. Errors: no such folder, a damaged file (its name is in the message).
    """
    folder_path = Path(workdir) / folder
    if not folder_path.is_dir():
        raise ValueError(f"{folder_path}: no episodes there; want the workdir of a run")
    for step, path in _files(folder_path):
        if step >= first and (last is None or step <= last):
            for data in _records(path):
                try:
                    yield Trajectory.from_bytes(data)
                except ValueError as err:
                    raise ValueError(f"{path}: {err}") from err


def _files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of every file of finished steps, by step and process."""
    found = [(of, path) for path in folder.iterdir() if (of := _step_and_process(path))]
    return [(step, path) for (step, _), path in sorted(found)]


def _step_and_process(path: Path) -> tuple[int, int] | None:
    """(12, 0) of 00000012.array_record, (12, 3) of 00000012.3.array_record; None of any other file."""
    step, _, process = path.name.removesuffix(_SUFFIX).partition(".")
    if not path.name.endswith(_SUFFIX) or not step.isdecimal() or not (process or "0").isdecimal():
        return None
    return int(step), int(process or 0)


def _records(path: Path) -> list[bytes]:
    try:
        reader = ArrayRecordReader(str(path))
        try:
            return reader.read_all()
        finally:
            reader.close()
    except Exception as err:  # the C++ side raises several types for a cut or altered file
        raise ValueError(f"{path}: damaged ({err}); move it away to read the other steps") from err
