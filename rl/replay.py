"""Stored episodes in place of a pool: the loop submits tickets and takes groups, and nobody plays.

Off-policy: the policy that sampled them is another one, older by its own run's count. What corrects for it is the ratio
π/π_behavior of the loss, π_behavior being the log-probability that was stored with each token.
"""

import dataclasses
import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from envs.base import Task
from rl.episodes import read_episodes
from rl.rollout.table import MIN_SCORED, Group
from rl.types import Status, Trajectory


class Replay:
    """Stored groups, with as much of a Pool's face as rl/loop.py looks at.

    Ticket t is group t mod `len(self)`: they stand in the order of `workdirs` and of their tickets there, and after the
    last one the first comes again. `newest`: the newest version that sampled a token of them, each by its own run's
    count. Whether a group is dropped is decided anew, and so are its scores; what its task was beyond a name is not
    known. Memory: all episodes.

    Errors (ValueError): no episodes there; a group that does not have the members 0 to `size` - 1, each once.
    """

    def __init__(self, workdirs: Sequence[str | os.PathLike], size: int):
        self.workdirs = tuple(map(Path, workdirs))
        self.groups: list[tuple[Trajectory, ...]] = []
        for workdir in self.workdirs:
            found: dict[int, list[Trajectory]] = {}
            for trajectory in read_episodes(workdir):
                found.setdefault(trajectory.ticket, []).append(trajectory)
            if not found:
                raise ValueError(f"{workdir}: no episodes there; want a run that has finished a step")
            for ticket in sorted(found):
                members = sorted(found[ticket], key=lambda t: t.member)
                if [t.member for t in members] != list(range(size)):
                    raise ValueError(
                        f"{workdir}: group {ticket}: got members {[t.member for t in members]}, want {size} from 0 on, "
                        "or a group cannot be compared; set rl.group_size to that of the run"
                    )
                self.groups.append(tuple(members))
        self.newest = max(
            (int(row.version.max(initial=-1)) for group in self.groups for t in group for row in t.rows), default=-1
        )
        self._ready: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self.groups)

    def draw(self, ticket: int) -> Task:
        """What is known of the task of a ticket: its name."""
        name = self.groups[ticket % len(self)][0].task_id
        return Task(name, family="", split="train", seed=0, prompt=(), data={}, difficulty=math.nan)

    def submit_group(self, ticket: int, task: Task, size: int) -> None:
        """The group of `ticket` is the next that `next_group` gives, under that ticket."""
        members = tuple(dataclasses.replace(t, ticket=ticket) for t in self.groups[ticket % len(self)])
        scored = sum(t.status.scored for t in members)
        cancelled = any(t.status is Status.CANCELLED for t in members)
        dropped = cancelled or scored < min(MIN_SCORED, size)
        self._ready.append(Group(ticket, task, members, dropped, retries=0))

    def next_group(self, timeout_s: float | None = None) -> Group:
        """The groups in the order of their submission; they are there at once."""
        return self._ready.popleft()
