"""Tasks that are not drawn any more, because their world fails on them again and again, and alike.

What groups have proved (`rl.rollout.failures.deterministic`) enters at the cut of a batch, in ticket order, in every
process alike, as what the curriculum is told does. With max_staleness 0 all tickets of a batch are drawn after the cut
before it: which groups form a batch stays a function of tickets and of what worlds do. With more, what was drawn before
the cut is played all the same.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_FEW = 20  # tasks met: a share of fewer says little


class QuarantineError(RuntimeError):
    """So many tasks fail that the world is broken."""


@dataclasses.dataclass
class Held:
    """A task in quarantine: by what it failed, how many episodes did, and what the first one said."""

    task_id: str
    signature: str
    count: int
    error: str


class Quarantine:
    """Task ids that are held, of `tasks` in all. `report(new, all)` is called by `tell` where that has changed.

    More than `max_frac` of the tasks met so far (at least of 20, at most of `tasks`), or all, are too many. A task is
    met each time that a group of it is played.
    `holds` may be asked in any thread.
    """

    def __init__(
        self,
        tasks: float = math.inf,
        *,
        max_frac: float = 1.0,
        report: Callable[[Sequence[Held], Sequence[Held]], None] = lambda new, all_: None,
    ):
        self._tasks, self._max_frac, self._report = tasks, max_frac, report
        self._met = 0  # groups that were played: of one epoch the tasks
        self._held: dict[str, Held] = {}
        self._new: list[Held] | None = None  # since the last report; None: nothing has changed

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, task_id: str) -> bool:
        """Whether the task is not to be played."""
        return task_id in self._held

    def add(self, failures: Iterable[Mapping[str, Any]], played: int) -> None:
        """Takes what the groups of a batch have proved, `played` in all. Raises QuarantineError, after a report."""
        self._met += played
        for failure in failures:
            self._new = [] if self._new is None else self._new
            held = self._held.get(failure["task_id"])
            if held is None:  # with max_staleness > 0 it may have been under way more than once
                self._new.append(self._held.setdefault(failure["task_id"], Held(**failure)))
            else:
                held.count += failure["count"]
        self._check()

    def tell(self) -> None:
        """Reports what has changed since the last time; apart from `add`, because a report may fail in one process."""
        if self._new is not None:
            new, self._new = self._new, None
            self._report(new, [*self._held.values()])

    def _check(self) -> None:
        met = max(min(self._met, self._tasks), _FEW)
        everything = len(self) >= self._tasks
        if not everything and len(self) <= self._max_frac * met:
            return
        self.tell()
        last = list(self._held.values())[-1]
        want = "want one that can be played" if everything else f"want at most {self._max_frac:g} of {met} met"
        remedy = "" if everything else ", or raise rollout.max_quarantined_frac"
        raise QuarantineError(
            f"got {len(self)}{' (all)' if everything else ''} tasks on which the world always fails, {want}; the last: "
            f"{last.task_id}: {last.error}; mend the world or its data (quarantine.jsonl names them){remedy}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data, for the host tree of a checkpoint."""
        return {"met": self._met, "held": [dataclasses.asdict(held) for held in self._held.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`; what is held is reported, and nothing of it as new."""
        self._met = state["met"]
        self._held = {saved["task_id"]: Held(**saved) for saved in state["held"]}
        self._report([], [*self._held.values()])
