"""A step's engine metrics are differences of two readings."""

import math

from rl.metrics.engine import engine_metrics
from rl.types import Mean

BEFORE = dict.fromkeys(
    "lanes_used lane_places tokens_kept tokens_sampled tokens_prefilled tokens_copied evictions compiles kv_kept "
    "idle_s publishes publish_to_token_s".split(),
    10.0,
)
NOW = BEFORE | {
    "lanes_used": 16.0, "lane_places": 18.0, "tokens_kept": 19.0, "tokens_sampled": 22.0, "tokens_copied": 40.0,
    "kv_kept": 0.0, "idle_s": 12.5, "publishes": 11.0, "publish_to_token_s": 10.5,
}  # fmt: skip


def test_differences_and_shares():
    got = engine_metrics(BEFORE, NOW)
    assert got["engine/lane_occupancy_frac"] == Mean(6.0, 8.0) and got["engine/discarded_frac"] == Mean(3.0, 12.0)
    assert (got["engine/tokens_copied"], got["engine/evictions"], got["engine/kv_kept"]) == (30.0, 0.0, 0.0)
    assert got["time/publish_to_token_s"] == Mean(0.5, 1.0) and got["time/engine_idle_s"] == 2.5


def test_a_step_without_a_measurement_has_none_and_adds_nothing():
    """A publish is told of once; shares of two steps are those of both together."""
    idle = engine_metrics(NOW, NOW)
    later = engine_metrics(NOW, NOW | {"lanes_used": 18.0, "lane_places": 30.0})
    for name in ("engine/lane_occupancy_frac", "engine/discarded_frac", "time/publish_to_token_s"):
        assert math.isnan(idle[name].value)
        got = engine_metrics(BEFORE, NOW)[name]
        assert got + idle[name] == got
    both = engine_metrics(BEFORE, NOW)["engine/lane_occupancy_frac"] + later["engine/lane_occupancy_frac"]
    assert both.value == 8 / 20
