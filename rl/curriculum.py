"""Which task a ticket plays, what its group says of the task, and which groups are admitted.

A share ε of the tickets walks through a permutation of all tasks, epoch by epoch; the others are chosen by a sampler
(rl/task_samplers.py) from what earlier groups told. Observations enter at the cut of a batch, in ticket order, in every
process alike. So a draw is a function of (state, ticket), and the state by which ticket t is drawn is the one after all
groups of the batches cut before: with max_staleness 0 of every earlier batch, whatever took how long; with more, which
batches were cut by then is a matter of timing, and with a sampler so are the tasks.
"""

import dataclasses
import functools
import hashlib
import json
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from envs.answers import escape_tags
from envs.base import Message, Task
from rl.rewards.compose import reward
from rl.rewards.outcome import is_unlabelled, success
from rl.task_samplers import Outcome, Sampler, State
from rl.types import Status, Trajectory

_PROBES = 64
_CHOICE, _HINT = 1, 2  # what a ticket's random number is for


class TaskStream:
    """ticket -> task: ticket t plays task π_e[i] with e, i = divmod(t - base, n), π_e a permutation of the n tasks.

    π_e is drawn by Philox with key (seed, e), so any ticket can be looked up in any order, by any process. `base` is
    0, or the ticket at which the data set was replaced. Thread-safe: `draw` reads only.
    """

    def __init__(self, tasks: Sequence[Task], seed: int):
        """Raises ValueError on an empty data set or a negative seed."""
        if not len(tasks) or seed < 0:
            raise ValueError(f"TaskStream: got {len(tasks)} tasks and seed {seed}, want at least one and a seed >= 0")
        self.tasks, self.seed, self.base = tasks, seed, 0
        self._order = functools.lru_cache(maxsize=4)(functools.partial(permutation, len(tasks), seed))
        self.fingerprint = fingerprint(tasks)

    def draw(self, ticket: int) -> Task:
        """The task of `ticket`. Raises IndexError for a ticket before this data set began."""
        return self.tasks[self.index(ticket)]

    def index(self, ticket: int) -> int:
        """The place of that task among all; errors as `draw`."""
        if ticket < self.base:
            raise IndexError(f"draw: got ticket {ticket}, want at least {self.base}, where this data set began")
        return int(self._order(self.epoch(ticket))[(ticket - self.base) % len(self.tasks)])

    def epoch(self, ticket: int) -> int:
        """How many times every task was drawn before `ticket`."""
        return (ticket - self.base) // len(self.tasks)

    def state_dict(self, next_ticket: int) -> dict[str, Any]:
        """What a resumed run needs; `next_ticket` is the first that is not settled (the loop counts tickets)."""
        return {
            "seed": self.seed,
            "base": self.base,
            "next_ticket": next_ticket,
            "tasks": len(self.tasks),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Goes on from `state`; whether it is of this data set. With another, epoch 0 begins at `next_ticket`, with a
        warning.

        Raises ValueError for another seed: that is another run.
        """
        if state["seed"] != self.seed:
            saved = state["seed"]
            raise ValueError(f"TaskStream: got seed {self.seed}, want {saved} of the saved run; use another workdir")
        if (state["fingerprint"], state["tasks"]) == (self.fingerprint, len(self.tasks)):
            self.base = state["base"]
            return True
        warnings.warn(
            f"TaskStream: the saved run drew from {state['tasks']} tasks ({state['fingerprint'][:12]}), now there are "
            f"{len(self.tasks)} ({self.fingerprint[:12]}): the new data set starts at its first epoch",
            stacklevel=2,
        )
        self.base = state["next_ticket"]
        return False


class Curriculum:
    """ticket -> task, by a sampler and, for a share ε of the tickets, by the stream; ε = 1 without a sampler.

    Ticket t is one of the stream's where floor(ε(t + 1)) > floor(εt), and plays its floor(εt)-th task: any 2n/ε tickets
    in a row play every one of the n tasks, whatever the sampler thinks of it. Thread-safe.
    """

    def __init__(self, stream: TaskStream, sampler: Sampler | None = None, *, epsilon: float = 1.0):
        """Raises ValueError unless 0 < ε <= 1."""
        if not 0 < epsilon <= 1:
            raise ValueError(f"Curriculum: got epsilon {epsilon}, want more than 0 (or tasks are lost), at most 1")
        self._stream, self._sampler = stream, sampler
        self._epsilon = epsilon if sampler else 1.0
        self._lock = threading.RLock()  # guards all below
        self._drawn: dict[int, int] = {}  # tickets whose groups were not told of yet -> tasks
        self._set(sampler.start() if sampler else {})

    def draw(self, ticket: int) -> Task:
        """The task of `ticket`; the same one again until its group was told of. Errors as `TaskStream.draw`."""
        with self._lock:
            if ticket not in self._drawn:
                self._drawn[ticket] = self._index(ticket)
            index = self._drawn[ticket]
        return self._stream.tasks[index]

    def _index(self, ticket: int) -> int:
        t = ticket - self._stream.base
        k = math.floor(self._epsilon * t)
        if t < 0 or math.floor(self._epsilon * (t + 1)) > k:
            return self._stream.index(self._stream.base + k if t >= 0 else ticket)
        return self._choose()(self._place(ticket), address(self._stream.seed, ticket, _CHOICE))

    def _place(self, ticket: int) -> int:
        """How many tickets the sampler chose for before this one: its own clock."""
        t = max(0, ticket - self._stream.base)
        return t - math.floor(self._epsilon * t)

    def outcome(self, ticket: int, trajectories: Sequence[Trajectory]) -> Outcome:
        """What this process's group of `ticket`, scored, says of its task: for `observe`, in every process."""
        with self._lock:
            index = self._drawn.pop(ticket)
        return outcome(ticket, index, trajectories)

    def observe(self, outcomes: Iterable[Sequence[Any]], next_ticket: int) -> None:
        """Takes in what all processes told at one cut, in any order; every ticket below `next_ticket` is settled.

        What this process has drawn beyond it, under the state before, is under way or waits. With max_staleness 0 it is
        nothing, in every process alike; with more, AdaRFT begins in each where that process is, and after a resume
        where process 0 was.
        """
        if not self._sampler:
            return
        with self._lock:
            told = sorted(Outcome(*each) for each in outcomes)
            judged = [one._replace(ticket=self._place(one.ticket)) for one in told if not math.isnan(one.success)]
            undrawn = max(next_ticket, 1 + max(self._drawn, default=-1))
            self._set(self._sampler.update(self._state, judged, self._place(next_ticket), self._place(undrawn)))

    def _set(self, state: State) -> None:
        with self._lock:
            self._state = state
            self._choose = functools.cache(lambda: self._sampler.choose(state))  # made at the first draw under it

    def state_dict(self, next_ticket: int) -> dict[str, Any]:
        """What a resumed run needs, as plain data: the stream's place, and how far the sampler is from its start."""
        start = self._sampler.start() if self._sampler else {}
        with self._lock:
            state = {name: _changes(start[name], value) for name, value in self._state.items()}
            drawn = [[ticket, index] for ticket, index in sorted(self._drawn.items())]
        return {**self._stream.state_dict(next_ticket), "state": state, "drawn": drawn}

    def load_state_dict(self, saved: Mapping[str, Any]) -> bool:
        """Goes on from `saved`; with another data set, as from nothing. Returns whether it is the same. Errors and
        warnings: `TaskStream`'s.
        """
        same = self._stream.load_state_dict(saved)
        start = self._sampler.start() if self._sampler else {}
        changes = saved.get("state", {}) if same else {}  # none in a run from before there were samplers
        self._set({name: _changed(value, changes.get(name)) for name, value in start.items()})
        self._drawn = {int(ticket): int(index) for ticket, index in saved.get("drawn", ())} if same else {}
        return same


def outcome(ticket: int, index: int, trajectories: Sequence[Trajectory]) -> Outcome:
    """Of a scored group: the success and the reward of its judged members, and how far apart they are.

    Where the world reports no success, reward stands for it, within [0, 1]. A member that was given up is a failure, of
    reward 0, also where it is left out of what is learnt: or a task that is always given up would be one that nobody
    knows, and is asked again and again. All NaN where no member was judged.
    """
    judged = [t for t in trajectories if math.isfinite(reward(t)) or t.status is Status.ABANDONED]
    if not judged:
        return Outcome(ticket, index, 0, math.nan, math.nan, math.nan)
    rewards = [own if math.isfinite(own := reward(t)) else 0.0 for t in judged]
    mean = math.fsum(rewards) / len(rewards)
    solved = [
        min(1.0, max(0.0, own)) if is_unlabelled(t) else success(t) for t, own in zip(judged, rewards, strict=True)
    ]
    spread = math.fsum(abs(own - mean) for own in rewards) / len(rewards)
    return Outcome(ticket, index, len(judged), math.fsum(solved) / len(solved), mean, spread)


def admits(trajectories: Sequence[Trajectory], low: float, high: float) -> bool:
    """Whether the success rate of the judged members lies in [low, high]; where none was judged nothing speaks against.

    DAPO's 0 < p < 1 (2503.14476) is low = 1/2G, high = 1 - 1/2G, or `loop.is_equal`, which goes by the reward.
    """
    rate = outcome(0, 0, trajectories).success
    return not (rate < low or rate > high)


@dataclasses.dataclass(frozen=True)
class Hints:
    """Help in the prompt of training tasks, with a probability that falls to 0: prob · max(0, 1 - ticket / tickets).

    `hint` is the world's: what it says for a task, or None. Whether a ticket has its hint is addressed by (seed,
    ticket): all members of a group read the same prompt. It is world text like the rest of the prompt, never trained.
    """

    hint: Callable[[Task], str | None]
    prob: float
    tickets: int
    seed: int

    def add(self, task: Task, ticket: int) -> Task:
        """`task`, or it with the hint at the end of its prompt and in `data["hint"]`; held-out tasks as they are."""
        if task.split != "train":
            return task
        prob = self.prob * max(0.0, 1 - ticket / self.tickets)
        text = self.hint(task) if address(self.seed, ticket, _HINT) < prob else None
        return with_hint(task, text) if text else task


def with_hint(task: Task, text: str) -> Task:
    """`task` with a hint at the end of its prompt, and in `data["hint"]`."""
    last = task.prompt[-1]
    told = Message(last.role, f"{last.content}\nHint: {escape_tags(text)}")
    return dataclasses.replace(task, prompt=(*task.prompt[:-1], told), data={**task.data, "hint": text})


def address(seed: int, ticket: int, purpose: int) -> float:
    """The number in [0, 1) of (seed, ticket, purpose), by Philox: the same on every machine."""
    key, counter = np.array([seed, ticket], np.uint64), np.array([0, 0, 0, purpose], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def _changes(start: Any, value: Any) -> Any:
    """A number as it is; of an array the places that differ from `start`, and what is there."""
    if not isinstance(value, np.ndarray):
        return value
    places = np.flatnonzero(value != start)
    return [places.tolist(), value[places].tolist()]


def _changed(start: Any, changes: Any) -> Any:
    if changes is None:
        return start
    if not isinstance(start, np.ndarray):
        return changes
    value = start.copy()
    value[np.array(changes[0], int)] = changes[1]
    return value


def permutation(n: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
    """π_epoch: the same numbers for the same (n, seed, epoch) on every machine."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(n)


def fingerprint(tasks: Sequence[Task]) -> str:
    """SHA-256 of the number of tasks and of 64 of them, evenly spaced: a replaced, cut or reordered data set changes
    it.

    Does not cover: an edit of a task that is not among the 64 (reading all would cost a pass over the data at each
    start).
    """
    n = len(tasks)
    digest = hashlib.sha256(str(n).encode())
    for i in np.unique(np.linspace(0, n - 1, min(n, _PROBES)).round().astype(int)):
        task = tasks[int(i)]
        prompt = [[message.role, message.content] for message in task.prompt]
        digest.update(json.dumps([task.task_id, task.split, task.seed, prompt, task.data], default=str).encode())
    return digest.hexdigest()
