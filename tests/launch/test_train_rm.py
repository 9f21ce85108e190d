"""From stored episodes to reward models to a run that they reward; and what is refused on the way."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from envs.credit import random_policy
from envs.play import play
from launch import build, policy, rescore, reward_models, runs, train, train_rm
from launch.cli import ConfigError
from launch.plan import make_plan
from launch.workdir import open_workdir
from rl.checkpoint import Checkpoints
from rl.episodes import EpisodeLog
from rl.reward_model import read_examples
from rl.rollout.worker import transcribe
from rl.types import Status
from tests.launch.test_recipe import tiny


def config_of(kind, **paths):
    c = tiny("grpo", name="process")
    with c.unlocked():
        c.rm.kind, c.rm.steps, c.rm.roll_ins, c.rm.held_out = kind, 1, 1, 0.4
        c.sft.length, c.sft.rows, c.sft.micro_rows = 512, 4, 2
        c.rl.steps = 1
        for name, path in paths.items():
            c.reward.terms[name], c.reward.options[name] = 0.15, {"path": str(path)}
    return c


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The folder of a policy of chance, with episodes of one that is right at the deciding step half the time."""
    folder, config = tmp_path_factory.mktemp("runs") / "warm", config_of("orm")
    plan = make_plan(config)
    world = build.build_world(plan)
    with open_workdir(folder, config):
        codec = runs.start_codec(plan, world, folder, None)
        learner = build.build_sft_learner(plan, policy.build_model(plan, codec.vocab_size, folder / "tokenizer"))
        with Checkpoints(folder / "ckpt") as checkpoints:
            checkpoints.save(0, learner.init_state(jax.random.key(0)))
    env, spec = world.make_env(), build.env_spec(world)
    with EpisodeLog(folder, folder="episodes_train") as log:
        for i, task in enumerate(world.tasks("train")[:20]):
            turns, facts = play(env, task, random_policy(0.5, 2, np.random.default_rng(i)))
            how = {"stop": spec.stop, "ticket": i, "first": env.reset(task).text}
            log.append(transcribe(codec, task, turns, facts, **how))
    return folder


def test_episodes_are_labelled_learnt_from_and_reward_a_run(warm, tmp_path, monkeypatch):
    sources, config = train_rm.sources_of(f"{warm}/episodes_train"), config_of("prm")
    plan = make_plan(config)
    with open_workdir(tmp_path / "prm", config) as workdir:
        train_rm.run(plan, workdir, warm, sources)
    stored = {tuple(t.rows[0].tokens.tolist()) for t in train_rm.read(plan, sources)}
    sides = {side: read_examples(train_rm.labelled(workdir, side)) for side in train_rm.SIDES}
    tasks = {side: {e.task for e in examples} for side, examples in sides.items()}
    assert not tasks["train"] & tasks["held_out"] and sum(map(len, tasks.values())) == 20
    every = [e for examples in sides.values() for e in examples]
    assert len(every) == 20 and {tuple(e.tokens.tolist()) for e in every} == stored
    # a policy of chance succeeds where the deciding step is over and was right, whatever it does then
    assert all(len(e.ends) == 3 and set(e.labels.tolist()) <= {0, 1} for e in every)
    assert any(e.labels[:-1].any() for e in every) and all(np.diff(e.labels).min() >= 0 for e in every)
    result = json.loads((workdir / "result.json").read_text())
    assert (result["kind"], result["steps"]) == ("prm", 1)
    for side, examples in sides.items():
        assert result[side]["n"] == 3 * len(examples) and result[side]["tasks"] == len(tasks[side])
        assert result[side]["base_rate"] == np.mean([y for e in examples for y in e.labels])
        assert 0 <= result[side]["auc"] <= 1

    monkeypatch.setattr(train_rm, "label", None)  # it is labelled already
    train_rm.run(plan, tmp_path / "prm", None, [])
    assert json.loads((tmp_path / "prm" / "result.json").read_text()) == result

    config = config_of("prm", prm=tmp_path / "prm")
    with open_workdir(tmp_path / "rl", config) as workdir:
        train.run(make_plan(config), workdir, warm)
    (record,) = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert 0 < record["reward/prm/raw"] < 1 and record["reward/prm/not_judged_frac"] == 0
    assert record["reward/prm/weighted"] == pytest.approx(0.15 * record["reward/prm/raw"])
    assert record["policy/advantage_abs"] > 0 and record["optim/skipped"] == 0
    # frozen: asked again, of the same episodes, it says the same
    again = rescore.rescore(workdir, rescore.terms_of(workdir, "success=1,prm=0.15"), scale="none")
    assert len(again) == 8
    for scores in ((r["before"]["scores"]["prm"], r["after"]["scores"]["prm"]) for r in again):
        assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_an_outcome_is_a_label(warm):
    plan = make_plan(config_of("orm"))
    episodes = train_rm.read(plan, train_rm.sources_of(f"{warm}/episodes_train"))
    sides = train_rm.label(plan, build.build_world(plan), None, None, None, episodes, {})
    labels = {tuple(e.tokens.tolist()): e.labels.tolist() for examples in sides.values() for e in examples}
    assert labels == {tuple(t.rows[0].tokens.tolist()): [float(t.facts["success"])] for t in episodes}
    few = dataclasses.replace(plan, rm=dataclasses.replace(plan.rm, episodes=7))
    seven = train_rm.read(few, train_rm.sources_of(f"{warm}/episodes_train"))
    assert len({t.ticket for t in seven}) == 7 and [t.ticket for t in seven] != list(range(7))


def test_of_who_was_given_up_nobody_knows_the_end(warm, tmp_path):
    """Called a failure, it would teach a model that gives up what it gave up."""
    plan = make_plan(config_of("orm"))
    (source,) = train_rm.sources_of(f"{warm}/episodes_train")
    (tmp_path / "config.json").write_text((warm / "config.json").read_text())
    episodes = train_rm.read(plan, [source])
    with EpisodeLog(tmp_path) as log:
        for i, t in enumerate(episodes):
            log.append(dataclasses.replace(t, status=Status.ABANDONED) if i % 2 else t)
    kept = train_rm.read(plan, train_rm.sources_of(str(tmp_path)))
    assert [t.ticket for t in kept] == [t.ticket for t in episodes[::2]]


def test_what_cannot_be_learnt_from_is_refused(warm, tmp_path):
    plan = make_plan(config_of("orm"))
    for text, message in [(str(warm), "no episodes in .*want the folder of a run"), ("nowhere", "no episodes in nowh")]:
        with pytest.raises(ConfigError, match=message):
            train_rm.sources_of(text)
    (source,) = train_rm.sources_of(f"{warm}/episodes_train")
    train_rm.check_sources(plan, [source], warm / "tokenizer")
    other = shutil.copytree(warm / "tokenizer", tmp_path / "tokenizer")
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="the ids of .*warm are of another tokenizer than that in"):
        train_rm.check_sources(plan, [source], other)
    # episodes of evaluation: the reward would have seen what it is to be measured by
    world = build.build_world(plan)
    stray = SimpleNamespace(task_id=world.tasks("test")[0].task_id)
    with pytest.raises(ValueError, match="1 of 1 tasks are no training tasks of the world 'credit'.*credit/test/0"):
        train_rm.tasks_of(world, [stray])
    one_sided = [t for t in train_rm.read(plan, [source]) if not t.facts["success"]]
    with pytest.raises(ValueError, match="rows are for train, with labels of mean 0; want successes and failures"):
        train_rm.label(plan, world, None, None, None, one_sided, {})


def test_a_reward_model_that_is_none_is_refused(warm, tmp_path):
    check = reward_models.check
    with pytest.raises(ConfigError, match="nowhere: no run there"):
        check({"orm": tmp_path / "nowhere"}, tokenizer=tmp_path)
    with pytest.raises(ValueError, match="reward.options.orm.path=.*got a run of kind None, want a finished"):
        check({"orm": warm}, tokenizer=tmp_path)
    model = shutil.copytree(warm, tmp_path / "rm", ignore=shutil.ignore_patterns("ckpt"))
    (model / "result.json").write_text(json.dumps({"kind": "prm"}))
    with pytest.raises(ValueError, match="got a run of kind prm, want .* with rm.kind=orm"):
        check({"orm": model}, tokenizer=tmp_path)
    check({"prm": model}, tokenizer=warm / "tokenizer")
    (model / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="its tokenizer is another than that in"):
        check({"prm": model}, tokenizer=warm / "tokenizer")
    with pytest.raises(ValueError, match="read by a run of one process only, got 2"):
        check({"prm": model}, tokenizer=tmp_path, processes=2)
    there = reward_models.paths({"success": 1.0, "orm": 0.0, "prm": 0.1}, {"prm": {"path": "x"}}, "success")
    assert list(there) == ["prm"] and reward_models.widths(10) == [3, 5, 8, 10]
