"""Laws of learning from stored episodes: from the same start, those of a run's first step make the update that the run
made, bit for bit; and stopped and resumed equals uninterrupted, an adapted β and a refreshed reference included.
"""

import json
import shutil

import jax
import numpy as np
import pytest

from launch import build, replay, runs, train
from launch.plan import make_plan
from launch.workdir import open_workdir
from rl import checkpoint
from rl.rewards.compose import RewardTerm
from tests.launch.test_recipe import tiny

EVEN = RewardTerm("outcome", 1.0, "episode", lambda t: float(np.mean(t.rows[-1].tokens % 2 == 0)))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(folder, config, plan) of a run of one step, by decoupled PPO with every kind of KL state."""
    root = tmp_path_factory.mktemp("replay")
    config = tiny("ppo_decoupled")
    config.rl.ref_every = 1
    config.rl.kl_coef, config.rl.kl_in, config.rl.kl_target, config.rl.kl_horizon = 0.1, "reward", 1e-3, 8.0
    plan = make_plan(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_terms", lambda plan, *given: [EVEN])
        with open_workdir(root / "played", config) as workdir:
            train.run(plan, workdir, None, stop_at_step=1)
        yield root, config, plan


def replayed(folder, played):
    root, config, plan = played
    stored = replay.read(plan, [root / "played"], root / "played" / "tokenizer")
    with open_workdir(folder, config) as workdir:
        replay.run(plan, workdir, None, stored)


def state_at(folder, plan, step):
    """The device state of a checkpoint, and where its run stood but for the clock."""
    learner = build.build_rl_learner(plan, runs.policy.build_model(plan, 300, folder / "tokenizer"))
    restored = checkpoint.restore(folder / "ckpt", runs._abstract_state(learner), step=step)
    return jax.device_get(restored.device), restored.host["progress"] | {"trained_s": 0}


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_episodes_of_a_step_make_its_update_again_and_a_stop_loses_nothing(played):
    root, _, plan = played
    replayed(root / "whole", played)
    first, own = (state_at(root / name, plan, 1) for name in ("whole", "played"))
    jax.tree.map(np.testing.assert_array_equal, first, own)
    (one, two), (theirs,) = records(root / "whole"), records(root / "played")
    for name in ("loss", "optim/grad_norm", "policy/ratio_max", "policy/kl_coef", "policy/is_weight", "batch/tokens"):
        assert one[name] == theirs[name], name
    assert one["optim/grad_norm"] > 1e-3 and one["optim/skipped"] == 0
    assert [r["policy/staleness"] for r in (theirs, one, two)] == [0, 1, 2]  # whoever played is a version older
    assert one["policy/engine_gap_max"] is None and "eval/sampled" not in one

    # killed after the first step: a checkpoint less, and records that go too far
    shutil.copytree(root / "whole", root / "cut")
    shutil.rmtree(root / "cut" / "ckpt" / "00000002")
    replayed(root / "cut", played)
    second = state_at(root / "whole", plan, 2)
    jax.tree.map(np.testing.assert_array_equal, state_at(root / "cut", plan, 2), second)
    assert len(records(root / "cut")) == 2
    assert 0.1 > float(first[0].kl_coef) > float(second[0].kl_coef) > 0  # no KL yet to a reference that is the policy
    for state, _ in (first, second):
        jax.tree.map(np.testing.assert_array_equal, state.ref, state.params)
    assert np.any(first[0].ref["embed"] != second[0].ref["embed"])


def test_what_cannot_be_replayed_is_said_at_once(played, tmp_path):
    root, config, plan = played
    kept = root / "played" / "tokenizer"

    def refused(message, given=(root / "played",), kept=kept, **keys):
        other = config.copy_and_resolve_references()
        for section, options in keys.items():
            other[section].update(options)
        with pytest.raises(ValueError, match=message):
            replay.read(make_plan(other), list(given), kept)

    refused("got 2 groups, want at least rl.groups_per_batch=4", rl={"groups_per_batch": 4}, batch={"rows": 16})
    refused(r"group 0: got members \[0, 1, 2, 3\], want 2 from 0 on", rl={"group_size": 2})
    refused("no .*none/tokenizer/tokenizer.json; want the folder of a run", given=[tmp_path / "none"])
    refused("the stored episodes need batch.length=.*, got 16; raise it", batch={"length": 16},
            rollout={"max_episode_tokens": 16})  # fmt: skip
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    refused("is another tokenizer than", kept=other)
    with pytest.MonkeyPatch.context() as patch:
        term = RewardTerm("f1", 1.0, "episode", lambda t: t.facts["f1"], reads=("f1",))
        patch.setattr(build, "build_terms", lambda plan, *given: [term])
        refused("reward.terms.f1: reads .'f1'., which the stored episode of task .* does not report")


def test_a_run_says_what_it_replays(played, tmp_path):
    root, config, plan = played
    stored = replay.read(plan, [root / "played"], root / "played" / "tokenizer")
    with open_workdir(tmp_path / "begun", config) as begun:
        replay._note(begun, stored)
        replay._note(begun, stored)
    assert replay.sources("a,b", tmp_path / "new") == [(tmp_path.cwd() / name).resolve() for name in "ab"]
    assert replay.sources(None, tmp_path / "new") == replay.sources(None, root / "played") == []
    assert replay.sources(None, begun) == replay.sources(str(root / "played"), begun) == [root / "played"]
    for flag, folder, message in (
        ("", tmp_path / "new", "--replay: got '', want WORKDIR"),
        ("a,a", tmp_path / "new", "each once"),
        ("a", root / "played", "began without --replay; give a new --workdir"),
        ("a", begun, "begun began with --replay=.*played; give a new --workdir"),
    ):
        with pytest.raises(ValueError, match=message):
            replay.sources(flag, folder)
    (begun / replay.NOTE).write_text((begun / replay.NOTE).read_text().replace('"groups": 2', '"groups": 1'))
    with pytest.raises(ValueError, match="did the run go on that wrote them"):
        replay._note(begun, stored)
