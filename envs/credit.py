"""A world whose right credit is known: ten steps, and one action alone decides. For measuring, not for mastering.

There are switches 1 to n. At the deciding step the panel is dark and the world asks for one of them by its number; the
episode succeeds if that switch is set there, and nothing else matters. At every other step the panel shows what was set
so far, so that the states before and after the deciding one drift apart between episodes, while that one is the same
for all: a door that every way leads through. Whether the answer was right is told at the end.

A policy that sets the switch asked for with probability p has Q - V = 1 - p there if it was right, -p if not, and 0 at
every other step: `true_credit`. `python -m launch.bench credit` compares estimators with it.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from envs import dataset
from envs.base import EnvSpec, Message, Observation, ScriptedPolicy, Step, Task, World
from envs.play import play

STOP = "</set>"
SIZES = {"train": 400, "validation": 100, "test": 100}
INSTRUCTION = (
    "Set one switch at each step: <set> its number </set>. One step decides, the one at which you are asked for a "
    "switch by its number: set that one there."
)
_SET = re.compile(r"<set>\s*([0-9]+)\s*</set>")
_ASKED = re.compile(r"Set switch ([0-9]+)")


class CreditEnv:
    """One episode of `steps` turns.

    Facts: success (only at the end can it be True), asked (bool: the deciding step is over), right (bool: the switch
    asked for was set at it), malformed (turns in which no switch was set).
    """

    def __init__(self, *, steps: int, switches: int) -> None:
        self.spec = EnvSpec(name="credit", stop=(STOP,), max_turns=steps)
        self._steps, self._switches = steps, switches
        self._task: Task | None = None
        self._set: list[int] = []  # what was set at each step so far; 0: nothing

    def reset(self, task: Task) -> Observation:
        """Begin `task`. The text is that of the first step."""
        if task.data["steps"] != self._steps or task.data["switches"] != self._switches:
            raise ValueError(f"credit: got {task.task_id} with {dict(task.data)}, want a task of this world's options")
        self._task, self._set = task, []
        return Observation(self._text())

    def step(self, action: str) -> Step:
        """Set the switch that `action` names up to its first stop string; a number that is no switch's sets none."""
        if self._task is None or len(self._set) >= self._steps:
            raise RuntimeError("no episode is running; call reset(task) first")
        head, stop, _ = action.partition(STOP)
        found = _SET.search(head + stop)
        number = int(found[1]) if found else 0
        self._set.append(number if 1 <= number <= self._switches else 0)
        done = len(self._set) == self._steps
        return Step(Observation("" if done else self._text()), done, self._facts(done))

    def _text(self) -> str:
        now, data = len(self._set), self._task.data
        if now == data["deciding"]:
            return f"Step {now + 1} of {self._steps}. The panel is dark. Set switch {data['asked']}."
        panel = " ".join("-" if number == 0 else str(number) for number in self._set) or "nothing yet"
        return f"Step {now + 1} of {self._steps}. So far: {panel}. Set any switch."

    def _facts(self, done: bool) -> dict[str, bool | int]:
        data = self._task.data
        asked = len(self._set) > data["deciding"]
        right = asked and self._set[data["deciding"]] == data["asked"]
        return {"success": done and right, "asked": asked, "right": right, "malformed": self._set.count(0)}

    def snapshot(self) -> bytes:
        """The complete state as UTF-8 JSON."""
        if self._task is None:
            raise RuntimeError("no episode is running; call reset(task) first")
        return json.dumps({"task": dataset.task_to_json(self._task), "set": self._set}).encode()

    def restore(self, snapshot: bytes) -> None:
        state = json.loads(snapshot)
        self._task, self._set = dataset.task_from_json(state["task"]), state["set"]

    def close(self) -> None:
        self._task = None


@dataclasses.dataclass(frozen=True)
class _Tasks(Sequence[Task]):
    """Tasks of one split: deciding step and switch drawn by (split, index)."""

    split: str
    size: int
    steps: int
    switches: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        i = range(self.size)[index]
        rng = np.random.Generator(np.random.Philox(key=np.array([list(SIZES).index(self.split), i], np.uint64)))
        data = {
            "steps": self.steps,
            "switches": self.switches,
            "deciding": int(rng.integers(self.steps)),  # from 0
            "asked": int(rng.integers(1, self.switches + 1)),
        }
        return Task(f"credit/{self.split}/{i}", "credit", self.split, i, (Message("system", INSTRUCTION),), data)


def make_world(*, steps: int = 10, switches: int = 4) -> World:
    """The world with `steps` turns an episode and `switches` to choose from."""
    if steps < 1 or switches < 2:
        raise ValueError(f"credit: got steps={steps} and switches={switches}, want at least 1 step and 2 switches")

    def texts() -> Iterator[str]:
        env = CreditEnv(steps=steps, switches=switches)
        yield INSTRUCTION
        for task in _Tasks("train", SIZES["train"], steps, switches):
            yield env.reset(task).text
            rng = np.random.Generator(np.random.Philox(task.seed))
            for action, observation in play(env, task, random_policy(0.5, switches, rng))[0]:
                yield action
                yield observation

    return World(
        "credit",
        lambda: CreditEnv(steps=steps, switches=switches),
        lambda split: _Tasks(split, SIZES[split], steps, switches),
        _policies(switches),
        texts,
    )


def setting(number: int, thought: str = "") -> str:
    """The action that sets a switch."""
    return f"{thought}{' ' if thought else ''}<set> {number} </set>"


def random_policy(p: float, switches: int, rng: np.random.Generator, thoughts: Sequence[str] = ()) -> ScriptedPolicy:
    """Sets the switch asked for with probability `p`, else another one; any at a step that asks for none. Before it a
    thought of no consequence, if there are some.
    """

    def act(observations: Sequence[str]) -> str:
        asked = asked_in(observations[-1])
        thought = thoughts[int(rng.integers(len(thoughts)))] if thoughts else ""
        if asked is None:
            return setting(int(rng.integers(1, switches + 1)), thought)
        other = 1 + (asked - 1 + int(rng.integers(1, switches))) % switches
        return setting(asked if rng.random() < p else other, thought)

    return act


def asked_in(observation: str) -> int | None:
    """The switch that an observation asks for by its number."""
    found = _ASKED.search(observation)
    return int(found[1]) if found else None


def true_credit(task: Task, right: bool, p: float) -> np.ndarray:
    """Q(s, a) - V(s) of each step, of a policy that is right with probability `p` at the deciding one."""
    out = np.zeros(task.data["steps"])
    out[task.data["deciding"]] = float(right) - p
    return out


def _policies(switches: int) -> dict[str, Callable[[Task], ScriptedPolicy]]:
    def reading(answer: Callable[[int | None], str]) -> Callable[[Task], ScriptedPolicy]:
        return lambda task: lambda observations: answer(asked_in(observations[-1]))

    every = " ".join(map(str, range(1, switches + 1)))
    return {
        "gold": reading(lambda asked: setting(asked or 1)),
        "noop": reading(lambda asked: "I wait."),
        "wrong": reading(lambda asked: setting((asked or 1) % switches + 1)),
        "cheat:list": reading(lambda asked: f"<set> {every} </set>"),
        # the right one at every step but where it is asked for
        "cheat:late": lambda task: lambda seen: setting(0 if asked_in(seen[-1]) else task.data["asked"]),
    }
