"""Arithmetic with a known answer, in one turn: sums, dates and units, each at three levels; made from numbers alone.

    <think> 7 + 5 = 12 ; 3 + 4 + 1 = 8 </think><answer> 82 </answer>          the thinking may be left out

A question is a pure function of `task.seed`. Which split it is in is said by a hash of what is asked, operands that
commute in one order: no question, and no turned-round form of one, is in two splits, however many are drawn.
Does not cover: fractions, negative results, questions in several turns.
"""

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from envs.answers import escape_tags, exact_match, last_answer
from envs.base import EnvSpec, Message, Observation, ScriptedPolicy, Step, Task, World

_STOP = "</answer>"
_WELL_FORMED = re.compile(r"\s*(?:<think>[^<>]*</think>)?\s*<answer>[^<>]*\S[^<>]*</answer>\s*")
SIZES: Mapping[str, int] = MappingProxyType({"train": 20_000, "validation": 1_000, "test": 2_000})
SHARES: Mapping[str, float] = MappingProxyType({"train": 0.8, "validation": 0.1, "test": 0.1})
LEVELS: Mapping[str, Sequence[int]] = MappingProxyType({"sum": (1, 2, 3), "date": (1, 2, 3), "unit": (1, 2, 3)})
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DECIMAL = (("metre", "centimetre", 100), ("kilometre", "metre", 1000), ("litre", "millilitre", 1000),
           ("kilogram", "gram", 1000), ("centimetre", "millimetre", 10), ("euro", "cent", 100))  # fmt: skip
OTHER = (
    ("hour", "minute", 60),
    ("minute", "second", 60),
    ("day", "hour", 24),
    ("week", "day", 7),
    ("foot", "inch", 12),
)
PLURAL = {"foot": "feet", "inch": "inches", "century": "centuries"}

# What a demonstration does, and how often.
BEHAVIOURS: Mapping[str, float] = MappingProxyType({"good": 0.35, "slip": 0.30, "direct": 0.20, "bare": 0.15})
VERSION = 1  # of questions and demonstrator: raise it when either would come out otherwise


class Question(NamedTuple):
    """What is asked, and the ways to answer it: by the steps, by a slip in them, and by a guess without any."""

    text: str
    key: str  # equal for questions that are the same but for the order of operands
    answer: str
    steps: tuple[str, ...]
    slip: tuple[str, ...]
    slipped: str
    guess: str


class ArithEnv:
    """One question, one turn.

    Facts: success (bool; there is none with `labels` False), well_formed ([bool], of the turn: optional thinking, one
    answer, nothing else), answer (str or None).
    """

    def __init__(self, *, labels: bool = True) -> None:
        self.spec = EnvSpec("arith", (_STOP,), 1, labelled=labels)
        self._labels = labels
        self._task: dict[str, Any] | None = None
        self._over = False

    def reset(self, task: Task) -> Observation:
        """Begin `task`. The observation is empty: the prompt is the task's own."""
        if self._labels:
            exact_match(None, task.data["answers"])  # a task without an answer fails here
        self._task, self._over = {"answers": list(task.data["answers"])} if self._labels else {}, False
        return Observation("")

    def step(self, action: str) -> Step:
        """Read the answer in `action` up to the first stop string; the episode is over."""
        if self._task is None or self._over:
            raise RuntimeError("no episode is running; call reset(task) first")
        self._over = True
        head, stop, _ = action.partition(_STOP)
        answer = last_answer(head + stop)
        facts = {"answer": answer, "well_formed": [bool(_WELL_FORMED.fullmatch(action))]}
        if self._labels:
            facts["success"] = exact_match(answer, self._task["answers"])
        return Step(Observation(""), True, facts)

    def snapshot(self) -> bytes:
        """The complete state as UTF-8 JSON."""
        if self._task is None:
            raise RuntimeError("no episode is running; call reset(task) first")
        return json.dumps({"task": self._task, "over": self._over}).encode()

    def restore(self, snapshot: bytes) -> None:
        state = json.loads(snapshot)
        self._task, self._over = state["task"], state["over"]

    def close(self) -> None:
        self._task = None


# --- questions ----------------------------------------------------------------------------------------------------


def ask(seed: int, levels: Mapping[str, Sequence[int]]) -> tuple[str, int, Question]:
    """(family, level, question) of `seed`: a family of `levels`, one of its levels, and the numbers."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    family = list(levels)[int(rng.integers(len(levels)))]
    level = int(levels[family][int(rng.integers(len(levels[family])))])
    return family, level, FAMILIES[family](level, lambda low, high: int(rng.integers(low, high + 1)))


Between = Callable[[int, int], int]  # a number of low..high, both included


def _sum(level: int, between: Between) -> Question:
    """Level 1: a ± b of one digit; 2: of two digits; 3: three numbers of two digits. Never below 0 on the way."""
    most = 9 if level == 1 else 99
    low = 1 if level == 1 else 10
    terms, signs = [between(low, most)], []
    for _ in range(2 if level == 3 else 1):
        minus, so_far = between(0, 1), _total(terms, signs)
        minus = minus and so_far > 1
        signs.append("-" if minus else "+")
        terms.append(between(1, so_far) if minus else between(low, most))
    (steps, total), (slip, slipped) = (_columns(terms, signs, carry=carry) for carry in (True, False))
    text = " ".join([str(terms[0]), *(f"{sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))])
    added = sorted([terms[0], *(t for s, t in zip(signs, terms[1:], strict=True) if s == "+")])
    taken = sorted(t for s, t in zip(signs, terms[1:], strict=True) if s == "-")
    return Question(f"What is {text} ?", f"sum {added} {taken}", str(total), steps, slip, str(slipped), str(max(terms)))


def _total(terms: Sequence[int], signs: Sequence[str]) -> int:
    return terms[0] + sum(term if sign == "+" else -term for sign, term in zip(signs, terms[1:], strict=True))


def _columns(terms: Sequence[int], signs: Sequence[str], *, carry: bool) -> tuple[tuple[str, ...], int]:
    """The sum by ones, then by the rest, term by term, as it is written down; without `carry` none is carried."""
    lines, total = [], terms[0]
    for sign, term in zip(signs, terms[1:], strict=True):
        (rest, ones), (other_rest, other) = divmod(total, 10), divmod(term, 10)
        if sign == "+":
            column = ones + other
            lines.append(f"{ones} + {other} = {column}")
            over = column // 10 if carry else 0
            total = 10 * (rest + other_rest + over) + column % 10
            lines.append(f"{rest} + {other_rest}{' + 1' * over} = {total // 10}")
        else:
            over = int(ones < other)
            column = ones + 10 * over - other
            lines.append(f"{ones + 10 * over} - {other} = {column}")
            over = over if carry else 0
            total = 10 * (rest - other_rest - over) + column
            lines.append(f"{rest} - {other_rest}{' - 1' * over} = {total // 10}")
    return tuple(lines), total


def _date(level: int, between: Between) -> Question:
    """Level 1: the day of the week 1 to 6 days on; 2: the date 2 to 40 days on; 3: days between two dates of a year."""
    if level == 1:
        day, n = between(0, 6), between(1, 6)
        names = [DAYS[(day + i) % 7] for i in range(n + 1)]
        steps = tuple(f"{i} {name}" for i, name in enumerate(names[1:], 1))
        slip = tuple(f"{i} {name}" for i, name in enumerate(names[:-1], 1))  # counts the day itself
        plural = "days" if n > 1 else "day"
        text = f"Which day is {n} {plural} after {names[0]} ?"
        return Question(text, f"day {day} {n}", names[-1], steps, slip, names[-2], names[0])
    first = datetime.date(between(1999, 2030), 1, 1) + datetime.timedelta(between(0, 364))
    if level == 2:
        n = between(2, 40)
        day, length, steps, slip = first.day + n, _month_days(first), [], []
        steps.append(f"{first.day} + {n} = {day}")
        slip = [*steps]
        later = first + datetime.timedelta(n)
        for lines, days in ((steps, length), (slip, 30)):
            if day > days:
                lines.append(f"{day} - {days} = {day - days}")
        # Every month has 30 days, it thinks, and where that is no mistake it forgets the month.
        month = first.replace(day=1) + datetime.timedelta(32)
        wrong = (
            f"{month.year}-{month.month:02}-{day - 30:02}" if day > 30 else f"{first.year}-{first.month:02}-{day:02}"
        )
        text = f"Which date is {n} days after {first.isoformat()} ?"
        return Question(
            text, f"date {first} {n}", later.isoformat(), tuple(steps), tuple(slip), wrong, first.isoformat()
        )
    second = first.replace(month=12, day=31) - datetime.timedelta(between(0, 40))
    first = min(first, second - datetime.timedelta(1))
    a, b = (date.timetuple().tm_yday for date in (first, second))
    text = f"How many days are from {first.isoformat()} to {second.isoformat()} ?"
    slipped = 30 * (second.month - first.month) + second.day - first.day
    return Question(
        text,
        f"between {first} {second}",
        str(b - a),
        (f"day {a}", f"day {b}", f"{b} - {a} = {b - a}"),
        (f"{second.month - first.month} months", f"{second.day} - {first.day}"),
        str(slipped),
        str(second.day),
    )


def _month_days(date: datetime.date) -> int:
    return ((date.replace(day=1) + datetime.timedelta(32)).replace(day=1) - date.replace(day=1)).days


def _unit(level: int, between: Between) -> Question:
    """Level 1: n of a decimal unit in a smaller one; 2: of another unit; 3: n of a unit and m of the smaller one."""
    table = DECIMAL if level == 1 else OTHER
    large, small, factor = table[between(0, len(table) - 1)]
    n = between(2, 99 if level == 1 else 20)
    whole = n * factor
    wrong = 10 if factor == 100 else 100 if level == 1 else (60 if factor != 60 else 24)
    steps, slip = (f"{n} * {factor} = {whole}",), (f"{n} * {wrong} = {n * wrong}",)
    if level < 3:
        text = f"How many {_plural(small)} are {n} {_plural(large)} ?"
        return Question(text, f"unit {large} {small} {n}", str(whole), steps, slip, str(n * wrong), str(n))
    m = between(1, factor - 1)
    text = f"How many {_plural(small)} are {n} {_plural(large)} and {m} {_plural(small)} ?"
    steps, slip = (*steps, f"{whole} + {m} = {whole + m}"), (*slip, f"{n * wrong} + {m} = {n * wrong + m}")
    key = f"unit {large} {small} {n} {m}"
    return Question(text, key, str(whole + m), steps, slip, str(n * wrong + m), str(n + m))


def _plural(unit: str) -> str:
    return PLURAL.get(unit, f"{unit}s")


FAMILIES: Mapping[str, Callable[[int, Between], Question]] = MappingProxyType(
    {"sum": _sum, "date": _date, "unit": _unit}
)


def split_of(key: str) -> str:
    """The split of a question, by a hash of its key: each has its share of all questions there are."""
    place = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    for split, share in SHARES.items():
        place -= share
        if place < 0:
            return split
    return split


class ArithTasks(Sequence[Task]):
    """Task i of a split: the first of the seeds addressed by (seed, split, i) whose question is in the split."""

    def __init__(
        self, split: str, n: int, *, seed: int, levels: Mapping[str, Sequence[int]], instruction: str, labels: bool
    ) -> None:
        self._split, self._n, self._seed, self._levels, self._labels = split, n, seed, levels, labels
        self._system = (Message("system", instruction),) if instruction else ()

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -self._n <= index < self._n:
            raise IndexError(f"task: got {index}, want less than {self._n} of {self._split!r}")
        index %= self._n
        attempt = 0
        while True:
            digest = hashlib.blake2b(f"{self._seed}/{self._split}/{index}/{attempt}".encode(), digest_size=6).digest()
            seed = int.from_bytes(digest, "big")
            family, level, question = ask(seed, self._levels)
            if split_of(question.key) == self._split:
                break
            attempt += 1
        prompt = (*self._system, Message("user", question.text))
        data = {"answers": [question.answer]} if self._labels else {}
        name = f"{family}{level}"
        return Task(f"arith/{name}/{self._split}/{index}", name, self._split, seed, prompt, data, float(level))


# --- policies -----------------------------------------------------------------------------------------------------


def _write(steps: Sequence[str], answer: str) -> str:
    return f"<think> {' ; '.join(steps)} </think><answer> {answer} </answer>"


def _policies(levels: Mapping[str, Sequence[int]]) -> dict[str, Callable[[Task], ScriptedPolicy]]:
    """The policies that prove the world. Each knows the question by its seed, as the world's grader does."""

    def saying(text: Callable[[Task, Question], str]) -> Callable[[Task], ScriptedPolicy]:
        def make(task: Task) -> ScriptedPolicy:
            said = text(task, ask(task.seed, levels)[2])
            return lambda observations: said

        return make

    def wrong(task: Task, question: Question) -> str:
        plausible = (answer for answer in (question.slipped, question.guess) if answer != question.answer)
        return _write(question.slip, next(plausible, f"not {question.answer}"))

    return {
        "gold": saying(lambda task, q: _write(q.steps, q.answer)),
        "noop": lambda task: lambda observations: "<think> </think>",
        "wrong": saying(wrong),
        "cheat:spray": saying(lambda task, q: f"<answer> {q.guess} ; {q.answer} ; {q.slipped} 0 </answer>"),
        "cheat:bare": saying(lambda task, q: f"<think> {q.answer} </think> {q.answer}"),
        "cheat:nested": saying(lambda task, q: f"<answer> <answer> {q.answer} </answer> {q.answer} </answer>"),
        "cheat:second": saying(lambda task, q: f"<answer> not it </answer><answer> {q.answer} </answer>"),
        "cheat:prompt_echo": saying(lambda task, q: _write((), escape_tags(q.text))),
    }


def demonstrator(
    task: Task, seed: int, *, levels: Mapping[str, Sequence[int]], shares: Mapping[str, float] = BEHAVIOURS
) -> ScriptedPolicy:
    """A demonstration that is right only sometimes; a pure function of (task, seed).

    Behaviours, drawn by their shares: "good" writes the steps; "slip" makes the family's mistake (carries nothing,
    counts the day itself, takes another factor); "direct" answers with a number of the question, without thinking;
    "bare" has it right and leaves the tags of the answer out.
    """
    if abs(sum(shares.values()) - 1) > 1e-6 or not set(shares) <= set(BEHAVIOURS):
        raise ValueError(f"demonstration shares: got {dict(shares)}, want {sorted(BEHAVIOURS)} with sum 1")
    question = ask(task.seed, levels)[2]
    digest = hashlib.blake2b(f"{task.task_id}/{seed}".encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "big"))
    how = str(rng.choice(list(shares), p=list(shares.values())))
    said = {
        "good": _write(question.steps, question.answer),
        "slip": _write(question.slip, question.slipped),
        "direct": f"<answer> {question.guess} </answer>",
        "bare": f"<think> {' ; '.join(question.steps)} </think> {question.answer}",
    }[how]
    return lambda observations: said


def hint(task: Task, levels: Mapping[str, Sequence[int]]) -> str | None:
    """The first step of the working, where there is another after it; never the last, which says the answer."""
    steps = ask(task.seed, levels)[2].steps
    return f"Begin with {steps[0]}" if len(steps) > 1 else None


def make_world(
    *,
    data_dir: str = "data/arith",
    levels: Mapping[str, Sequence[int]] = LEVELS,
    sizes: Mapping[str, int] = SIZES,
    seed: int = 0,
    instruction: str = "",
    labels: bool = True,
    demonstrations: Mapping[str, Any] = MappingProxyType({}),
) -> World:
    """Sums, dates and units. Nothing is stored but demonstrations, in `data_dir`.

    Args:
        levels: of each family that is asked, which levels, each as often as the others. seed: of what is drawn.
        sizes: tasks of each split; the same question may be drawn again.
        instruction: a system message; say there that the answer goes between <answer> and </answer>.
        labels: False trains without any: tasks hold no answer, and the world reports no success. Grade by another
            world, made with labels.
        demonstrations: keyword arguments of `demonstrator`.
    """
    for family, own in levels.items():
        if family not in FAMILIES or not own or not set(own) <= {1, 2, 3}:
            raise ValueError(f"levels: got {family}: {own!r}, want some of {', '.join(FAMILIES)} with levels 1 to 3")
    if not levels or not set(sizes) <= set(SHARES) or min(sizes.values(), default=0) < 0:
        raise ValueError(f"arith: got levels {dict(levels)} and sizes {dict(sizes)}, want families, and splits >= 0")
    levels = {family: tuple(own) for family, own in levels.items()}

    def tasks(split: str) -> ArithTasks:
        if split not in SHARES:
            raise ValueError(f"split: got {split!r}, want one of {', '.join(SHARES)}")
        return ArithTasks(split, sizes.get(split, 0), seed=seed, levels=levels, instruction=instruction, labels=labels)

    def texts() -> Iterator[str]:
        for task in tasks("train")[:4000]:
            question = ask(task.seed, levels)[2]
            text = f"{task.prompt[-1].content} {_write(question.steps, question.answer)}"
            yield re.sub(r"\d", r" \g<0> ", text)  # digits apart: a tokenizer learns each alone, and no number

    make_env = functools.partial(ArithEnv, labels=labels)
    policies = _policies(levels)
    if not labels:
        return World("arith", make_env, tasks, {"noop": policies["noop"]}, texts)
    demonstrate = functools.partial(demonstrator, levels=levels, **demonstrations)
    by = {"version": VERSION, "shares": dict(BEHAVIOURS), **demonstrations}
    return World(
        "arith", make_env, tasks, policies, texts, demonstrate, by, hint=functools.partial(hint, levels=levels)
    )
