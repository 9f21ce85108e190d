"""Which task a ticket plays: a permutation for each epoch, addressed by (seed, epoch), not by what was drawn before."""

import functools
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from envs.base import Task

_PROBES = 64


class TaskStream:
    """ticket -> task: ticket t plays task π_e[i] with e, i = divmod(t - base, n), π_e a permutation of the n tasks.

    π_e is drawn by Philox with key (seed, e), so any ticket can be looked up in any order, by any process. `base` is
    0, or the ticket at which the data set was replaced. Thread-safe: `draw` reads only.
    """

    def __init__(self, tasks: Sequence[Task], seed: int):
        """Raises ValueError on an empty data set or a negative seed."""
        if not len(tasks) or seed < 0:
            raise ValueError(f"TaskStream: got {len(tasks)} tasks and seed {seed}, want at least one and a seed >= 0")
        self._tasks, self._seed, self._base = tasks, seed, 0
        self._order = functools.lru_cache(maxsize=4)(functools.partial(permutation, len(tasks), seed))
        self.fingerprint = fingerprint(tasks)

    def draw(self, ticket: int) -> Task:
        """The task of `ticket`. Raises IndexError for a ticket before this data set began."""
        if ticket < self._base:
            raise IndexError(f"draw: got ticket {ticket}, want at least {self._base}, where this data set began")
        return self._tasks[int(self._order(self.epoch(ticket))[(ticket - self._base) % len(self._tasks)])]

    def epoch(self, ticket: int) -> int:
        """How many times every task was drawn before `ticket`."""
        return (ticket - self._base) // len(self._tasks)

    def state_dict(self, next_ticket: int) -> dict[str, Any]:
        """What a resumed run needs; `next_ticket` is the next one to draw (the loop counts tickets)."""
        return {
            "seed": self._seed,
            "base": self._base,
            "next_ticket": next_ticket,
            "tasks": len(self._tasks),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`. With another data set, epoch 0 begins at `next_ticket`, with a warning.

        Raises ValueError for another seed: that is another run.
        """
        if state["seed"] != self._seed:
            saved = state["seed"]
            raise ValueError(f"TaskStream: got seed {self._seed}, want {saved} of the saved run; use another workdir")
        if (state["fingerprint"], state["tasks"]) == (self.fingerprint, len(self._tasks)):
            self._base = state["base"]
            return
        warnings.warn(
            f"TaskStream: the saved run drew from {state['tasks']} tasks ({state['fingerprint'][:12]}), now there are "
            f"{len(self._tasks)} ({self.fingerprint[:12]}): the new data set starts at its first epoch",
            stacklevel=2,
        )
        self._base = state["next_ticket"]


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
