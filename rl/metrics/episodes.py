"""What the episodes of a batch were like, as Means. Host only.

| name | over | meaning |
|---|---|---|
| `episode/success` | scored episodes | ended by itself with success |
| `episode/reward` | judged episodes | sum of scores |
| `episode/turns`, `episode/tokens` | scored episodes | turns with a sampled token; sampled tokens |
| `episode/{fact}` | scored episodes | every numeric fact that the world reports (searches, f1, malformed, ...) |
| `episode/recovery_frac` | failed tool calls | calls that found something right after one (nothing, an error, misled) |
| `episode/success_after_fork` | episodes with such a call | success |
| `calls/{tool}_frac` | calls of scored episodes | which tools are called, where the world says `calls` |
| `episode/env_error_frac` | all episodes | the world's fault, not the policy's |
| `episode/infrastructure_frac`, `episode/data_frac` | all episodes | the two kinds of it (envs/failures.py) |
| `status/{status}` | all episodes | how episodes end |
| `{name}_by_status/{status}` | episodes that ended so | reward, turns, tokens, searches, unsupported by how they end |
| `family/{family}/{name}` | as above | success and these, apart by kind of task (of search: by hops) |

Of each reward term (`term_means`):

| name | over | meaning |
|---|---|---|
| `reward/{term}/raw` | episodes that it judged | the term's own value |
| `reward/{term}/weighted` | episodes that it judged | its part in the reward |
| `reward/{term}/not_judged_frac` | scored episodes | NaN: the episode is in no batch |
| `reward/{term}/{count}` | - | of a term that asks somebody: calls, failures, ..., since the start of this process |
"""

import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from envs.failures import DATA, INFRASTRUCTURE
from rl.rewards.compose import RewardTerm, reward
from rl.rewards.outcome import is_unlabelled, success
from rl.types import Mean, Status, Trajectory

_TOO_LARGE = 1e300  # to be added up; infinite is too
BY_STATUS = ("reward", "turns", "tokens", "searches", "unsupported")
BY_FAMILY = ("success", *BY_STATUS)


def episode_means(episodes: Sequence[Trajectory], *, families: Mapping[str, str] | None = None) -> dict[str, Mean]:
    """Means over all that was rolled out; hand in refused groups too (leaving them out would bias every number).

    `families` maps task_id -> family; an episode whose task it lacks is in no family's numbers. The table of names
    stands at the top of this file.
    """
    described = [(trajectory, describe(trajectory)) for trajectory in episodes]
    out: dict[str, Mean] = {}

    def add(name: str, values: Iterable[float]) -> None:
        known = [float(v) for v in values if abs(v) < _TOO_LARGE]  # nor NaN
        out[name] = Mean(math.fsum(known), len(known))

    names = dict.fromkeys(name for _, numbers_ in described for name in numbers_)
    for name in names:
        add(f"episode/{name}", (d[name] for _, d in described if name in d))
    failures = sum(d.get("forks", d.get("empty_results", 0) + d.get("tool_errors", 0)) for _, d in described)
    if "recovered" in names:
        out["episode/recovery_frac"] = Mean(sum(d.get("recovered", 0) for _, d in described), failures)
    calls = Counter()
    for trajectory in episodes:
        calls.update(_calls(trajectory.facts) if trajectory.status.scored else {})
    out |= {f"calls/{tool}_frac": Mean(n, calls.total()) for tool, n in sorted(calls.items())}
    add("episode/env_error_frac", (t.status is Status.ENV_ERROR for t in episodes))
    for kind in (INFRASTRUCTURE, DATA):
        failed = (t.status is Status.ENV_ERROR and t.facts.get("failure") == kind for t in episodes)
        add(f"episode/{kind}_frac", failed)
    for status in Status:
        add(f"status/{status.value}", (t.status is status for t in episodes))
        if status.scored and any(t.status is status for t in episodes):
            for name in (n for n in BY_STATUS if n in names):
                own = (d[name] for t, d in described if t.status is status and name in d)
                add(f"{name}_by_status/{status.value}", own)
    if families is not None:
        for family in sorted({families[t.task_id] for t in episodes if t.task_id in families}):
            for name in (n for n in BY_FAMILY if n in names):
                own = (d[name] for t, d in described if families.get(t.task_id) == family and name in d)
                add(f"family/{family}/{name}", own)
    return out


def term_means(terms: Sequence[RewardTerm], episodes: Sequence[Trajectory]) -> dict[str, Mean]:
    """What each term gave, over all that was scored with `terms`; the second table at the top of this file."""
    out: dict[str, Mean] = {}
    for term in terms:
        given = [t.scores[term.name] for t in episodes if t.status.scored]
        known = [score for score in given if abs(score) < _TOO_LARGE]
        total = math.fsum(known)
        out[f"reward/{term.name}/raw"] = Mean(total / term.weight, len(known)) if term.weight else Mean(0.0, 0)
        out[f"reward/{term.name}/weighted"] = Mean(total, len(known))
        out[f"reward/{term.name}/not_judged_frac"] = Mean(len(given) - len(known), len(given))
        counts = term.stats() if term.stats is not None else {}
        out |= {f"reward/{term.name}/{name}": Mean(count, 1) for name, count in counts.items()}
    return out


def _calls(facts: Mapping[str, Any]) -> dict[str, float]:
    """Calls by tool; of a world that calls something else so, none."""
    found = facts.get("calls")
    if not isinstance(found, Mapping):
        return {}
    return {
        k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, numbers.Real) and 0 <= v < _TOO_LARGE
    }


def describe(trajectory: Trajectory) -> dict[str, float]:
    """The numbers of one episode by name; empty if its status is not scored. Reward is NaN where it was not judged, and
    success where the world does not report it (it has no labels).
    """
    if not trajectory.status.scored:
        return {}
    turns = {int(t) for row in trajectory.rows for t in np.unique(row.turn[row.action_mask])}
    facts = {
        name: float(value) for name, value in trajectory.facts.items() if isinstance(value, numbers.Real | np.bool_)
    }
    return facts | {
        "success": math.nan if is_unlabelled(trajectory) else success(trajectory),
        "reward": reward(trajectory),
        # a scripted episode has no rows: who played it says
        "turns": float(len(turns)) if trajectory.rows else float(trajectory.facts.get("turns", 0)),
        "tokens": float(trajectory.n_actions),
    }
