"""What an evaluation says: success with its interval, pass@k, turns, tokens, how episodes end."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import Task
from rl.metrics.episodes import describe
from rl.types import Trajectory


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion; z 1.96 is 95 %. (nan, nan) where n is 0.

    centre = (p + z²/2n) / (1 + z²/n), half width = z √(p(1-p)/n + z²/4n²) / (1 + z²/n) (Wilson 1927).
    """
    if n == 0:
        return math.nan, math.nan
    p, shrink = successes / n, 1 + z * z / n
    centre, half = (p + z * z / (2 * n)) / shrink, z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Chance that one of k samples succeeds at least, unbiased: 1 - C(n-c, k)/C(n, k) (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: got k={k} of n={n} samples, want 1 <= k <= n")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def summarise(played: Sequence[tuple[Task, Sequence[Trajectory]]]) -> dict[str, Any]:
    """`summary` of pairs of a task and the episodes sampled for it."""
    return summary([measured(task, episodes) for task, episodes in played])


def measured(task: Task, episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """Of one task's episodes what a summary needs, as plain data: {family, status [values], scored [described]}."""
    return {
        "family": task.family,
        "status": [t.status.value for t in episodes],
        "scored": [describe(t) for t in episodes if t.status.scored],
    }


def summary(played: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over every scored episode of `played`, a `measured` record for each task.

    Keys: n (tasks), episodes, success (fraction of scored episodes, NaN where the world reports none), success_ci
    (Wilson, 95 %; episodes of one task are counted as independent), pass_at_k {k: mean over tasks}, turns, tokens,
    searches (means, where reported), status (counts, over all episodes), families {family: {n, success, turns,
    searches}}, facts {name: mean over the scored episodes}, exploited (fraction of scored episodes that a world's traps
    caught; None where it has none).
    """
    scored = [d for task in played for d in task["scored"]]
    per_task = [[d["success"] for d in task["scored"] if not math.isnan(d["success"])] for task in played]
    wins, judged = sum(int(sum(task)) for task in per_task), sum(map(len, per_task))
    k_max = min(map(len, per_task), default=0)
    own = {
        family: [d for task in played if task["family"] == family for d in task["scored"]]
        for family in sorted({task["family"] for task in played})
    }
    return {
        "n": len(played),
        "episodes": len(scored),
        "success": wins / judged if judged else math.nan,
        "success_ci": wilson(wins, judged),
        "pass_at_k": {k: _mean([pass_at_k(len(s), int(sum(s)), k) for s in per_task]) for k in powers_of_2(k_max)},
        **{name: _mean_of(name, scored) for name in ("turns", "tokens", "searches", "exploited")},
        "status": dict(Counter(status for task in played for status in task["status"])),
        "families": {
            family: {"n": len(ds)} | {name: _mean_of(name, ds) for name in ("success", "turns", "searches")}
            for family, ds in own.items()
        },
        "facts": {name: _mean_of(name, scored) for name in sorted({name for d in scored for name in d})},
    }


def _mean_of(name: str, described: Sequence[Mapping[str, float]]) -> float | None:
    return _mean([d[name] for d in described if name in d and not math.isnan(d[name])])


def powers_of_2(k_max: int) -> list[int]:
    """1, 2, 4, ... up to `k_max`."""
    return [2**i for i in range(k_max.bit_length()) if 2**i <= k_max]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
