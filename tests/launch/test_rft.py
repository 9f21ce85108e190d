"""Rejection sampling: what succeeded is imitated and nothing else; a round that was played is not played again. And
demonstrations after another run.
"""

import jax
import numpy as np
import pytest

from configs import r1_arith
from launch import build, policy, rft, runs, sft
from launch.plan import make_plan
from launch.workdir import open_workdir
from rl import checkpoint
from rl.episodes import read_episodes
from rl.rollout.pool import Pool
from rl.types import Status, Trajectory


def episode(task_id, member, success, status=Status.DONE):
    return Trajectory(task_id, 0, member, status, (), {"success": success}, {})


def test_successes_of_a_task_up_to_a_number():
    episodes = [
        episode("a", 0, True), episode("a", 1, False), episode("a", 2, True), episode("a", 3, True),
        episode("b", 0, True, Status.TOKEN_LIMIT), episode("b", 1, True),
    ]  # fmt: skip
    kept = [(t.task_id, t.member) for t in rft.successes(episodes, 2)]
    assert kept == [("a", 0), ("a", 2), ("b", 1)]


@pytest.fixture
def config(tmp_path):
    c = r1_arith.get_config()
    with c.unlocked():
        c.world.options.levels = {"sum": (1,)}
        c.world.options.data_dir = str(tmp_path / "data")
        c.world.options.sizes = {"train": 40, "validation": 8, "test": 8}
        c.tokenizer.vocab_size = 300
        c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads = 32, 1, 2, 2
        c.model.head_dim, c.model.d_ff = 16, 32
        c.engine.lanes, c.engine.residents = 8, 8
        c.rollout.threads, c.rollout.max_turn_tokens = 8, 4
        c.sft.length, c.sft.rows, c.sft.micro_rows = 128, 2, 2
        c.demos.n, c.sft.steps, c.rl.group_size = 20, 2, 2
        c.rft.rounds, c.rft.tasks, c.rft.steps = 2, 4, 2
    return c


def test_rounds_go_on_from_the_policy_before_and_are_played_once(config, tmp_path, monkeypatch):
    plan, played = make_plan(config), []
    monkeypatch.setattr(rft, "successes", lambda episodes, per_task: [t for t in episodes if t.member == 1])
    run_many = Pool.run_many
    monkeypatch.setattr(Pool, "run_many", lambda self, *a, **how: played.append(how) or run_many(self, *a, **how))
    with open_workdir(tmp_path / "sft", config) as workdir:
        sft.run(plan, workdir)
    with open_workdir(tmp_path / "rft", config) as workdir:
        rft.run(plan, workdir, tmp_path / "sft")
    assert [how["first_ticket"] for how in played] == [0, 4]
    assert sorted(checkpoint.steps(tmp_path / "rft" / "ckpt"))[-1] == 4
    by_round = [list(read_episodes(tmp_path / "rft", first=n, last=n)) for n in range(2)]
    assert [len(episodes) for episodes in by_round] == [8, 8]
    versions = [np.unique(np.concatenate([r.version for t in e for r in t.rows])).tolist() for e in by_round]
    assert versions == [[-1, 0], [-1, 1]]  # the second round is of other weights
    with open_workdir(tmp_path / "rft", config) as workdir:
        rft.run(plan, workdir, None)
    assert len(played) == 2


def test_without_a_success_there_is_nothing_to_imitate(config, tmp_path):
    plan = make_plan(config)
    with open_workdir(tmp_path / "sft", config) as workdir:
        sft.run(plan, workdir)
    with open_workdir(tmp_path / "rft", config) as workdir, pytest.raises(ValueError, match="none of 8 episodes succ"):
        rft.run(plan, workdir, tmp_path / "sft")


def test_demonstrations_go_on_from_another_run(config, tmp_path):
    """launch.sft --init: from that run's weights, with its tokenizer; a resumed one needs neither."""
    plan = make_plan(config)
    learner = build.build_sft_learner(plan, policy.build_model(plan, 300, tmp_path))
    with open_workdir(tmp_path / "sft", config) as workdir:
        sft.run(plan, workdir)
    with open_workdir(tmp_path / "taught", config) as workdir:
        sft.run(plan, workdir, tmp_path / "sft")
    with open_workdir(tmp_path / "taught", config) as workdir:
        sft.run(plan, workdir)
    before, start, after = (
        runs.load_params(tmp_path / folder, learner) for folder in ("sft/ckpt", "taught/init", "taught/ckpt")
    )
    jax.tree.map(np.testing.assert_array_equal, before, start)
    assert np.any(before["embed"] != after["embed"])
    kept = [(tmp_path / name / "tokenizer" / "tokenizer.json").read_bytes() for name in ("sft", "taught")]
    assert kept[0] == kept[1]
