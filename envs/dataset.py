"""Tasks and demonstrations as tensorflow-datasets, built and read without TensorFlow.

A dataset is the usual TFDS folder `data_dir/name/version` in array_record format (so `tfds.data_source(name,
data_dir=...)` reads it, too), plus a manifest with the options that made it and a checksum per file. Opening checks
the manifest first: a stale, cut or altered dataset ends with one DatasetError that names the file and the remedy,
before any compute.

tensorflow_datasets is imported where it is used: importing this module stays cheap.
"""

import contextlib
import dataclasses
import errno
import hashlib
import io
import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from envs.base import Message, Task

VERSION = "1.0.0"  # of the record layouts below: raise it when one changes
MANIFEST = "manifest.json"


class DatasetError(ValueError):
    """A dataset is missing, stale or damaged; the message names the file and the remedy."""


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One scripted episode: `steps` are (action, observation after it), oldest first."""

    episode_id: str
    task: Task
    steps: tuple[tuple[str, str], ...]
    success: bool
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON-serialisable


def task_to_json(task: Task) -> str:
    """One line; `task_from_json` gives an equal task back (lists in `data` stay lists)."""
    return json.dumps(dataclasses.asdict(task), ensure_ascii=False, sort_keys=True)


def task_from_json(text: str | bytes) -> Task:
    """Inverse of `task_to_json`."""
    fields = json.loads(text)
    return Task(**fields | {"prompt": tuple(Message(**message) for message in fields["prompt"])})


class Decoded(Sequence):
    """Random access over a source of records; each is decoded when it is looked up."""

    def __init__(self, data_source: Sequence[Mapping[str, Any]]):
        self._records = data_source

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} out of range for {len(self)} records")
        index %= len(self)
        return self._decode(self._records[index], index)


class TaskSource(Decoded):
    """Sequence[Task] over any random-access source of records with a "task" field, as `build_tasks` writes them."""

    def _decode(self, record: Mapping[str, Any], index: int) -> Task:
        return task_from_json(record["task"])


class DemonstrationSource(Decoded):
    """Sequence[Demonstration] over any random-access source of records as `build_demonstrations` writes them."""

    def _decode(self, record: Mapping[str, Any], index: int) -> Demonstration:
        steps = tuple((as_text(step["action"]), as_text(step["observation"])) for step in record["steps"])
        task, facts = task_from_json(record["task"]), json.loads(record["facts"])
        return Demonstration(as_text(record["episode_id"]), task, steps, bool(record["success"]), facts)


def is_built(folder: str | os.PathLike, name: str) -> bool:
    """Whether a dataset of this VERSION lies in `folder`, complete; what is in it, only opening it checks."""
    return (pathlib.Path(folder) / name / VERSION / MANIFEST).is_file()


def build_tasks(
    tasks_by_split: Mapping[str, Iterable[Task]],
    data_dir: str | os.PathLike,
    *,
    name: str = "wayfinder_tasks",
    options: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """Write tasks as a TFDS dataset, in their order; gives its folder. `options`: what made them, checked on opening.

    Built beside its place and renamed into it when complete. Where an equal dataset lies there already, it stays
    untouched: somebody may be reading it. Raises ValueError for a split without tasks.
    """
    import tensorflow_datasets as tfds

    features = {"task_id": tfds.features.Text(), "family": tfds.features.Text(), "task": tfds.features.Text()}
    rows = {
        split: [{"task_id": task.task_id, "family": task.family, "task": task_to_json(task)} for task in tasks]
        for split, tasks in tasks_by_split.items()
    }
    return _build(rows, features, pathlib.Path(data_dir), name, options or {})


def read_tasks(
    data_dir: str | os.PathLike, split: str, *, name: str = "wayfinder_tasks", options: Mapping[str, Any] | None = None
) -> TaskSource:
    """Open what `build_tasks` wrote. With `options`, refuses a dataset made with others. Raises DatasetError."""
    return TaskSource(_open(pathlib.Path(data_dir), split, name, options))


def build_demonstrations(
    demonstrations_by_split: Mapping[str, Iterable[Demonstration]],
    data_dir: str | os.PathLike,
    *,
    name: str = "wayfinder_demonstrations",
    options: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    """As `build_tasks`; a record has episode_id, family, success, the task and facts as JSON, and nested `steps`."""
    import numpy as np
    import tensorflow_datasets as tfds

    text = tfds.features.Text
    features = {
        "episode_id": text(),
        "family": text(),
        "success": tfds.features.Scalar(dtype=np.bool_),
        "task": text(),
        "facts": text(),
        "steps": tfds.features.Dataset({"action": text(), "observation": text()}),
    }
    rows = {split: [_demonstration_row(demo) for demo in demos] for split, demos in demonstrations_by_split.items()}
    return _build(rows, features, pathlib.Path(data_dir), name, options or {})


def read_demonstrations(
    data_dir: str | os.PathLike,
    split: str,
    *,
    name: str = "wayfinder_demonstrations",
    options: Mapping[str, Any] | None = None,
) -> DemonstrationSource:
    """Open what `build_demonstrations` wrote; errors as `read_tasks`."""
    return DemonstrationSource(_open(pathlib.Path(data_dir), split, name, options))


def _demonstration_row(demo: Demonstration) -> dict[str, Any]:
    return {
        "episode_id": demo.episode_id,
        "family": demo.task.family,
        "success": demo.success,
        "task": task_to_json(demo.task),
        "facts": json.dumps(dict(demo.facts), ensure_ascii=False, sort_keys=True),
        "steps": [{"action": action, "observation": observation} for action, observation in demo.steps],
    }


def _build(
    rows_by_split: Mapping[str, Sequence[Mapping[str, Any]]],
    features: Mapping[str, Any],
    data_dir: pathlib.Path,
    name: str,
    options: Mapping[str, Any],
) -> pathlib.Path:
    import tensorflow_datasets as tfds

    empty = [split for split, rows in rows_by_split.items() if not rows]
    if empty or not rows_by_split:
        raise ValueError(f"dataset {name}: got no records for {empty or 'any split'}, wanted at least one a split")

    dataset_name, version = name, VERSION

    class Records(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = dataset_name
        VERSION = tfds.core.Version(version)
        code_path = None  # no checksums of downloads lie beside this file; looking for them needs one more package

        def _info(self):
            # order kept: it is part of the data (a seed addresses tasks by place)
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(rows) for split, rows in rows_by_split.items()}

        def _generate_examples(self, rows) -> Iterator[tuple[int, Mapping[str, Any]]]:
            yield from enumerate(rows)

    data_dir.mkdir(parents=True, exist_ok=True)
    target = data_dir / name / VERSION
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=data_dir) as temporary:
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS reports a download; there is none
            Records(data_dir=temporary, file_format="array_record").download_and_prepare()
        built = pathlib.Path(temporary) / name / VERSION
        files = {path.name: _checksum(path) for path in sorted(built.iterdir())}
        counts = {split: len(rows) for split, rows in rows_by_split.items()}
        manifest = {"version": VERSION, "options": _as_json(options), "counts": counts, "files": files}
        (built / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), "utf-8")
        _put(built, target, manifest, pathlib.Path(temporary))
    return target


def _put(built: pathlib.Path, target: pathlib.Path, manifest: Mapping[str, Any], temporary: pathlib.Path) -> None:
    """Rename `built` to `target`, unless an equal dataset is there; any other that is there goes to `temporary`.

    Others may do the same at the same time: of equal datasets the first stays.
    """
    target.parent.mkdir(exist_ok=True)
    for attempt in itertools.count():
        try:
            os.rename(built, target)
            return
        except OSError as error:  # a folder cannot be renamed onto a full one
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _is_equal(target, manifest):
            return
        with contextlib.suppress(FileNotFoundError):  # somebody else has just taken it away
            os.rename(target, temporary / f"replaced-{attempt}")


def _is_equal(folder: pathlib.Path, manifest: Mapping[str, Any]) -> bool:
    """Whether `folder` holds just what `manifest` lists, none of it missing or damaged."""
    try:
        if json.loads((folder / MANIFEST).read_text("utf-8")) != manifest:
            return False
        return all(_checksum(folder / file) == wanted for file, wanted in manifest["files"].items())
    except (OSError, ValueError):
        return False


def _open(
    data_dir: pathlib.Path, split: str, name: str, options: Mapping[str, Any] | None
) -> Sequence[Mapping[str, Any]]:
    import tensorflow_datasets as tfds

    folder = data_dir / name / VERSION
    remedy = f"delete {folder} and build it again"
    manifest = _manifest(folder, name, remedy)
    if options is not None and manifest["options"] != _as_json(options):
        got, wanted = manifest["options"], _as_json(options)
        changed = sorted(key for key in got | wanted if got.get(key) != wanted.get(key))
        shown = "; ".join(f"{key}: got {got.get(key)!r}, wanted {wanted.get(key)!r}" for key in changed)
        raise DatasetError(
            f"{folder / MANIFEST}: made with other options ({shown}); {remedy}, or ask for those options"
        )
    for file, (size, digest) in manifest["files"].items():
        path = folder / file
        if not path.is_file():
            raise DatasetError(f"{path}: missing, wanted {size} bytes; {remedy}")
        if path.stat().st_size != size:
            raise DatasetError(f"{path}: got {path.stat().st_size} bytes, wanted {size} (cut short?); {remedy}")
        if _checksum(path)[1] != digest:
            raise DatasetError(f"{path}: content differs from what was written (checksum); {remedy}")
    if split not in manifest["counts"]:
        raise DatasetError(f"{folder}: got split {split!r}, wanted one of {', '.join(sorted(manifest['counts']))}")
    return tfds.builder_from_directory(folder).as_data_source(split=split)


def _manifest(folder: pathlib.Path, name: str, remedy: str) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        others = sorted(other.name for other in folder.parent.glob("*") if other.is_dir() and other != folder)
        found = f"found only version {', '.join(others)}" if others else "nothing there"
        raise DatasetError(f"{path}: missing, wanted dataset {name} version {VERSION}, {found}; build it first")
    try:
        manifest = json.loads(path.read_text("utf-8"))
        counts, files, options = manifest["counts"], manifest["files"], manifest["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{path}: no readable manifest ({error!r}); {remedy}") from error
    if manifest.get("version") != VERSION:
        raise DatasetError(f"{path}: got version {manifest.get('version')!r}, wanted {VERSION}; {remedy}")
    return {"counts": counts, "files": files, "options": options}


def _checksum(path: pathlib.Path) -> list:
    content = path.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


def _as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(options)))  # tuples as lists, so that written and asked options compare


def as_text(value: Any) -> str:
    """A text feature as TFDS reads it: bytes are UTF-8."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
