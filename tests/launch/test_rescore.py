"""Stored episodes under another reward: scores, advantages, what changed, and bad input in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.arg import ConfigError
from launch import rescore
from rl.episodes import EpisodeLog
from rl.rewards.compose import score_group
from rl.rewards.terms import make_terms
from rl.types import Status
from tests.rl.test_reward_terms import episode

ROOT = Path(__file__).resolve().parents[2]


def member(ticket, number, success, turns=((1, 2),), status=Status.DONE, **facts):
    played = episode(turns, status, number, success=success, searches=1, **facts)
    return type(played)(**{**vars(played), "ticket": ticket, "task_id": f"task-{ticket}"})


# Rewards before: success; after: success + 0.3·step_cost over 3 turns + 0.3·f1.
GROUPS = [
    [member(0, 0, True, [[1], [1], [1]], f1=0.0), member(0, 1, False, [[1]], f1=1.0)],  # stays ahead, by less
    [member(1, 0, False, [[1], [1], [1]], f1=0.0), member(1, 1, False, [[1]], f1=0.0)],  # equal before
    [
        member(2, 0, True, [[1]], f1=1.0),
        member(2, 1, True, [[1], [1], [1]], f1=1.0),
        member(2, 2, False, [[1]], Status.ENV_ERROR),
    ],
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    terms = {"success": 1.0, "searches": 0.0}
    reward = {"terms": terms, "reach": {"searches": 2.0}, "options": {}, "leader": "success"}
    config = {"reward": {**reward, "max_shaping": 0.6}, "rl": {"scale": "none"}}
    (folder / "config.json").write_text(json.dumps(config))
    terms = make_terms({"success": 1.0}, {})
    with EpisodeLog(folder) as log:
        for step, group in enumerate(GROUPS, 1):
            for trajectory in reversed(score_group(terms, group)):  # as they finished
                log.append(trajectory)
            log.end_step(step)
    return folder


def rescored(workdir, rewards="success=1,step_cost=0.3,f1=0.3", options=("step_cost.turns=3",), **how):
    return rescore.rescore(workdir, rescore.terms_of(workdir, rewards, options=options, **how), scale="none")


def test_scores_and_advantages_of_stored_episodes(workdir):
    records = rescored(workdir)
    assert [(r["ticket"], r["member"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    after = {(r["ticket"], r["member"]): r["after"] for r in records}
    assert after[0, 0]["scores"] == pytest.approx({"success": 1, "step_cost": -0.3, "f1": 0})
    assert [after[place]["reward"] for place in after if place != (2, 2)] == pytest.approx(
        [0.7, 0.2, -0.3, -0.1, 1.2, 1]
    )
    assert after[0, 0]["advantage"] == pytest.approx(0.25) and after[1, 1]["advantage"] == pytest.approx(0.1)
    assert records[0]["before"] == {"scores": {"success": 1}, "reward": 1, "advantage": 0.5}
    # the failed world: in no group, before and after
    assert records[6]["after"] == {"scores": {}, "reward": None, "advantage": None} == records[6]["before"]
    assert after[2, 0]["advantage"] == pytest.approx(0.1)  # against one other, not two


def test_what_changed(workdir):
    found = rescore.summary(rescored(workdir))
    assert found["terms"]["success"] == {"before": pytest.approx(1 / 2), "after": pytest.approx(1 / 2)}
    assert found["terms"]["step_cost"] == {"before": None, "after": pytest.approx(-0.2)}
    assert found["reward"] == {"before": 0.5, "after": pytest.approx(2.7 / 6)}
    assert (found["episodes"], found["groups"], found["sign_changes"]) == (7, 3, 2)  # groups 1 and 2 were equal
    assert found["equal_groups"] == {"before": 2, "after": 0} and found["not_judged"] == {"before": 0, "after": 0}
    # x = 1 0 0 0 1 1, y = .7 .2 -.3 -.1 1.2 1: Sxy 1.55, Sxx 1.5, Syy 1.855
    assert found["correlation"] == pytest.approx(1.55 / (1.5 * 1.855) ** 0.5)
    same = rescore.summary(rescored(workdir, "success=2", ()))
    assert same["correlation"] == pytest.approx(1) and same["sign_changes"] == 0
    assert rescore.summary([])["correlation"] is None
    assert "step_cost                          -        -0.2" in rescore.tell(found)


def test_what_was_not_judged_is_counted_and_null(workdir):
    """None as a fact is NaN as a score: an episode without a judgement has neither reward nor advantage."""
    with EpisodeLog(workdir / "other") as log:
        for trajectory in (member(0, 0, True, f1=None), member(0, 1, True, f1=0.5), member(0, 2, False, f1=0.0)):
            log.append(trajectory)
    records = rescore.rescore(workdir / "other", make_terms({"success": 1.0, "f1": 0.2}, {}), scale="none")
    assert records[0]["after"] == {"scores": {"success": 1, "f1": None}, "reward": None, "advantage": None}
    assert [r["after"]["advantage"] for r in records[1:]] == pytest.approx([0.55, -0.55])
    assert rescore.summary(records)["not_judged"] == {"before": 0, "after": 1}


@pytest.mark.parametrize(
    ("rewards", "how", "message"),
    [
        ("", {}, "--rewards: got nothing"),
        ("success", {}, "--rewards: got 'success', want name=number"),
        ("success=much", {}, "--rewards: got 'success=much'"),
        ("success=nan", {}, "--rewards: got 'success=nan'"),
        ("success=1,success=2", {}, "each name once"),
        ("success=1,f2=0.1", {}, "neither a term"),
        ("success=1", {"reach": "f1"}, "--reach: got 'f1'"),
        ("success=1,step_cost=0.1", {"options": ["turns=3"]}, "want NAME.KEY=JSON"),
        ("success=1,step_cost=0.1", {"options": ["step_cost.turns=x"]}, "got 'x', want JSON"),
        ("success=1,step_cost=0.9", {"options": ["step_cost.turns=3"]}, "at most 0.6 of the outcome's 1"),
        ("success=1,exact_match=0.1", {}, "no fact 'exact_match', the world reports"),
    ],
)
def test_bad_input(workdir, rewards, how, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        rescored(workdir, rewards, **{"options": (), **how})


def test_a_count_takes_its_reach_from_the_run_or_the_command_line(workdir):
    assert rescored(workdir, "success=1,searches=0.1", ())[0]["after"]["scores"]["searches"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="shaping can reach 0.9"):
        rescored(workdir, "success=1,searches=0.1", (), reach="searches=9")


def test_the_command(workdir, tmp_path):
    out = tmp_path / "x.jsonl"
    command = [sys.executable, "-m", "launch.report", "rescore", f"--workdir={workdir}", f"--out={out}"]
    done = subprocess.run(
        [*command, "--rewards=success=1,f1=0.1"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "7 episodes in 3 groups" in done.stdout
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 7 and lines[6]["after"]["reward"] is None
