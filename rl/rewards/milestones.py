"""Sub-goals on the way that the world itself checks, each paid once in an episode."""

import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rl.rewards.compose import RewardTerm
from rl.rewards.outcome import read_fact
from rl.types import Trajectory


def milestones_term(weight: float, *, names: Sequence[str] = ()) -> RewardTerm:
    """The share of the milestones `names` that were reached, each paid in the turn that first reached it; () are all
    that the world reports.

    Reads `facts["milestones"]`, {name: turn from 0, or None while it is not reached}. As a mapping it has one turn for
    each name, so that reaching a milestone again pays nothing. Errors: ValueError for a name twice.
    """
    if isinstance(names, str) or len(set(names)) < len(names):
        raise ValueError(f"milestones: got names {names!r}, want each once")
    return RewardTerm("milestones", weight, "turn", partial(paid, names=tuple(names)), reads=("milestones",))


def paid(trajectory: Trajectory, *, names: Sequence[str] = ()) -> list[float]:
    """Pay by turn, up to the last that pays: each reached milestone gives 1 / (number of milestones) in its turn.

    Errors: ValueError for a name that the world does not report, or for what is no turn.
    """
    reported = _reported(read_fact(trajectory, "milestones", at_limit=None), trajectory, names)
    turns = Counter(turn for turn in reported.values() if turn is not None)
    return [turns[turn] / len(reported) for turn in range(max(turns, default=-1) + 1)]


def _reported(given: Any, trajectory: Trajectory, names: Sequence[str]) -> dict[str, int | None]:
    if given is None:  # a limit before the first report
        return {}
    if not isinstance(given, Mapping) or not all(_is_turn(turn) for turn in given.values()):
        raise ValueError(
            f"episode {trajectory.task_id} (ticket {trajectory.ticket}): got facts['milestones']={given!r}, want "
            "{name: turn from 0, or None}; mend the world's step"
        )
    absent = [name for name in names if name not in given]
    if absent:
        raise ValueError(
            f"episode {trajectory.task_id} (ticket {trajectory.ticket}): no milestone {absent[0]!r}, the world reports "
            f"{sorted(given)}; name some of them in reward.options.milestones.names"
        )
    return {name: given[name] for name in names or given}


def _is_turn(turn: Any) -> bool:
    return turn is None or (isinstance(turn, numbers.Integral) and not isinstance(turn, bool) and turn >= 0)
