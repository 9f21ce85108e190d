"""Foreign data as tasks: a prepared TFDS dataset of (question, answers), or rows of a .jsonl or .parquet file.

tensorflow_datasets and pyarrow are imported where they are used: importing this module stays cheap.
"""

import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.base import Message, Task
from envs.dataset import DatasetError, Decoded, as_text

ROLES = ("system", "user", "assistant", "tool")


def tasks_from_tfds(
    name: str,
    data_dir: str | os.PathLike,
    split: str,
    question_key: str,
    answers_key: str,
) -> Sequence[Task]:
    """A prepared foreign TFDS dataset as tasks, read lazily; keys may be paths into nested features: "answer/aliases".

    `split` may be any TFDS split text, "train[:10%]". Raises DatasetError for a missing dataset, split or key.
    """
    import tensorflow_datasets as tfds

    folder = pathlib.Path(data_dir)
    try:
        builder = tfds.builder(name, data_dir=folder)
        source = builder.as_data_source(split=split)
    except tfds.core.DatasetNotFoundError as error:
        raise DatasetError(f"{folder / name}: no dataset {name!r}; prepare it there, or set data_dir") from error
    except (ValueError, FileNotFoundError, NotImplementedError, AttributeError) as error:
        remedy = "prepare it with file_format='array_record'"
        raise DatasetError(f"{folder / name}: split {split!r} cannot be read ({error}); {remedy}") from error
    tasks = _ForeignTasks(source, name, question_key, answers_key, split.split("[")[0])
    if len(tasks):
        tasks[0]  # a wrong key ends here, not in the middle of a run
    return tasks


def tasks_from_file(
    path: str | os.PathLike, prompt_key: str, answers_key: str, *, split: str = "train"
) -> Sequence[Task]:
    """Rows of a .jsonl or .parquet file as tasks; a prompt is a text or a list of {"role", "content"}.

    Answers may be one text or number, or a list of them. Other columns go to `data["row"]`, for a reward function.
    Raises DatasetError for a missing file, an unknown ending, a missing column, and a line that is no JSON object.
    """
    path = pathlib.Path(path)
    if path.suffix not in _READ_ROWS:
        raise DatasetError(
            f"{path}: got ending {path.suffix!r}, wanted one of {', '.join(_READ_ROWS)}; convert the file"
        )
    if not path.is_file():
        raise DatasetError(f"{path}: no such file; check the path")
    tasks = []
    for place, row in _READ_ROWS[path.suffix](path):
        for key in (prompt_key, answers_key):
            if key not in row:
                raise DatasetError(f"{place}: no column {key!r}, found {', '.join(map(repr, row))}; set the key")
        rest = {key: value for key, value in row.items() if key not in (prompt_key, answers_key)}
        task_id = f"{path.stem}/{split}/{len(tasks)}"
        tasks.append(_foreign_task(task_id, path.stem, split, row[prompt_key], row[answers_key], rest, place))
    return tasks


class _ForeignTasks(Decoded):
    def __init__(self, source: Sequence[Any], name: str, question_key: str, answers_key: str, split: str):
        super().__init__(source)
        self._name, self._keys, self._split = name, (question_key, answers_key), split

    def _decode(self, record: Any, index: int) -> Task:
        place = f"{self._name}/{self._split}, record {index}"
        question, answers = (_walk(record, key, place) for key in self._keys)
        task_id = f"{self._name}/{self._split}/{index}"
        return _foreign_task(task_id, self._name, self._split, question, answers, {}, place)


def _walk(record: Any, key: str, place: str) -> Any:
    node = record
    for part in key.split("/"):
        if not isinstance(node, Mapping) or part not in node:
            found = ", ".join(map(repr, node)) if isinstance(node, Mapping) else f"a {type(node).__name__}"
            raise DatasetError(f"{place}: no feature {key!r} ({part!r} not in {found}); set the key")
        node = node[part]
    return node


def _foreign_task(
    task_id: str, family: str, split: str, prompt: Any, answers: Any, row: Mapping[str, Any], place: str
) -> Task:
    answers = _listed(answers, place)
    if isinstance(prompt, list):
        if not all(isinstance(turn, dict) and _is_message(turn) for turn in prompt):
            raise DatasetError(
                f"{place}: got a prompt {prompt!r:.80}, wanted a text or a list of {{role, content}}, the role one of "
                f"{', '.join(ROLES)} and the content a text"
            )
        messages = tuple(Message(turn["role"], turn["content"]) for turn in prompt)
    elif isinstance(prompt, dict):
        raise DatasetError(f"{place}: got a prompt {prompt!r:.80}, wanted a text or a list of {{role, content}}")
    else:
        messages = (Message("user", as_text(prompt)),)
    if not messages or prompt is None or not all(a.strip() for a in answers or [""]):
        raise DatasetError(f"{place}: got prompt {prompt!r:.80} with answers {answers}; wanted both; drop the row")
    data: dict[str, Any] = {"answers": answers}
    if row:
        data["row"] = json.loads(json.dumps(dict(row), default=as_text))
    seed = int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=4).digest(), "little") >> 1
    return Task(task_id, family, split, seed, messages, data)


def _is_message(turn: dict[str, Any]) -> bool:
    return turn.get("role") in ROLES and isinstance(turn.get("content"), str)


def _listed(answers: Any, place: str) -> list[str]:
    if hasattr(answers, "tolist"):  # NumPy arrays and scalars
        answers = answers.tolist()
    if answers is None:
        return []
    listed = answers if isinstance(answers, list | tuple) else [answers]
    if not all(isinstance(a, str | bytes | int) or (isinstance(a, float) and math.isfinite(a)) for a in listed):
        raise DatasetError(
            f"{place}: got answers {answers!r:.80}, wanted texts or numbers, or a list of them; set the key"
        )
    return [as_text(answer) for answer in listed]


def _jsonl_rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{path}, line {number}: no JSON ({error}); correct or delete the line") from error
            if not isinstance(row, dict):
                raise DatasetError(f"{path}, line {number}: got a {type(row).__name__}, wanted a JSON object")
            yield f"{path}, line {number}", row


def _parquet_rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: no readable parquet file ({error}); write it again") from error
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))


_READ_ROWS = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
