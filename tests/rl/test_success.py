"""What an evaluation reports, against numbers worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import Task
from rl.metrics.success import pass_at_k, summarise, wilson
from rl.types import Row, Status, Trajectory


@pytest.mark.parametrize(
    ("successes", "n", "want"),
    [
        # p .8, z² 3.8416: centre (.8 + .19208) / 1.38416 = .71673, half 1.96 √(.016 + .009604) / 1.38416 = .22658
        (8, 10, (0.49015, 0.94331)),
        (0, 10, (0.0, 0.27754)),  # z²/n / (1 + z²/n): never the point 0
        (10, 10, (0.72246, 1.0)),
        (50, 100, (0.40383, 0.59617)),
    ],
)
def test_wilson_worked(successes, n, want):
    assert wilson(successes, n) == pytest.approx(want, abs=1e-5)


def test_wilson_of_nothing_is_nothing():
    assert all(map(math.isnan, wilson(0, 0)))


@given(st.integers(1, 500), st.data())
def test_wilson_holds_the_estimate_and_is_symmetric(n, data):
    c = data.draw(st.integers(0, n))
    low, high = wilson(c, n)
    assert 0 <= low <= c / n + 1e-12 and c / n - 1e-12 <= high <= 1 and low < high
    assert wilson(n - c, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "want"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3, 2)/C(4, 2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3, 3)/C(5, 3) = 1 - 1/10
        (5, 3, 3, 1.0),  # two failures cannot fill three draws
        (8, 0, 8, 0.0),
        (10, 3, 1, 0.3),
    ],
)
def test_pass_at_k_worked(n, c, k, want):
    assert pass_at_k(n, c, k) == pytest.approx(want)


@pytest.mark.parametrize(("n", "k"), [(4, 0), (4, 5), (0, 1)])
def test_pass_at_k_of_more_than_was_sampled_is_an_error(n, k):
    with pytest.raises(ValueError, match="want 1 <= k <= n"):
        pass_at_k(n, 0, k)


def trajectory(task, member, success, *, turns=1, tokens=2, status=Status.DONE, **facts):
    """`turns` turns of `tokens` sampled tokens each, after a prompt of one."""
    mask = np.array([False] + [True] * turns * tokens)
    row = Row(
        np.zeros(len(mask), np.int32),
        np.array([0, *np.repeat(np.arange(turns), tokens)], np.int32),
        mask,
        np.where(mask, -1, 0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )
    return Trajectory(task.task_id, 0, member, status, (row,), {"success": success} | facts, {})


def test_summary_worked():
    a, b = (Task(name, family, "test", 0, (), {}) for name, family in (("a", "one_hop"), ("b", "two_hop")))
    played = [
        (a, [trajectory(a, 0, True, searches=1, f1=1.0), trajectory(a, 1, False, turns=3, searches=3, f1=math.nan)]),
        (
            b,
            [
                trajectory(b, 0, True, status=Status.TURN_LIMIT, searches=2, f1=0.5),  # a limit is a failure
                trajectory(b, 1, False, tokens=4, searches=2, f1=0.0, answer="Peru"),
                trajectory(b, 2, True, status=Status.ENV_ERROR, searches=9, f1=1.0),  # not the policy's
            ],
        ),
    ]
    s = summarise(played)
    assert (s["n"], s["episodes"], s["success"]) == (2, 4, 0.25)
    assert s["success_ci"] == wilson(1, 4)
    assert s["pass_at_k"] == {1: 0.25, 2: 0.5}  # a: 1 of 2, b: 0 of 2
    assert (s["turns"], s["tokens"], s["searches"]) == (1.5, (2 + 6 + 2 + 4) / 4, 2.0)
    assert s["exploited"] is None
    assert s["status"] == {"done": 3, "turn_limit": 1, "env_error": 1}
    assert s["families"] == {
        "one_hop": {"n": 2, "success": 0.5, "turns": 2.0, "searches": 2.0},
        "two_hop": {"n": 2, "success": 0.0, "turns": 1.0, "searches": 2.0},
    }
    assert s["facts"]["f1"] == 0.5 and "answer" not in s["facts"]  # NaN is left out; text is no number


def test_summary_of_nothing_scored_claims_nothing():
    task = Task("a", "one_hop", "test", 0, (), {})
    s = summarise([(task, [trajectory(task, 0, True, status=Status.ENV_ERROR)])])
    assert s["episodes"] == 0 and math.isnan(s["success"]) and s["pass_at_k"] == {} and s["turns"] is None
    assert summarise([])["n"] == 0


def test_where_the_world_reports_no_success_there_is_none_to_give():
    facts = {"answer": "82", "well_formed": True}
    unlabelled = Trajectory("t", 0, 0, Status.DONE, (), facts, {"majority": 1.0})
    got = summarise([(Task("t", "sum1", "train", 0, (), {}), [unlabelled, unlabelled])])
    assert math.isnan(got["success"]) and got["facts"]["well_formed"] == 1 and got["pass_at_k"] == {}
    assert got["families"]["sum1"]["success"] is None and got["facts"]["reward"] == 1
