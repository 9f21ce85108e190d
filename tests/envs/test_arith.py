"""Sums, dates and units: the answers are right, no question is in two splits, and nothing tells a policy its label."""

import datetime
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import SPLITS, make_world
from envs.arith import BEHAVIOURS, DAYS, LEVELS, ArithEnv, ask, demonstrator, hint, split_of
from envs.base import Message, Task
from envs.play import play

TASK = Task("a", "sum2", "train", 0, (Message("user", "What is 37 + 45 ?"),), {"answers": ["82"]})


def answered(text, **options):
    env = ArithEnv(**options)
    env.reset(TASK)
    return env.step(text)


@pytest.mark.parametrize(
    ("text", "success", "well_formed", "answer"),
    [
        ("<answer> 82 </answer>", True, True, "82"),
        ("<think> 7 + 5 = 12 </think><answer>82</answer>", True, True, "82"),
        ("<think> 7 + 5 = 12 </think> so <answer> 82 </answer>", True, False, "82"),
        ("<think> 7 <answer> 82 </answer>", True, False, "82"),
        ("<answer> 81 </answer>", False, True, "81"),
        ("<answer> -82 </answer>", False, True, "-82"),
        ("<answer> 82.5 </answer>", False, True, "82.5"),
        ("<answer> </answer>", False, False, None),
        ("<think> 82 </think> 82", False, False, None),
        ("<answer> 82", False, False, None),
        ("<answer> 81 </answer><answer> 82 </answer>", False, False, "81"),
    ],
)
def test_what_counts(text, success, well_formed, answer):
    step = answered(text)
    assert step.done and step.facts == {"success": success, "well_formed": [well_formed], "answer": answer}


def evaluated(text):
    """The answer of a question, worked out another way than by columns and tables of steps."""
    if match := re.fullmatch(r"What is ([\d +-]+) \?", text):
        return str(eval(match[1]))
    if match := re.fullmatch(r"Which day is (\d+) days? after (\w+) \?", text):
        return DAYS[(DAYS.index(match[2]) + int(match[1])) % 7]
    if match := re.fullmatch(r"Which date is (\d+) days after (\S+) \?", text):
        return (datetime.date.fromisoformat(match[2]) + datetime.timedelta(int(match[1]))).isoformat()
    if match := re.fullmatch(r"How many days are from (\S+) to (\S+) \?", text):
        first, second = map(datetime.date.fromisoformat, match.groups())
        return str((second - first).days)
    match = re.fullmatch(r"How many (\w+) are (\d+) (\w+)(?: and (\d+) \w+)? \?", text)
    small, large = match[1], match[3]
    factor = {
        ("centimetres", "metres"): 100, ("metres", "kilometres"): 1000, ("millilitres", "litres"): 1000,
        ("grams", "kilograms"): 1000, ("millimetres", "centimetres"): 10, ("cents", "euros"): 100,
        ("minutes", "hours"): 60, ("seconds", "minutes"): 60, ("hours", "days"): 24, ("days", "weeks"): 7,
        ("inches", "feet"): 12,
    }[small, large]  # fmt: skip
    return str(int(match[2]) * factor + int(match[4] or 0))


@given(st.integers(0, 2**48 - 1))
def test_answers_are_right_and_no_step_but_the_last_says_them(seed):
    family, level, question = ask(seed, LEVELS)
    assert question.answer == evaluated(question.text) and not question.answer.startswith("-")
    assert level in LEVELS[family] and len(question.steps) <= 8
    assert ask(seed, LEVELS)[2] == question
    assert question.answer not in (question.guess,) or family == "sum"


def test_the_steps_of_some_questions():
    def steps(text):
        seeds = range(40_000)
        return next(q.steps for _, _, q in (ask(s, {"sum": (2,)}) for s in seeds) if q.text == f"What is {text} ?")

    assert steps("37 + 45") == ("7 + 5 = 12", "3 + 4 + 1 = 8")
    assert steps("63 - 28") == ("13 - 8 = 5", "6 - 2 - 1 = 3")


def test_no_question_is_in_two_splits_however_its_operands_stand():
    world = make_world("arith")
    asked = {}
    for split in SPLITS:
        for task in world.tasks(split)[:1500]:
            key = ask(task.seed, LEVELS)[2].key
            assert split_of(key) == split == task.split
            assert asked.setdefault(task.prompt[-1].content, split) == split
    turned = {
        text: " + ".join(reversed(re.findall(r"\d+", text))) for text in asked if re.fullmatch(r".*\d \+ \d+ \?", text)
    }
    other = [asked[f"What is {pair} ?"] == asked[text] for text, pair in turned.items() if f"What is {pair} ?" in asked]
    assert len(other) > 50 and all(other)


def test_a_task_is_a_function_of_its_place():
    world = make_world("arith", levels={"unit": (1, 2)}, sizes={"train": 50}, instruction="In tags.")
    tasks = world.tasks("train")
    assert len(tasks) == 50 and len(world.tasks("test")) == 0
    assert tasks[7] == tasks[-43] == tasks[5:9][2] == make_world("arith", levels={"unit": (1, 2)}, sizes={"train": 9},
                                                                 instruction="In tags.").tasks("train")[7]  # fmt: skip
    assert [m.role for m in tasks[0].prompt] == ["system", "user"]
    assert {t.family for t in tasks} == {"unit1", "unit2"} and {t.difficulty for t in tasks} == {1.0, 2.0}
    assert make_world("arith", seed=1).tasks("train")[0] != make_world("arith").tasks("train")[0]
    with pytest.raises(IndexError, match="got 50, want less than 50 of 'train'"):
        tasks[50]


def test_without_labels_nothing_holds_one():
    world, graded = make_world("arith", labels=False), make_world("arith")
    for task, labelled in zip(world.tasks("train")[:50], graded.tasks("train")[:50], strict=True):
        assert task.prompt == labelled.prompt and task.data == {} and labelled.data["answers"]
        _, facts = play(world.make_env(), task, graded.policies["gold"](labelled))
        assert facts == {"answer": labelled.data["answers"][0], "well_formed": [True]}
    assert set(world.policies) == {"noop"} and world.demonstrate is None and world.hint is None


def test_demonstrations_are_right_as_often_as_they_should():
    world = make_world("arith", levels={"unit": (1,)})
    env = world.make_env()
    facts = [play(env, task, world.demonstrate(task, 0))[1] for task in world.tasks("train")[:600]]
    assert sum(f["success"] for f in facts) / 600 == pytest.approx(BEHAVIOURS["good"], abs=0.06)
    assert sum(f["well_formed"] == [True] for f in facts) / 600 == pytest.approx(1 - BEHAVIOURS["bare"], abs=0.05)
    task = world.tasks("train")[0]
    assert world.demonstrate(task, 3)([]) == world.demonstrate(task, 3)([])
    with pytest.raises(ValueError, match="demonstration shares: got .*'good': 0.5"):
        demonstrator(task, 0, levels={"unit": (1,)}, shares={"good": 0.5})


@given(st.integers(0, 2**48 - 1))
def test_a_hint_never_says_the_answer(seed):
    question = ask(seed, LEVELS)[2]
    text = hint(Task("t", "f", "train", seed, (), {}), LEVELS)
    assert (text is None) == (len(question.steps) < 2)
    assert text is None or text == f"Begin with {question.steps[0]}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": {"sums": (1,)}}, "got sums: .*want some of sum, date, unit"),
        ({"levels": {"sum": (4,)}}, "with levels 1 to 3"),
        ({"levels": {}}, "want families"),
        ({"sizes": {"dev": 5}}, "want families, and splits"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make_world("arith", **options)
