"""Each alarm rings on the run it is for, and not on the healthy one beside it."""

import io
import json

import pytest

from rl.metrics.alarms import NAMES, WATCHED, Limits, ringing
from rl.monitor import Monitor

LIMITS = Limits(window=2)
HEALTHY = {
    "policy/entropy": 1.0,
    "policy/kl": 0.01,
    "policy/ref_kl": 0.1,
    "policy/engine_gap_max": 1e-5,
    "batch/equal_groups_frac": 0.5,
    "episode/tokens": 60.0,
    "episode/env_error_frac": 0.0,
    "episode/success": 0.4,
    "episode/unsupported": 0.1,
}


def run_of(*later, steps=4):
    """Healthy records, the last ones changed."""
    return [HEALTHY] * (steps - len(later)) + [HEALTHY | changes for changes in later]


CASES = [
    ("entropy_collapse", "policy/entropy", [{"policy/entropy": 0.05}] * 2, [{"policy/entropy": 0.2}] * 2),
    ("kl_spike", "policy/kl", [{"policy/kl": 0.6}], [{"policy/kl": 0.4}]),
    ("kl_spike", "policy/ref_kl", [{"policy/ref_kl": 0.6}], [{"policy/ref_kl": 0.6}, {}]),
    ("length_drift", "episode/tokens", [{"episode/tokens": 130.0}] * 2, [{"episode/tokens": 110.0}] * 2),
    ("length_drift", "episode/tokens", [{"episode/tokens": 20.0}] * 2, [{"episode/tokens": 40.0}] * 2),
    ("logp_gap", "policy/engine_gap_max", [{"policy/engine_gap_max": 0.2}], [{"policy/engine_gap_max": 0.05}]),
    (
        "equal_groups",
        "batch/equal_groups_frac",
        [{"batch/equal_groups_frac": 0.9}] * 2,
        [{"batch/equal_groups_frac": 0.5}, {"batch/equal_groups_frac": 1.0}],
    ),
    ("env_errors", "episode/env_error_frac", [{"episode/env_error_frac": 0.2}], [{"episode/env_error_frac": 0.1}]),
    (
        "fabrication",
        "episode/unsupported",
        [{"episode/success": 0.6, "episode/unsupported": 0.3}] * 2,
        [{"episode/success": 0.3, "episode/unsupported": 0.3}] * 2,  # a policy that simply gets worse
    ),
    (
        "fabrication",
        "episode/unsupported",
        [{"episode/success": 0.6, "episode/unsupported": 0.3}] * 2,
        [{"episode/success": 0.6, "episode/unsupported": 0.15}] * 2,
    ),
]


@pytest.mark.parametrize(("name", "metric", "ill", "well"), CASES)
def test_it_rings_for_the_ill_run_and_not_for_the_healthy_one(name, metric, ill, well):
    (alarm,) = ringing(run_of(*ill), LIMITS)
    assert (alarm.name, alarm.metric) == (name, metric)
    assert str(alarm).startswith(f"{name}: {metric} is ")
    assert ringing(run_of(*well), LIMITS) == []


def test_every_alarm_has_its_case_and_every_metric_is_watched():
    assert {case[0] for case in CASES} == set(NAMES)
    assert set(HEALTHY) == set(WATCHED)


def test_what_the_alarms_say_are_numbers_of_the_run():
    (alarm,) = ringing(run_of({"policy/entropy": 0.04}, {"policy/entropy": 0.02}), LIMITS)
    assert (alarm.value, alarm.limit) == (pytest.approx(0.03), pytest.approx(0.1))


@pytest.mark.parametrize("records", [[], [{}], [dict.fromkeys(WATCHED)] * 5, run_of(steps=20)])
def test_nothing_known_or_all_well_is_no_alarm(records):
    assert ringing(records, LIMITS) == []


def test_a_comparison_waits_until_its_two_windows_are_apart():
    collapsed = [{"policy/entropy": entropy} for entropy in (1.0, 0.0, 0.0)]
    assert ringing(collapsed, LIMITS) == []
    assert [alarm.name for alarm in ringing([*collapsed, {"policy/entropy": 0.0}], LIMITS)] == ["entropy_collapse"]


def test_records_and_console_say_what_rings_and_a_resumed_run_remembers(tmp_path):
    collapsed, out = {"policy/entropy": 0.0}, io.StringIO()
    for step, record in enumerate([HEALTHY, HEALTHY, collapsed, collapsed], 1):  # a new process at each step
        monitor = Monitor(
            tmp_path, first_step=step, stream=out, tensorboard=False, limits=LIMITS, console={}, console_every=10
        )
        monitor.write(step, record)
        monitor.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["alarm/entropy_collapse"] for record in records] == [0, 0, 0, 1]
    assert {f"alarm/{name}" for name in NAMES} <= records[0].keys()
    assert "step     4 | ALARM entropy_collapse: policy/entropy is 0, limit 0.1\n" in out.getvalue()
    assert out.getvalue().count("ALARM") == 1, "told at once, whatever console_every"
