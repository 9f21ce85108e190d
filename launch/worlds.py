"""Where the instances of a world are: threads of this process, processes of this host, or Ray actors."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from envs.base import Env, World
from envs.fleet import ray_actor
from envs.fleet.fleet import Fleet
from envs.fleet.process import Process
from launch.cli import validating
from launch.plan import Plan
from rl.rollout.concurrency import CallLimit


@dataclasses.dataclass(frozen=True)
class Placed:
    """What a pool plays in: where an instance comes from, when the world may be called (None: at any time), and the
    counts of the fleet that it is in.
    """

    make_env: Callable[[], Env]
    calls: CallLimit | None
    counts: Callable[[], Mapping[str, int]] = dict


def check(plan: Plan) -> None:
    """Errors (ValueError): what the place needs is not installed."""
    if plan.rollout.worlds == "ray":
        ray_actor.check_installed()


@contextlib.contextmanager
def placed(plan: Plan, world: World) -> Iterator[Placed]:
    """The world where rollout.worlds says, for as long as the block runs. Other places make it anew, by its name.

    Errors: FleetError where it cannot be made there.
    """
    r = plan.rollout
    if r.worlds == "threads":
        yield Placed(world.make_env, CallLimit(r.calls_at_once) if r.calls_at_once else None)
        return
    with _members(r.worlds, r.ray_address) as member:
        start = partial(member, plan.world, plan.world_options)
        with contextlib.closing(Fleet(start, r.processes, deadline_s=deadline_s(r.call_deadline_s))) as fleet:
            calls = CallLimit(r.calls_at_once or math.inf, fleet.ready, patience_s=fleet.patience_s)
            yield Placed(fleet.make_env, calls, fleet.stats)


def deadline_s(call_deadline_s: float) -> float:
    """Of a fleet, where a pool gives a thread up at `call_deadline_s`: sooner, so that the fleet gives up the call."""
    return call_deadline_s - min(1.0, 0.1 * call_deadline_s)


@contextlib.contextmanager
def _members(worlds: str, address: str) -> Iterator[Callable]:
    """What makes one member of the fleet."""
    if worlds == "processes":
        yield Process
        return
    with validating():
        began = ray_actor.connect(address)
    try:
        yield ray_actor.RayActor
    finally:
        if began:
            ray_actor.disconnect()
