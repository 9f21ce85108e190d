"""Single-turn questions with known answers, from any TFDS dataset or a file: the one-turn case of the same loop.

Does not cover: tools, several turns, judges that are models.
"""

import dataclasses
import hashlib
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from envs import dataset, foreign
from envs.answers import after_thinking, escape_tags, exact_match, f1, last_answer
from envs.base import EnvError, EnvSpec, Message, Observation, ScriptedPolicy, Step, Task, World

_STOP = "</answer>"
Judge = Callable[..., float]  # (prediction, answers[, row=]) -> score in [0, 1]


class QaEnv:
    """One question, one turn.

    Facts: success, exact_match (bool), f1, score in [0, 1], malformed (1: there was no answer to judge), answer (str or
    None), well_formed ([bool]: one think block, then the answer and nothing else). Without a judge, score is
    exact_match. A judge that raises or gives anything but a number in [0, 1] is an EnvError.
    """

    def __init__(self, *, tagged: bool = True, judge: Judge | None = None) -> None:
        self.spec = EnvSpec(name="qa", stop=(_STOP,) if tagged else (), max_turns=1)
        self._tagged = tagged
        self._judge = judge
        self._task: Task | None = None
        self._over = False

    def reset(self, task: Task) -> Observation:
        """Begin `task`. The observation is empty: the prompt is the task's own."""
        exact_match(None, task.data["answers"])  # a blank gold fails here
        self._task, self._over = task, False
        return Observation("")

    def step(self, action: str) -> Step:
        """Judge the answer in `action` (up to the first stop string); the episode is over."""
        if self._task is None or self._over:
            raise RuntimeError("no episode is running; call reset(task) first")
        self._over = True
        answers = self._task.data["answers"]
        head, stop, _ = action.partition(_STOP)
        answer = last_answer(head + stop) if self._tagged else action.strip() or None
        score = self._score(answer)
        facts = {
            "success": score >= 0.5,
            "exact_match": exact_match(answer, answers),
            "f1": f1(answer, answers),
            "score": score,
            "malformed": int(answer is None),
            "answer": answer,
            "well_formed": [answer is not None and self._in_order(head + stop)],
        }
        return Step(Observation(""), True, facts)

    def _in_order(self, text: str) -> bool:
        said = after_thinking(text)
        if not self._tagged or said is None:
            return bool(said)
        return said.startswith("<answer>") and said.count("<answer>") == said.count(_STOP) == 1

    def _score(self, answer: str | None) -> float:
        answers = self._task.data["answers"]
        if answer is None:
            return 0.0
        if self._judge is None:
            return float(exact_match(answer, answers))
        row = {"row": self._task.data.get("row", {})} if "row" in inspect.signature(self._judge).parameters else {}
        name = getattr(self._judge, "__qualname__", repr(self._judge))
        try:
            score = float(self._judge(answer, list(answers), **row))
        except Exception as err:  # a stranger's code: whatever it raises says nothing about the policy
            raise EnvError(f"reward {name} raised {err!r} on {self._task.task_id} with answer {answer!r}") from err
        if math.isnan(score) or not 0 <= score <= 1:
            raise EnvError(f"reward {name} gave {score} on {self._task.task_id}, want a number in [0, 1]")
        return score

    def snapshot(self) -> bytes:
        """The complete state as UTF-8 JSON."""
        if self._task is None:
            raise RuntimeError("no episode is running; call reset(task) first")
        return json.dumps({"task": dataset.task_to_json(self._task), "over": self._over}).encode()

    def restore(self, snapshot: bytes) -> None:
        state = json.loads(snapshot)
        self._task, self._over = dataset.task_from_json(state["task"]), state["over"]

    def close(self) -> None:
        self._task = None


def load_judge(name: str) -> Judge:
    """The function called "module:function"; ValueError (got, wanted, remedy) when there is none."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"reward: got {name!r}, want module:function, e.g. my_rewards:numeric")
    try:
        module = importlib.import_module(module_name)
    except ImportError as err:
        raise ValueError(
            f"reward {name!r}: cannot import {module_name!r} ({err}); is its folder on PYTHONPATH?"
        ) from err
    judge = getattr(module, attribute, None)
    if not callable(judge):
        found = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"reward {name!r}: {module_name} has no function {attribute!r}; it has {found}")
    return judge


class _Placed(Sequence[Task]):
    """Foreign tasks under our split names, with ids that are unique over the splits and an instruction before them."""

    def __init__(self, tasks: Sequence[Task], split: str, part: str, instruction: str) -> None:
        self._tasks, self._split, self._part = tasks, split, part
        self._system = (Message("system", instruction),) if instruction else ()

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        task = self._tasks[index]
        task_id = f"{self._part}:{task.task_id}"
        return dataclasses.replace(task, task_id=task_id, split=self._split, prompt=(*self._system, *task.prompt))


def make_world(
    *,
    file: str | Mapping[str, str] = "",
    builder: str = "",
    data_dir: str = "data",
    splits: Mapping[str, str] = MappingProxyType({"train": "train", "validation": "validation", "test": "test"}),
    shares: Mapping[str, float] = MappingProxyType({"train": 0.8, "validation": 0.1, "test": 0.1}),
    question_key: str = "question",
    answers_key: str = "answers",
    instruction: str = "",
    tag: str | None = "answer",
    reward: str | None = None,
) -> World:
    """Questions from a file or a TFDS dataset, judged by exact match or by a function of the user's.

    Args:
        file: a .jsonl or .parquet file, dealt to the splits by `shares` and a hash of the question; or one file per
        split. builder, data_dir, splits: a prepared TFDS dataset, and for each split of ours the TFDS split it is, e.g.
        "train[:90%]". question_key, answers_key: columns, or TFDS features ("answer/aliases").
        instruction: a system message; say there that the answer goes between <answer> and </answer>.
        tag: "answer" reads the answer from its tags; None takes the whole text.
        reward: "module:function", called (prediction, answers) or (prediction, answers, row=other columns) -> [0, 1];
            success is a score of at least 0.5.
    """
    if bool(file) == bool(builder):
        raise ValueError(f"qa: got file={file!r} and builder={builder!r}, want exactly one of them")
    if tag not in ("answer", None):
        raise ValueError(f'qa: got tag={tag!r}, want "answer" or None')
    judge = load_judge(reward) if reward else None
    read = {} if builder else _read_files(file, shares, question_key, answers_key)

    def tasks(split: str) -> Sequence[Task]:
        if builder and split in splits:
            found = foreign.tasks_from_tfds(builder, data_dir, splits[split], question_key, answers_key)
            return _Placed(found, split, splits[split], instruction)
        return _Placed(read.get(split, []), split, split, instruction)

    def texts() -> Iterator[str]:
        for task in tasks("train"):
            yield from (message.content for message in task.prompt)

    return World("qa", lambda: QaEnv(tagged=tag is not None, judge=judge), tasks, _policies(tag is not None), texts)


def _read_files(
    file: str | Mapping[str, str], shares: Mapping[str, float], question_key: str, answers_key: str
) -> dict[str, list[Task]]:
    if isinstance(file, Mapping):
        return {s: list(foreign.tasks_from_file(p, question_key, answers_key, split=s)) for s, p in file.items()}
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        raise ValueError(f"qa: got shares {dict(shares)}, want shares >= 0 with sum 1")
    dealt: dict[str, list[Task]] = {split: [] for split in shares}
    for task in foreign.tasks_from_file(file, question_key, answers_key):
        asked = "\0".join(message.content for message in task.prompt)
        place = int.from_bytes(hashlib.blake2b(asked.encode(), digest_size=8).digest(), "big") / 2**64
        for split, share in shares.items():  # a question is in one split, however often and wherever the file has it
            place -= share
            if place < 0:
                dealt[split].append(task)
                break
        else:
            dealt[split].append(task)  # rounding: the last share ends at 1
    return dealt


def _policies(tagged: bool) -> dict[str, Callable[[Task], ScriptedPolicy]]:
    """Scripted policies; with a judge of the user's, whether the cheats fail is the judge's merit."""

    def saying(text: Callable[[Task], str]) -> Callable[[Task], ScriptedPolicy]:
        def make(task: Task) -> ScriptedPolicy:
            said = text(task)
            return lambda observations: f"<answer> {said} </answer>" if tagged else said

        return make

    def first(task: Task) -> str:
        return str(task.data["answers"][0])

    return {
        "gold": saying(first),
        "noop": lambda task: lambda observations: "<think> </think>" if tagged else " ",
        "wrong": saying(lambda task: f"not {first(task)}"),
        "cheat:spray": saying(lambda task: f"<think> {first(task)} </think><answer> {first(task)} </answer>"),
        "cheat:spray_many": saying(lambda task: f"{first(task)} ; not {first(task)} ; both"),
        "cheat:prompt_echo": saying(lambda task: escape_tags(task.prompt[-1].content)),
    }
