"""A timeline: shares by worked numbers, a trace that a viewer reads, and phases of the loop that leave no gap."""

import json

import pytest

from launch import runs
from rl.timeline import Timeline, shares, unrecorded
from tests.rl.test_loop import GOOD, FakePool, run


def filled():
    """The learner waits for 4 s, learns for 2, waits for 1, learns for 3, twice in phases; the engine is idle for 3 of
    these 10 s, of which 1 while it is waited for.
    """
    timeline = Timeline()
    learner, engine = timeline.track("learner"), timeline.track("engine")
    for name, began, ended in [("rollout", 10, 14), ("learn", 14, 16), ("rollout", 16, 17), ("learn", 17, 20)]:
        learner(name, began, ended)
    for name, began, ended in [("idle", 5, 11), ("decode", 11, 15), ("idle", 15, 16), ("prefill", 16, 19)]:
        engine(name, began, ended)
    engine("idle", 19, 25)
    return timeline


def test_shares():
    found = shares(filled())
    assert found["learner"] == pytest.approx({"rollout": 0.5, "learn": 0.5})
    assert found["engine"] == pytest.approx({"idle": 0.3, "decode": 0.4, "prefill": 0.3})
    assert found["engine_idle"] == pytest.approx({"rollout": 1 / 5, "learn": 2 / 5})
    assert found["learner_idle"] == pytest.approx({"idle": 1 / 3, "decode": 3 / 4, "prefill": 1 / 3})
    assert shares(Timeline()) == {}


def test_a_trace_has_a_thread_for_each_track_and_microseconds_from_the_first_span(tmp_path):
    with pytest.raises(RuntimeError, match="whatever"), runs.tracing(filled(), tmp_path / "timeline.json"):
        raise RuntimeError("whatever way it ends")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans[0] == ("learner", "rollout", 5e6, 4e6) and spans[4] == ("engine", "idle", 0, 6e6) and len(spans) == 9
    with runs.tracing(None, tmp_path / "none.json"):
        pass
    assert not (tmp_path / "none.json").exists() and unrecorded("idle", 0.0, 1.0) is None


def test_the_newest_spans_of_a_track_are_kept():
    timeline = Timeline(most=2)
    recorder = timeline.track("engine")
    for i in range(4):
        recorder("decode", i, i + 1)
    assert [span.began_s for span in timeline.spans("engine")] == [2, 3] and timeline.spans("learner") == []


def test_the_phases_of_the_loop_follow_one_another():
    timeline = Timeline()
    run(FakePool(lambda ticket: GOOD), span=timeline.track("learner"))
    spans = timeline.spans("learner")
    step = ["rollout", "batch", "agree", "learn", "publish", "keep"]
    assert [s.name for s in spans if s.name != "eval"] == step * (len(spans) // 6)
    for before, after in zip(spans, spans[1:], strict=False):
        assert before.ended_s <= after.began_s
        if after.name != "rollout":  # of the next step
            assert before.ended_s == after.began_s
