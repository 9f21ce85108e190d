"""Law: a run whose worlds are in processes is the run whose worlds are in threads: the same episodes, token for token,
also where the world bears two calls at once and the episodes in flight follow the engine. (Log-probabilities are those
of other batch mixes of the engine, so they differ by rounding; what is learnt from them differs by as little.)
"""

import json
import os
import sys

import numpy as np
import pytest

from configs.defaults import defaults
from envs.fleet.process import Process
from launch import train, worlds
from launch.plan import make_plan
from launch.workdir import open_workdir
from rl.episodes import read_episodes

STEPS, GROUPS, SIZE = 2, 2, 4


def tiny():
    """A policy of chance in a world of three turns, where an action of an even length is a success."""
    c = defaults()
    c.name, c.world.name = "tiny", "tests.envs.breaking:make_world"
    c.tokenizer.vocab_size = 300
    c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads = 32, 1, 2, 2
    c.model.head_dim, c.model.d_ff = 16, 32
    c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 4, 4, 128, (128,)
    c.engine.prefill_rows, c.engine.prefill_chunk = 4, 32
    c.rollout.threads, c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 6, 4, 128
    c.rl.group_size, c.rl.groups_per_batch, c.rl.steps, c.rl.save_every = SIZE, GROUPS, STEPS, 0
    c.rl.warmup_steps = 0
    c.batch.rows, c.batch.length, c.batch.logp_chunk = GROUPS * SIZE, 128, 128
    c.eval.n, c.eval.every = 2, STEPS
    return c


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """What a run of the tiny config with some keys of `rollout` leaves: its episodes, and the ids of its processes."""
    made = []
    begin = Process.__init__

    def watched(self, *args):
        begin(self, *args)
        made.append(self.pid)

    monkeypatch.setattr(Process, "__init__", watched)

    def run(name, **rollout):
        config = tiny()
        config.rollout.update(rollout)
        made.clear()
        with open_workdir(tmp_path / name, config) as workdir:
            train.run(make_plan(config), workdir, None)
        folders = [read_episodes(tmp_path / name, folder=folder) for folder in ("episodes", "episodes_eval")]
        return [sorted(folder, key=lambda t: (t.ticket, t.member)) for folder in folders], list(made)

    return run


def said(t):
    """All of an episode but its log-probabilities."""
    rows = [[getattr(row, name).tolist() for name in ("tokens", "turn", "action_mask", "version")] for row in t.rows]
    return t.ticket, t.member, t.task_id, t.status, dict(t.facts), rows


def test_where_the_worlds_are_changes_nothing(trained, tmp_path):
    here, none = trained("threads")
    there, pids = trained("processes", worlds="processes", processes=2, calls_at_once=2, adaptive=True)
    assert len(here[0]) == STEPS * GROUPS * SIZE and len(here[1]) > 0
    for left, right in zip(here, there, strict=True):
        assert [said(t) for t in left] == [said(t) for t in right]
        for a, b in zip(left, right, strict=True):
            np.testing.assert_allclose(a.rows[0].behavior_logp, b.rows[0].behavior_logp, atol=1e-4)
    assert len(pids) == 2 and not none
    for name, members in (("threads", None), ("processes", 2)):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line).get("rollout/fleet_members") for line in lines] == [members] * STEPS
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_ray_that_is_missing_is_said_before_anything_is_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config = tiny()
    worlds.check(make_plan(config))
    config.rollout.worlds = "ray"
    with pytest.raises(ValueError, match=r"ray is not installed; pip install 'wayfinder-rl\[ray\]'"):
        worlds.check(make_plan(config))
