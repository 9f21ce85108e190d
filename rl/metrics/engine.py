"""What engine and pool did for one step, between two readings of their stats."""

from collections.abc import Mapping

from rl.types import Mean


def engine_metrics(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, Mean | float]:
    """Of this process's engine alone: counts as numbers, shares and times as Means, which add over steps and processes.

    `engine/lane_occupancy_frac`: lanes that had a turn, of all lanes of the rounds run. `engine/discarded_frac`: tokens
    sampled beyond a stop string that only the host could see. `engine/tokens_copied`: KV that group members took from
    one another instead of computing it; `engine/tokens_prefilled`: computed, that of evicted sessions and of an update
    included. `engine/kv_kept`: 1 where KV of older weights is kept. `time/publish_to_token_s`: from a publish to the
    first token of its weights, over the publishes whose first token came in this step; count 0 where none did.
    `time/engine_idle_s`: in which nobody asked it for anything (what the learner waits for a batch is
    `time/rollout_s`).
    """
    did = {name: now[name] - before[name] for name in before}
    return {
        "engine/lane_occupancy_frac": Mean(did["lanes_used"], did["lane_places"]),
        "engine/discarded_frac": Mean(did["tokens_sampled"] - did["tokens_kept"], did["tokens_sampled"]),
        "engine/tokens_prefilled": did["tokens_prefilled"],
        "engine/tokens_copied": did["tokens_copied"],
        "engine/evictions": did["evictions"],
        "engine/compiles": did["compiles"],
        "engine/kv_kept": now["kv_kept"],
        "time/engine_idle_s": did["idle_s"],
        "time/publish_to_token_s": Mean(did["publish_to_token_s"], did["publishes"]),
    }


def pool_metrics(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, Mean | float]:
    """Of this process's pool alone, in the step. `time/world_step_s`: one call of a world's `step`, evaluation's apart.
    `rollout/late_attempts` reported after they had been given up; `rollout/lost_threads` hang in a call. Of a fleet
    `rollout/fleet_started`, `_died`, `_retired` members and `_hung_calls`, and the `rollout/fleet_members` that can be
    played in now.
    """
    steps_s, steps = (now[name] - before[name] for name in ("world_step_s", "world_steps"))
    did: dict[str, Mean | float] = {"time/world_step_s": Mean(steps_s, steps)}
    did |= {f"rollout/{name}": now[name] - before[name] for name in ("late_attempts", "lost_threads")}
    if "fleet_members" not in now:
        return did
    counted = ("fleet_started", "fleet_died", "fleet_retired", "fleet_hung_calls")
    fleet = {f"rollout/{name}": now[name] - before[name] for name in counted}
    return {**did, **fleet, "rollout/fleet_members": now["fleet_members"]}
