"""What an evaluation says: success with its interval, pass@k, turns, tokens, how episodes end."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.base import Task, World
from envs.play import play
from rl.metrics.episodes import describe
from rl.rollout.pool import Group
from rl.types import Row, Status, Trajectory


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
    """Chance that at least one of k samples succeeds, unbiased from n: 1 - C(n-c, k)/C(n, k) (Chen et al. 2021, eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: got k={k} of n={n} samples, want 1 <= k <= n")
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def summarise_scripted(world: World, policy: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """`summarise` for a scripted policy: it plays text, so its tokens are None."""
    env, groups = world.make_env(), []
    try:
        for i, task in enumerate(tasks):
            turns, facts = play(env, task, world.policies[policy](task))
            row = Row(*(np.zeros(0, d) for d in (np.int32, np.int32, np.bool_, np.float32, np.int32)))
            status = Status.DONE if len(turns) < env.spec.max_turns or facts["success"] else Status.TURN_LIMIT
            facts = {**facts, "turns": len(turns)}
            groups.append(Group(i, task, (Trajectory(task.task_id, i, 0, status, (row,), facts, {}),), False, 0))
    finally:
        env.close()
    return summarise(groups) | {
        "turns": _mean([float(g.trajectories[0].facts["turns"]) for g in groups]),
        "tokens": None,
    }


def summarise(groups: Sequence[Group]) -> dict[str, Any]:
    """Over every scored episode of `groups` (one group a task, its members the samples of the task).

    Keys: n (tasks), episodes, success (fraction of scored episodes), success_ci (Wilson, 95 %; episodes of one task are
    counted as independent), pass_at_k {k: mean over tasks}, turns, tokens, searches (means, where reported), status
    (counts, over all episodes), families {family: {n, success, turns, searches}}, exploited (fraction of scored episodes
    that a world's traps caught; null where the world has none).
    """
    everything = [t for group in groups for t in group.trajectories]
    scored = [(group, describe(t)) for group in groups for t in group.trajectories if t.status.scored]
    wins = sum(int(d["success"]) for _, d in scored)
    sizes = [sum(t.status.scored for t in group.trajectories) for group in groups]
    k_max = min(sizes, default=0)
    per_task = [
        (n, sum(int(describe(t)["success"]) for t in group.trajectories if t.status.scored))
        for n, group in zip(sizes, groups, strict=True)
    ]
    families = sorted({group.task.family for group in groups})
    return {
        "n": len(groups),
        "episodes": len(scored),
        "success": wins / len(scored) if scored else math.nan,
        "success_ci": wilson(wins, len(scored)),
        "pass_at_k": {k: _mean([pass_at_k(n, c, k) for n, c in per_task]) for k in _powers(k_max)},
        "turns": _mean([d["turns"] for _, d in scored]),
        "tokens": _mean([d["tokens"] for _, d in scored]),
        "searches": _mean([d["searches"] for _, d in scored if "searches" in d]),
        "status": dict(Counter(t.status.value for t in everything)),
        "families": {
            family: {"n": len(own)}
            | {name: _mean([d[name] for d in own if name in d]) for name in ("success", "turns", "searches")}
            for family in families
            for own in [[d for group, d in scored if group.task.family == family]]
        },
        "exploited": _mean([d["exploited"] for _, d in scored if "exploited" in d]),
    }


def _powers(k_max: int) -> list[int]:
    return [2**i for i in range(k_max.bit_length()) if 2**i <= k_max]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
