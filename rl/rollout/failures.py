"""What follows from an ENV_ERROR: whether its member is tried again, and whether its task is drawn again.

Of the infrastructure's failures (envs/failures.py) a member survives `infrastructure` and a group `group`; of those of
the task's data a member survives `data`: the two budgets are separate. Every further try is on a fresh world. A data
failure whose signature comes back on a fresh world is *repeated*: it is not tried a third time, and where no member of
a group came through, for that reason, the failure is deterministic and the task is quarantined (rl/quarantine.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envs.failures import DATA, INFRASTRUCTURE, causes, kind_of, placed, signature_of, stable
from rl.types import Status, Trajectory


class Failure(NamedTuple):
    """What is known of one attempt that ended as ENV_ERROR."""

    kind: str  # envs.failures.INFRASTRUCTURE or DATA
    signature: str


@dataclasses.dataclass(frozen=True)
class Budget:
    """Further tries: of one member by the kind of its failures, and of a group for the infrastructure's in all."""

    infrastructure: int = 2
    data: int = 1
    group: int = 8

    def __post_init__(self):
        if min(dataclasses.astuple(self)) < 0:
            raise ValueError(f"Budget: got {self}, want no negative number of tries")

    def allows(self, failures: Sequence[Failure], spent: int) -> bool:
        """Whether a member that failed as `failures` say, oldest first, is tried again; its group has `spent` so many
        tries on infrastructure.
        """
        last = failures[-1]
        own = sum(failure.kind == last.kind for failure in failures)
        if last.kind == INFRASTRUCTURE:
            return own <= self.infrastructure and spent < self.group
        return own <= self.data and not repeated(failures)


BUDGET = Budget()


def repeated(failures: Sequence[Failure]) -> bool:
    """Whether the last failure is of the task's data and has come before; each further try was on a fresh world."""
    *before, last = failures
    return last.kind == DATA and last in before


def failure_facts(error: BaseException) -> dict[str, str]:
    """`error`, what was raised and where in the world it came from; `failure`, its kind; `signature`."""
    *_, root = causes(error)
    return {"error": placed(root), "failure": kind_of(error), "signature": signature_of(error)}


def failure_of(trajectory: Trajectory) -> Failure:
    """Of an episode that ended as ENV_ERROR; where nothing more is said of it, its own text is what it had."""
    facts = trajectory.facts
    return Failure(facts.get("failure", DATA), facts.get("signature") or stable(str(facts.get("error", ""))))


def deterministic(trajectories: Sequence[Trajectory], *, least: int = 2) -> dict[str, Any] | None:
    """What the group of one task has proved of it: None, or {"task_id", "signature", "count", "error"}.

    Proved: nobody came through, each member that infrastructure did not take failed twice alike, the second time on a
    fresh world, and these are `least` members (all, of a smaller group). `count`: the members; `error`: the first one.
    """
    failed = [t for t in trajectories if t.status is Status.ENV_ERROR]
    own = [t for t in failed if failure_of(t).kind == DATA]
    if len(failed) < len(trajectories) or len(own) < max(1, min(least, len(trajectories))):
        return None
    if not all(_is_repeated(t.facts) for t in own):
        return None
    first = own[0]
    error = str(first.facts.get("error", ""))
    return {"task_id": first.task_id, "signature": failure_of(first).signature, "count": len(own), "error": error}


def _is_repeated(facts: Mapping[str, Any]) -> bool:
    return facts.get("repeated") is True
