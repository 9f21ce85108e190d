"""A step's engine metrics are differences of two readings."""

from rl.metrics.engine import engine_metrics


def test_differences_and_shares():
    before = dict.fromkeys(
        "lanes_used lane_places tokens_kept tokens_sampled tokens_prefilled tokens_copied evictions compiles kv_kept "
        "publish_to_token_s".split(),
        10.0,
    )
    now = before | {
        "lanes_used": 16.0, "lane_places": 18.0, "tokens_kept": 19.0, "tokens_sampled": 22.0, "tokens_copied": 40.0,
        "kv_kept": 0.0, "publish_to_token_s": 0.5,
    }  # fmt: skip
    got = engine_metrics(before, now)
    assert got["engine/lane_occupancy_frac"] == 0.75 and got["engine/discarded_frac"] == 0.25
    assert (got["engine/tokens_copied"], got["engine/evictions"], got["engine/kv_kept"]) == (30.0, 0.0, 0.0)
    assert got["time/publish_to_token_s"] == 0.5
    idle = engine_metrics(now, now)
    assert idle["engine/lane_occupancy_frac"] == idle["engine/discarded_frac"] == 0.0
