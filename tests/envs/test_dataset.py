"""Tasks and demonstrations come back from TFDS as they went in, without TensorFlow; a fault ends in one clear error."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from envs import dataset
from envs.base import Message, Task
from envs.dataset import DatasetError, Demonstration


def _task(i, split="train"):
    data = {"answers": [f"é{i}", "b"], "chain": [{"title": "T", "page": i}], "hops": 1}
    return Task(f"t/{split}/{i}", "hop1", split, 2**31 - 1 - i, (Message("user", f"Wo ? {i}"),), data, i / 3)


@pytest.fixture
def tasks():
    return {"train": [_task(i) for i in range(12)], "test": [_task(i, "test") for i in range(3)]}


@pytest.fixture
def built(tasks, tmp_path):
    dataset.build_tasks(tasks, tmp_path, options={"seed": 1, "mix": (0.5, 0.5)})
    return tmp_path


def test_tasks_come_back_equal_and_in_order(built, tasks):
    source = dataset.read_tasks(built, "train", options={"mix": (0.5, 0.5), "seed": 1})
    assert list(source) == tasks["train"] and len(source) == 12
    assert source[-1] == tasks["train"][-1] and source[2:4] == tasks["train"][2:4]
    assert list(dataset.read_tasks(built, "test")) == tasks["test"]
    with pytest.raises(IndexError, match="index 12 out of range for 12"):
        source[12]


def test_any_record_source_will_do(tasks):
    records = [{"task": dataset.task_to_json(task).encode()} for task in tasks["train"]]
    assert list(dataset.TaskSource(records)) == tasks["train"]


def test_demonstrations_come_back_equal(tmp_path):
    demos = [
        Demonstration(
            f"e{i}", _task(i), tuple((f"<search> {j} </search>", f"{j} ü") for j in range(i)), i == 2, {"f1": 0.5}
        )
        for i in range(4)  # the first has no steps
    ]
    dataset.build_demonstrations({"train": demos}, tmp_path)
    assert list(dataset.read_demonstrations(tmp_path, "train")) == demos


def test_building_again_replaces_and_leaves_nothing_behind(built, tasks):
    dataset.build_tasks({"train": tasks["train"][:5]}, built)
    assert len(dataset.read_tasks(built, "train")) == 5
    assert [path.name for path in built.iterdir()] == ["wayfinder_tasks"]


def test_building_the_same_again_touches_nothing(built, tasks):
    folder = built / "wayfinder_tasks" / dataset.VERSION
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    dataset.build_tasks(tasks, built, options={"seed": 1, "mix": (0.5, 0.5)})
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    _flip(_shard(built))  # what is damaged is no equal: it is replaced
    dataset.build_tasks(tasks, built, options={"seed": 1, "mix": (0.5, 0.5)})
    assert list(dataset.read_tasks(built, "train")) == tasks["train"]


def test_of_equal_datasets_put_at_once_the_first_stays(tmp_path):
    manifest, temporaries = {"files": {}}, [tmp_path / f"t{i}" for i in range(8)]
    for folder in temporaries:
        (folder / "built").mkdir(parents=True)
        (folder / "built" / dataset.MANIFEST).write_text(json.dumps(manifest))
    with ThreadPoolExecutor(8) as threads:
        target = tmp_path / "put" / dataset.VERSION
        list(threads.map(lambda folder: dataset._put(folder / "built", target, manifest, folder), temporaries))
    assert dataset.is_built(tmp_path, "put")
    assert sum((folder / "built").exists() for folder in temporaries) == 7  # one was put, and none put aside
    assert not list(tmp_path.glob("t*/replaced-*"))


def test_is_built_wants_the_manifest_of_this_version(built):
    assert dataset.is_built(built, "wayfinder_tasks") and not dataset.is_built(str(built), "others")
    next(built.rglob("manifest.json")).unlink()
    assert not dataset.is_built(built, "wayfinder_tasks")


def test_failed_build_keeps_what_was_there(built, tasks):
    broken = [*tasks["train"][:2], Task("x", "f", "train", 0, (), {"answers": {1, 2}})]  # a set is no JSON
    with pytest.raises(TypeError):
        dataset.build_tasks({"train": broken}, built)
    with pytest.raises(ValueError, match=r"no records for \['test'\]"):
        dataset.build_tasks({"train": tasks["train"], "test": []}, built)
    assert list(dataset.read_tasks(built, "train")) == tasks["train"]
    assert [path.name for path in built.iterdir()] == ["wayfinder_tasks"]


def _shard(folder):
    return next(folder.glob("wayfinder_tasks/*/*train.array_record*"))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _set_version(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "0.1.0"}))


@pytest.mark.parametrize(
    "damage, match",
    [
        (
            lambda f: _shard(f).unlink(),
            r"train\.array_record-\S+: missing, wanted \d+ bytes; delete .* and build it again",
        ),
        (lambda f: _shard(f).write_bytes(_shard(f).read_bytes()[:100]), r"got 100 bytes, wanted \d+ \(cut short\?\)"),
        (lambda f: _flip(_shard(f)), r"content differs from what was written"),
        (lambda f: next(f.rglob("manifest.json")).unlink(), r"manifest\.json: missing, wanted dataset"),
        (lambda f: next(f.rglob("manifest.json")).write_text("{"), r"no readable manifest .*; delete"),
        (lambda f: _set_version(next(f.rglob("manifest.json"))), r"got version '0.1.0', wanted 1\.0\.0"),
        (lambda f: next(f.glob("wayfinder_tasks/*")).rename(f / "wayfinder_tasks" / "0.9.0"), r"only version 0\.9\.0"),
    ],
)
def test_damage_names_the_file_and_the_remedy(built, damage, match):
    damage(built)
    with pytest.raises(DatasetError, match=match):
        dataset.read_tasks(built, "train")


def test_other_options_or_split_are_refused(built):
    with pytest.raises(DatasetError, match=r"other options \(seed: got 1, wanted 2\)"):
        dataset.read_tasks(built, "train", options={"seed": 2, "mix": [0.5, 0.5]})
    with pytest.raises(DatasetError, match="got split 'dev', wanted one of test, train"):
        dataset.read_tasks(built, "dev")
    with pytest.raises(DatasetError, match="wanted dataset wayfinder_demonstrations"):
        dataset.read_demonstrations(built, "train")


def test_reading_needs_no_tensorflow(built):
    code = (
        "import sys; from envs import dataset; assert 'tensorflow_datasets' not in sys.modules;"
        f"print(len(list(dataset.read_tasks({str(built)!r}, 'train'))));"
        "print(*{'tensorflow', 'jax', 'torch'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["12"]
