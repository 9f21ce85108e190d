"""What the engine did for one step, between two readings of `Engine.stats()`."""

from collections.abc import Mapping


def engine_metrics(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Plain numbers, of this process's engine alone.

    `engine/lane_occupancy_frac`: lanes that had a turn, of all lanes of the rounds run. `engine/discarded_frac`: tokens
    sampled beyond a stop string that only the host could see. `engine/tokens_copied`: KV that group members took from
    one another instead of computing it; `engine/tokens_prefilled`: computed, that of evicted sessions and of an update
    included. `engine/kv_kept`: 1 where KV of older weights is kept. `time/publish_to_token_s`: from the last publish to
    the first token of the new weights.
    """
    did = {name: now[name] - before[name] for name in before}
    return {
        "engine/lane_occupancy_frac": did["lanes_used"] / max(1, did["lane_places"]),
        "engine/discarded_frac": (did["tokens_sampled"] - did["tokens_kept"]) / max(1, did["tokens_sampled"]),
        "engine/tokens_prefilled": did["tokens_prefilled"],
        "engine/tokens_copied": did["tokens_copied"],
        "engine/evictions": did["evictions"],
        "engine/compiles": did["compiles"],
        "engine/kv_kept": now["kv_kept"],
        "time/publish_to_token_s": now["publish_to_token_s"],
    }
