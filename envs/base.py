"""What a world is: tasks, observations, steps, and the protocol that every world keeps.

A world reports *facts*; it never gives a reward (rl/rewards turns facts into scores). Nothing in `envs/` imports jax.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Message:
    """One chat message: `role` is one of system, user, assistant, tool."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to do. Same task (same `seed`), same world."""

    task_id: str
    family: str  # kind of task, e.g. "hop2": metrics are reported apart by family
    split: str  # "train", "validation" or "test"
    seed: int
    prompt: tuple[Message, ...]
    data: Mapping[str, Any]  # what the world needs to judge, JSON-serialisable; never shown to the policy
    difficulty: float = 0.0


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the policy reads next."""

    text: str
    images: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """The world's answer to one action.

    `facts` is the whole account so far (every key at every step), so that an episode cut by a limit still has its
    facts; `facts["success"]` is a bool (of a labelled world).
    """

    observation: Observation
    done: bool
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """What the rollout worker must know of a world before it starts."""

    name: str
    stop: tuple[str, ...]  # strings that end a turn; the world sees the text up to and including the string
    max_turns: int
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas, for chat templates that render them
    labelled: bool = True  # False: it cannot tell success, and no facts["success"] is wanted of it


class EnvError(Exception):
    """The world failed, not the policy: the episode ends as ENV_ERROR and is never scored."""


class EnvLost(EnvError):
    """The world, or the way to it, was lost (a hang, a dead process, no connection): another try may well succeed."""


class Env(Protocol):
    """One instance, one thread. A reward is not the world's to give: it reports facts."""

    spec: EnvSpec

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: str) -> Step: ...

    def close(self) -> None: ...

    # worlds that can: snapshot() -> bytes, restore(bytes)


# A scripted policy is made for one task and maps what was read so far to the next action:
# policy(observations) -> action text. `observations` excludes the prompt, oldest first.
ScriptedPolicy = Callable[[Sequence[str]], str]


@dataclasses.dataclass(frozen=True)
class World:
    """A family of tasks with the means to play and to check them."""

    name: str
    make_env: Callable[[], Env]
    tasks: Callable[[str], Sequence[Task]]  # split -> tasks, random access, O(1) memory per look-up
    policies: Mapping[str, Callable[[Task], ScriptedPolicy]]  # "gold", "noop", "wrong", "cheat:NAME"
    texts: Callable[[], Iterable[str]]  # what a tokenizer for this world learns from: the training split's
    demonstrate: Callable[[Task, int], ScriptedPolicy] | None = None  # (task, seed) -> imperfect demonstrator
    demonstrated_by: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # differs when demonstrations would
    hint: Callable[[Task], str | None] | None = None  # help for a training task that does not say its answer
    lessons: Callable[[], Sequence[Task]] | None = None  # what demonstrations are of, where not the training split
