"""Law: one question, one turn; a user's own judge decides, and its faults are the world's, never a score of 0."""

import json

import pytest

from envs import make_world
from envs.base import EnvError, Message, Task
from envs.play import play
from envs.qa import QaEnv, load_judge

TASK = Task(
    "q/0", "q", "train", 0, (Message("user", "2 + 2 = ?"),), {"answers": ["4", "four"], "row": {"unit": "apples"}}
)


def judge(prediction, answers):
    return {"half": 0.5, "less": 0.49, "nan": float("nan"), "big": 2}[prediction]


def judge_row(prediction, answers, row):
    return float(prediction == row["unit"] and answers == ["4", "four"])


def rows(n):
    return [{"question": f"{i} + 1 = ?", "answers": [str(i + 1)], "level": i % 3} for i in range(n)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(60))))
    return str(path)


def answer(text, **options):
    env = QaEnv(**options)
    env.reset(TASK)
    return env.step(text)


@pytest.mark.parametrize(
    ("text", "success"),
    [
        ("<answer> 4 </answer>", True),
        ("<think> so </think><answer>Four.</answer>", True),
        ("<answer> 5 </answer><answer> 4 </answer>", False),  # the turn ended at the first stop string
        ("<answer> 4", False),
        ("4", False),
        ("<answer> <answer> 4 </answer>", False),
        ("<answer></answer>", False),
    ],
)
def test_tagged_answers(text, success):
    step = answer(text)
    assert step.done and step.facts["success"] is success is step.facts["exact_match"]
    assert step.facts["malformed"] == (step.facts["answer"] is None)


def test_well_formed_is_a_thought_and_then_the_answer():
    assert answer("<think> x </think>\n<answer> 4 </answer> y").facts["well_formed"] == [True]
    for text in ("<answer> 4 </answer>", "<think> x </think> so <answer> 4 </answer>", "<think> x </think>", "4"):
        assert answer(text).facts["well_formed"] == [False]


def test_whole_text_is_the_answer_without_tags():
    assert answer(" four \n", tagged=False).facts["success"]
    assert not answer("<answer> 4 </answer>", tagged=False).facts["exact_match"]
    assert answer("  ", tagged=False).facts["answer"] is None
    assert QaEnv(tagged=False).spec.stop == ()


def test_a_judge_decides():
    assert answer("half", tagged=False, judge=judge).facts["success"] is True
    facts = answer("less", tagged=False, judge=judge).facts
    assert facts["success"] is False and facts["score"] == 0.49
    assert answer("apples", tagged=False, judge=judge_row).facts["success"]
    assert answer("", tagged=False, judge=judge).facts["score"] == 0  # no answer: nothing to judge


@pytest.mark.parametrize(
    ("text", "match"),
    [("nan", "gave nan"), ("big", r"gave 2.0 .* want a number in \[0, 1\]"), ("x", "raised KeyError")],
)
def test_a_faulty_judge_is_the_worlds_fault(text, match):
    with pytest.raises(EnvError, match=match):
        answer(text, tagged=False, judge=judge)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("judge", "want module:function"),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("envs.answers:nothing", "no function 'nothing'; it has .*'exact_match'"),
    ],
)
def test_judges_that_are_not_there(name, match):
    with pytest.raises(ValueError, match=match):
        load_judge(name)


def test_judge_by_name_and_file_by_shares(jsonl):
    world = make_world(
        "qa", file=jsonl, reward="envs.answers:f1", instruction="Use tags.", shares={"train": 0.5, "test": 0.5}
    )
    sizes = {split: len(world.tasks(split)) for split in ("train", "validation", "test")}
    assert sizes["train"] + sizes["test"] == 60 and min(sizes["train"], sizes["test"]) > 15 and sizes["validation"] == 0
    prompts = [task.prompt for split in ("train", "test") for task in world.tasks(split)]
    assert len({prompt[1].content for prompt in prompts}) == 60  # every row once
    assert prompts[0][0] == Message("system", "Use tags.")
    task = world.tasks("train")[0]
    assert task.split == "train" and task.data["row"] == {"level": task.data["row"]["level"]}
    _, facts = play(world.make_env(), task, lambda _: f"<answer> {task.data['answers'][0]} apples </answer>")
    assert facts["success"] and not facts["exact_match"] and facts["score"] == pytest.approx(2 / 3)


def test_adding_rows_moves_none(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(30))))
    before = {task.task_id for task in make_world("qa", file=str(path)).tasks("test")}
    path.write_text("\n".join(map(json.dumps, rows(60))))
    assert before <= {task.task_id for task in make_world("qa", file=str(path)).tasks("test")}


def test_a_question_is_in_one_split_alone(tmp_path):
    path = tmp_path / "again.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(12) * 10)))
    world = make_world("qa", file=str(path), shares={"train": 0.5, "validation": 0.25, "test": 0.25})
    asked = [{task.prompt[-1].content for task in world.tasks(split)} for split in ("train", "validation", "test")]
    assert all(asked) and sum(map(len, asked)) == len(set.union(*asked)) == 12


def test_one_file_per_split(jsonl, tmp_path):
    world = make_world("qa", file={"train": jsonl, "validation": jsonl})
    assert len(world.tasks("train")) == len(world.tasks("validation")) == 60
    assert world.tasks("train")[3].task_id != world.tasks("validation")[3].task_id


def test_tfds_splits_do_not_share_ids(tmp_path):
    import tensorflow_datasets as tfds

    class Sums(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None

        def _info(self):
            text = tfds.features.Text()
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"question": text, "answer": text})
            )

        def _split_generators(self, dl_manager):
            return {"train": ((i, {"question": f"{i} + 1", "answer": str(i + 1)}) for i in range(10))}

        def _generate_examples(self): ...

    Sums(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    options = {"splits": {"train": "train[:80%]", "test": "train[80%:]"}, "answers_key": "answer"}
    world = make_world("qa", builder="sums", data_dir=str(tmp_path), **options)
    tasks = [*world.tasks("train"), *world.tasks("test")]
    assert [len(world.tasks(s)) for s in ("train", "test", "validation")] == [8, 2, 0]
    assert len({task.task_id for task in tasks}) == len({task.prompt for task in tasks}) == 10
    assert play(world.make_env(), tasks[9], world.policies["gold"](tasks[9]))[1]["success"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "want exactly one of them"),
        ({"file": "a.jsonl", "builder": "b"}, "want exactly one of them"),
        ({"file": "a.jsonl", "tag": "final"}, 'want "answer" or None'),
        ({"file": "JSONL", "shares": {"train": 0.5}}, "sum 1"),
        ({"file": "a.jsonl", "filee": 1}, r"got options \['filee'\], want some of \["),
    ],
)
def test_bad_options(jsonl, options, match):
    options = {key: jsonl if value == "JSONL" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=match):
        make_world("qa", **options)
