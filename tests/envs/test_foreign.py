"""Foreign data come in as tasks; a fault ends in one clear error that names the place."""

import json

import pytest

from envs.base import Message
from envs.dataset import DatasetError
from envs.foreign import tasks_from_file, tasks_from_tfds


@pytest.fixture
def foreign(tmp_path):
    """A dataset as somebody else would have prepared it: nested answers, shuffled."""
    import tensorflow_datasets as tfds

    text = tfds.features.Text

    class TinyQa(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("2.0.0")
        code_path = None

        def _info(self):
            answer = {"aliases": tfds.features.Sequence(text()), "value": text()}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"question": text(), "answer": answer})
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(8):
                yield i, {"question": f"q{i} ü", "answer": {"aliases": [f"a{i}", "A"], "value": f"v{i}"}}

    TinyQa(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    return tmp_path


def test_foreign_tfds(foreign):
    tasks = tasks_from_tfds("tiny_qa", foreign, "train", "question", "answer/aliases")
    found = {task.prompt[0].content: task.data["answers"] for task in tasks}
    assert found == {f"q{i} ü": [f"a{i}", "A"] for i in range(8)}
    assert tasks[0] == tasks[-8] and tasks[0].task_id == "tiny_qa/train/0" and tasks[0].family == "tiny_qa"
    values = tasks_from_tfds("tiny_qa", foreign, "train[:50%]", "question", "answer/value")
    assert len(values) == 4 and values[0].data["answers"][0].startswith("v")


@pytest.mark.parametrize(
    "change, match",
    [
        ({"name": "other_qa"}, "no dataset 'other_qa'; prepare it there"),
        ({"split": "dev"}, "split 'dev' cannot be read"),
        ({"question_key": "query"}, r"no feature 'query' \('query' not in 'answer', 'question'\); set the key"),
        ({"answers_key": "answer/best"}, r"no feature 'answer/best'"),
    ],
)
def test_foreign_tfds_faults(foreign, change, match):
    request = {"name": "tiny_qa", "split": "train", "question_key": "question", "answers_key": "answer/value"} | change
    with pytest.raises(DatasetError, match=match):
        tasks_from_tfds(data_dir=foreign, **request)


def test_jsonl(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [
        {"q": "1+1 ?", "a": 2, "level": 1},
        {"q": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "a": ["x", "y"]},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    first, second = tasks_from_file(path, "q", "a", split="test")
    assert first.data == {"answers": ["2"], "row": {"level": 1}} and first.prompt == (Message("user", "1+1 ?"),)
    assert second.prompt == (Message("system", "s"), Message("user", "u")) and second.data["answers"] == ["x", "y"]
    assert (first.task_id, first.family, first.split) == ("sums/test/0", "sums", "test") and first.seed != second.seed


def test_parquet_equals_jsonl(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"q": f"q{i}", "a": ["x", str(i)]} for i in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f.parquet")
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert tasks_from_file(tmp_path / "f.parquet", "q", "a") == tasks_from_file(tmp_path / "f.jsonl", "q", "a")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DatasetError, match=r"bad\.parquet: no readable parquet file"):
        tasks_from_file(tmp_path / "bad.parquet", "q", "a")


@pytest.mark.parametrize(
    "content, match",
    [
        ('{"q": "a", "a": "b"}\n{"q": }\n', r"line 2: no JSON"),
        ('{"q": "a", "a": "b"}\n[1]\n', r"line 2: got a list, wanted a JSON object"),
        ('{"q": "a", "answer": "b"}\n', r"line 1: no column 'a', found 'q', 'answer'; set the key"),
        ('{"q": "a", "a": []}\n', r"line 1: got prompt 'a' with answers \[\]; wanted both"),
        ('{"q": "a", "a": ""}\n', r"line 1: got prompt 'a' with answers \[''\]"),
        ('{"q": "a", "a": " "}\n', r"line 1: got prompt 'a' with answers \[' '\]"),
        ('{"q": "a", "a": {"text": ["1"]}}\n', r"line 1: got answers .*'text'.* wanted texts or numbers"),
        ('{"q": "a", "a": [null]}\n', r"line 1: got answers \[None\], wanted texts or numbers"),
        ('{"q": "a", "a": [NaN]}\n', r"line 1: got answers \[nan\], wanted texts or numbers"),
        ('{"q": "a", "a": [["b"]]}\n', r"line 1: got answers .* wanted texts or numbers"),
        ('{"q": {"text": "a"}, "a": "b"}\n', r"line 1: got a prompt .* wanted a text or a list"),
        ('{"q": [{"role": "user"}], "a": "b"}\n', r"line 1: got a prompt .* wanted a text or a list"),
        (
            '{"q": [{"role": "developer", "content": "c"}], "a": "b"}\n',
            r"line 1: got a prompt .* the role one of system",
        ),
        ('{"q": [{"role": "user", "content": [{"type": "text"}]}], "a": "b"}\n', r"the content a text"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, match):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DatasetError, match=match):
        tasks_from_file(path, "q", "a")


def test_missing_file_and_unknown_ending(tmp_path):
    with pytest.raises(DatasetError, match=r"none\.jsonl: no such file"):
        tasks_from_file(tmp_path / "none.jsonl", "q", "a")
    with pytest.raises(DatasetError, match=r"got ending '\.csv', wanted one of \.jsonl, \.parquet"):
        tasks_from_file(tmp_path / "x.csv", "q", "a")
