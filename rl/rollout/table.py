"""The table of groups: which episodes are still to be played, and what their ends mean for their group.

A job is one attempt at one episode. A group leaves the table whichever way its members end: scored, left out as
ENV_ERROR after the budget of rl/rollout/failures.py, or CANCELLED. Each attempt has an id: what an attempt reports
that its member no longer waits for (it hung, and was given up) is discarded, and counted.

Every member that was submitted is scored, failed, cancelled or open; every attempt that began is a member's end, a
retry, or running; every late report is of an attempt that was given up.
"""

import dataclasses
import math
from collections import deque
from typing import NamedTuple

from envs.base import Task
from envs.failures import INFRASTRUCTURE
from models.sampling import Sampling
from rl.rollout.failures import Budget, Failure, failure_of, repeated
from rl.types import Status, Trajectory

MIN_SCORED = 2  # members of a group, for there to be a comparison
FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 10.0  # after a failure of the infrastructure
_COUNTS = (
    *("groups_submitted", "groups_done", "groups_dropped", "groups_cancelled"),
    *("members_submitted", "members_scored", "members_failed", "members_cancelled"),
    # attempts that ended, by how, and what became of them
    *("episodes", "env_errors", "infrastructure_errors", "data_errors", "retries", "late_attempts"),
)


@dataclasses.dataclass(frozen=True)
class Group:
    """The episodes of one ticket, by member. `dropped`: too few were scored to compare; the ticket's place goes to the
    next.
    """

    ticket: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    dropped: bool
    retries: int


@dataclasses.dataclass(eq=False)
class OpenGroup:
    """A group on the table."""

    ticket: int
    task: Task
    sampling: Sampling
    seed: int
    inbox: deque  # where the finished group goes
    ended: dict[int, Trajectory | None]
    failures: list[list[Failure]]  # of each member's attempts so far; its next attempt has their number
    retries: int = 0
    spent: int = 0  # retries for infrastructure


def pause_s(lasted_s: float) -> float:
    """Seconds in which nothing is to begin after a failure of the infrastructure, where `lasted_s` seconds have
    brought nothing but failures: as long again, so that the time doubles from try to try, within [.1, 10].
    """
    return min(max(FIRST_PAUSE_S, lasted_s), MOST_PAUSE_S)


class Job(NamedTuple):
    """The `attempt`-th attempt, from 0, at member `member` of a group."""

    group: OpenGroup
    member: int
    attempt: int

    def empty(self, status: Status, **facts: object) -> Trajectory:
        """An episode that ended as `status` before anything was sampled."""
        group = self.group
        facts = {"success": False, **facts}
        return Trajectory(group.task.task_id, group.ticket, self.member, status, (), facts, {})


class Table:
    """Groups, their jobs and their counts. Not thread-safe: the pool's lock guards it.

    All worlds of a pool ask the same services: where one fails for the infrastructure's sake no job is to begin before
    `not_before_s` (of the pool's clock, which says when an attempt ended), or until one is scored.
    `closing` (set by the pool): nothing is tried again, and a group that is cut is only counted, for nobody waits.
    """

    def __init__(self, budget: Budget, *, min_scored: int):
        if min_scored < 1:
            raise ValueError(f"got min_scored={min_scored}, want at least one scored member")
        self._budget, self._min_scored = budget, min_scored
        self.groups: set[OpenGroup] = set()
        self.jobs: deque[Job] = deque()
        self.counts = dict.fromkeys(_COUNTS, 0)
        # Attempts that ended as ENV_ERROR since one was scored, those of them for their data, and when the first did.
        self.failed_in_row, self.data_in_row, self.failing_since_s = 0, 0, 0.0
        self.not_before_s = -math.inf
        self.closing = False

    def add(self, group: OpenGroup) -> None:
        """Opens `group` and queues an attempt at each of its members."""
        self.groups.add(group)
        self.counts["groups_submitted"] += 1
        self.counts["members_submitted"] += len(group.ended)
        self.jobs.extend(Job(group, member, 0) for member in group.ended)

    def end(self, job: Job, trajectory: Trajectory, now_s: float) -> bool:
        """One attempt of a member is over at `now_s`: retry it, or record it and, with the last one, deliver the group.

        False: nobody waits for this attempt any more; it is counted, and changes nothing.
        """
        group, member = job.group, job.member
        if group.ended[member] is not None or job.attempt != len(group.failures[member]):
            self.counts["late_attempts"] += 1
            return False
        self.counts["episodes"] += 1
        if self.closing and trajectory.status is Status.ENV_ERROR:  # what it waited for was taken away
            trajectory = job.empty(Status.CANCELLED, **trajectory.facts)
        if trajectory.status is Status.ENV_ERROR:
            failures = group.failures[member]
            failures.append(failure_of(trajectory))
            self._count_error(failures[-1], now_s)
            if self._budget.allows(failures, group.spent):
                self._retry(job, failures[-1])
                return True
            facts = {**trajectory.facts, "repeated": repeated(failures)}
            trajectory = dataclasses.replace(trajectory, facts=facts)
        elif trajectory.status.scored:
            self.failed_in_row, self.data_in_row, self.not_before_s = 0, 0, -math.inf
        self._record(group, member, trajectory)
        return True

    def cancel(self, note: str) -> None:
        """Ends every open group: what has not ended is CANCELLED."""
        self.jobs.clear()
        for group in list(self.groups):
            for member in [m for m, t in group.ended.items() if t is None]:
                job = Job(group, member, len(group.failures[member]))
                self._record(group, member, job.empty(Status.CANCELLED, error=note))

    def _count_error(self, failure: Failure, now_s: float) -> None:
        lost = failure.kind == INFRASTRUCTURE
        for name in ("env_errors", "infrastructure_errors" if lost else "data_errors"):
            self.counts[name] += 1
        if not self.failed_in_row:
            self.failing_since_s = now_s
        self.failed_in_row += 1
        self.data_in_row += not lost
        if lost:
            self.not_before_s = now_s + pause_s(now_s - self.failing_since_s)

    def _retry(self, job: Job, failure: Failure) -> None:
        job.group.retries += 1
        job.group.spent += failure.kind == INFRASTRUCTURE
        self.counts["retries"] += 1
        # First in line: the rest of its group waits for it.
        self.jobs.appendleft(job._replace(attempt=job.attempt + 1))

    def _record(self, group: OpenGroup, member: int, trajectory: Trajectory) -> None:
        group.ended[member] = trajectory
        status = trajectory.status
        how = "scored" if status.scored else "failed" if status is Status.ENV_ERROR else "cancelled"
        self.counts[f"members_{how}"] += 1
        if all(t is not None for t in group.ended.values()):
            self._deliver(group)

    def _deliver(self, group: OpenGroup) -> None:
        self.groups.discard(group)
        trajectories = tuple(group.ended.values())
        cancelled = any(t.status is Status.CANCELLED for t in trajectories)
        dropped = sum(t.status.scored for t in trajectories) < min(self._min_scored, len(trajectories))
        self.counts["groups_cancelled" if cancelled else "groups_dropped" if dropped else "groups_done"] += 1
        if not (cancelled and self.closing):
            group.inbox.append(Group(group.ticket, group.task, trajectories, dropped or cancelled, group.retries))
