"""A step's metrics of engine and pool are differences of two readings."""

import math

from rl.metrics.engine import engine_metrics, pool_metrics
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


def test_what_a_pool_did_and_lost_in_a_step():
    before = {"late_attempts": 1, "lost_threads": 2, "world_steps": 10, "world_step_s": 4.0}
    now = {"late_attempts": 4, "lost_threads": 2, "world_steps": 16, "world_step_s": 7.0}
    lost = {"rollout/late_attempts": 3, "rollout/lost_threads": 0, "time/world_step_s": Mean(3.0, 6)}
    assert pool_metrics(before, now) == lost
    assert math.isnan(pool_metrics(now, now)["time/world_step_s"].value)  # no call, no measurement
    fleet = {"fleet_started": 2, "fleet_died": 0, "fleet_retired": 0, "fleet_hung_calls": 1, "fleet_members": 2}
    later = {"fleet_started": 4, "fleet_died": 1, "fleet_retired": 1, "fleet_hung_calls": 5, "fleet_members": 1}
    assert pool_metrics(before | fleet, now | later) == lost | {
        "rollout/fleet_started": 2,
        "rollout/fleet_died": 1,
        "rollout/fleet_retired": 1,
        "rollout/fleet_hung_calls": 4,
        "rollout/fleet_members": 1,  # those that are there, not a difference
    }
