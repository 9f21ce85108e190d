"""Law: run(n) == run(k) + resume(n - k), stopped by a signal or killed between two saves. Ids, masks, statuses and
ticket order are equal; parameters are equal bit for bit (what compiles is a function of the tickets alone), and so are
the host state that a next step would start from, the best checkpoint and its score.

Law: engine logp == learner logp, at every step, before and after a resume.

Law: with max_staleness > 0 and a kill, every ticket is trained once all the same (tests/laws/test_async.py: with any),
and each token's logp is that of the version that it names, whenever new weights came.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import quickstart
from launch import build, policy, reward_models, runs, sft, train
from launch.plan import make_plan
from launch.workdir import open_workdir
from models import transformer
from models.logprobs import token_logp
from rl import checkpoint
from rl.episodes import EpisodeLog, read_episodes
from rl.monitor import Monitor
from rl.rewards.compose import RewardTerm
from rl.rollout import engine
from rl.rollout.feeder import Feeder
from rl.types import Status

STEPS = 3
TERM = RewardTerm("outcome", 1.0, "episode", lambda t: float(t.rows[-1].tokens.sum() % 5))


def tiny(data_dir: Path):
    """The quickstart with a policy of a few thousand weights and the smallest batches."""
    c = quickstart.get_config()
    with c.unlocked():
        c.world.options.data_dir = str(data_dir)
        c.world.options.sizes = {"train": 40, "validation": 8, "test": 8}
        c.world.options.max_turns = 2
        c.tokenizer.vocab_size = 400
        c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads = 32, 1, 2, 2
        c.model.head_dim, c.model.d_ff = 16, 32
        c.batch.length, c.batch.rows, c.batch.micro_rows = 256, 4, 2
        c.sft.length, c.sft.micro_rows = 256, 2
        c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 4, 4, 256, (256,)
        c.rollout.threads, c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 4, 6, 256
        c.demos.n, c.sft.steps, c.sft.rows = 20, 2, 2
        c.rl.steps, c.rl.groups_per_batch, c.rl.group_size, c.rl.save_every = STEPS, 2, 2, 0
        c.eval.n, c.eval.every = 4, 2
    return c


@pytest.fixture(scope="module", autouse=True)
def rewards_that_differ():
    """A policy of a few thousand weights never succeeds; nor would it then learn, and every run would be equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_terms", lambda plan, *given: [TERM])
        yield


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    config = tiny(root / "data")
    plan = make_plan(config)
    with open_workdir(root / "sft", config) as workdir:
        sft.run(plan, workdir)
    with open_workdir(root / "whole", config) as workdir:
        train.run(plan, workdir, root / "sft")
    return root, config, plan


def trained(workdir: Path):
    (step,) = [s for s in checkpoint.steps(workdir / "ckpt") if s == STEPS]
    host = checkpoint.restore_host(workdir / "ckpt", step=step)
    host["progress"].pop("trained_s")  # a clock is no state of the run
    return host


def params_of(plan, workdir: Path):
    codec = policy.load_codec(workdir)
    model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
    learner = build.build_rl_learner(plan, model)
    state, _ = runs.start_or_resume(workdir, learner, jax.random.key(0))
    return jax.device_get(state)


def story(workdir: Path):
    """What was sampled, by ticket and member: the order of arrival is not part of it."""
    return {
        (t.ticket, t.member): (
            t.task_id,
            t.status,
            [r.tokens.tolist() for r in t.rows],
            [r.action_mask.tolist() for r in t.rows],
        )
        for t in read_episodes(workdir)
    }


def best(workdir: Path):
    step = checkpoint.best_step(workdir / "ckpt")
    return step, json.loads((workdir / "ckpt" / f"{step:08d}" / "manifest.json").read_text())["score"]


def records(workdir: Path):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def assert_equal_runs(plan, cut: Path, whole: Path):
    assert story(cut) == story(whole)
    assert len(story(whole)) == len(list(read_episodes(cut))) == STEPS * 4
    assert trained(cut) == trained(whole)
    assert best(cut) == best(whole)
    for a, b in zip(jax.tree.leaves(params_of(plan, whole)), jax.tree.leaves(params_of(plan, cut)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(record["optim/grad_norm"] > 1e-3 for record in records(cut))
    gaps = {record["step"]: record["policy/engine_gap_max"] for record in records(cut)}
    assert list(gaps) == list(range(1, STEPS + 1)) and max(gaps.values()) <= 1e-4, gaps


@pytest.mark.parametrize("k", [1, 2])
def test_stopped_after_k_steps_and_resumed_equals_uninterrupted(uninterrupted, k):
    root, config, plan = uninterrupted
    with open_workdir(root / f"cut{k}", config) as workdir:
        train.run(plan, workdir, root / "sft", stop_at_step=k)
        assert checkpoint.steps(workdir / "ckpt")[-1] == k
    with open_workdir(root / f"cut{k}", config) as workdir:  # the folder alone: no init
        train.run(plan, workdir, None)
    assert_equal_runs(plan, root / f"cut{k}", root / "whole")


class Killed(BaseException):
    """Nothing in the program catches it: what kill -9 leaves undone stays undone."""


@pytest.mark.parametrize(("writer", "method"), [(EpisodeLog, "end_step"), (Monitor, "write")])
def test_killed_between_saves_and_resumed_equals_uninterrupted(uninterrupted, monkeypatch, writer, method):
    root, config, _ = uninterrupted
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.rl.save_every = 1
    plan, folder = make_plan(config), root / f"killed-{method}"
    alive = getattr(writer, method)

    def kill(self, at, *args):
        if at == 2:
            raise Killed
        alive(self, at, *args)

    with monkeypatch.context() as patch, open_workdir(folder, config) as workdir:
        patch.setattr(writer, method, kill)
        with pytest.raises(Killed):
            train.run(plan, workdir, root / "sft")
    assert checkpoint.steps(folder / "ckpt")[-1] == 1
    with open_workdir(folder, config) as workdir:
        train.run(plan, workdir, None)
    assert_equal_runs(plan, folder, root / "whole")


def worst_gap(plan, workdir, episodes, by_version):
    """The largest |logp - behavior_logp| of any action, logp by the weights of the version that it names."""
    codec = policy.load_codec(workdir)
    config = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")

    @jax.jit
    def logp(params, tokens, segment):
        hidden = transformer.apply(params, config, tokens, segment, jax.numpy.arange(256)[None])
        how = {"n_ids": config.n_ids, "temperature": plan.rl.temperature, "chunk": 256}
        return token_logp(params, hidden, tokens, **how)[0][0]

    worst = 0.0
    for row in (row for t in episodes for row in t.rows):
        n = len(row.tokens)
        tokens = np.pad(row.tokens, (0, 256 - n))[None]
        for version in {*row.version[row.action_mask].tolist()}:
            own = np.asarray(logp(by_version[version], tokens, (np.arange(256) < n).astype(np.int32)[None]))[:n]
            gap = np.abs(own - row.behavior_logp)[row.version == version]
            worst = max(worst, float(gap.max()))
    return worst


def test_killed_while_sampling_runs_ahead_each_ticket_is_trained_once(uninterrupted, monkeypatch):
    root, config, _ = uninterrupted
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.rl.max_staleness, config.rl.save_every, config.rl.steps, config.eval.every = 2, 1, 5, 0
    plan, folder = make_plan(config), root / "ahead"
    write, snapshot, by_version = Monitor.write, engine.snapshot, {}

    def kill(self, at, *args):
        if at == 4:
            raise Killed
        write(self, at, *args)

    def kept(params, version, *args):
        served = snapshot(params, version, *args)
        by_version[version] = served.params
        return served

    def some(self, waiting=Feeder.waiting):
        with self._changed:
            assert self._changed.wait_for(lambda: self._ready or self._finished, 60)
        return waiting(self)

    monkeypatch.setattr(engine, "snapshot", kept)
    with monkeypatch.context() as patch, open_workdir(folder, config) as workdir:
        patch.setattr(Monitor, "write", kill)
        patch.setattr(Feeder, "waiting", some)
        with pytest.raises(Killed):
            train.run(plan, workdir, root / "sft")
    host = checkpoint.restore_host(folder / "ckpt")["progress"]
    assert host["step"] == host["version"] == 3 and host["ticket"] == 6
    waited = {saved["ticket"]: saved["episodes"] for saved in host["waiting"]}
    with open_workdir(folder, config) as workdir:
        train.run(plan, workdir, None)
    trained = {}
    for step in range(1, 6):
        for t in read_episodes(folder, first=step, last=step):
            assert (t.ticket, t.member) not in trained and t.ticket in (2 * step - 2, 2 * step - 1)
            trained[t.ticket, t.member] = t
            ages = {step - 1 - int(v) for row in t.rows for v in row.version[row.action_mask]}
            assert 0 <= min(ages) <= max(ages) <= 2
    assert sorted(trained) == [(ticket, member) for ticket in range(10) for member in range(2)]
    assert waited
    for ticket, episodes in waited.items():  # not played again
        assert [trained[ticket, member].to_bytes() for member in range(2)] == episodes
    assert [record["step"] for record in records(folder)] == [1, 2, 3, 4, 5]
    assert checkpoint.restore_host(folder / "ckpt")["progress"]["waiting"] == []
    assert max(record["policy/staleness_max"] for record in records(folder)) in (1, 2)
    assert worst_gap(plan, folder, trained.values(), by_version) <= 1e-4


def test_with_all_that_would_be_given_up_audited_it_is_the_run_without(uninterrupted, monkeypatch):
    """A judge gives every episode up after its first turn. Audited all are trained as in the run that has no judge; not
    audited none goes on; and evaluation never asks.
    """
    root, config, _ = uninterrupted
    gone = {"prm": lambda episodes: [np.zeros(t.n_turns) for t in episodes]}
    monkeypatch.setattr(reward_models, "build_scorers", lambda there, **shape: gone)
    for name, share in (("audited", 1.0), ("given_up", 0.0)):
        own = config.copy_and_resolve_references()
        with own.unlocked():
            own.rollout.abandon.prm_below, own.rollout.abandon.prm_path = 0.5, "whose"
            own.rollout.abandon.audit_frac = share
        plan, folder = make_plan(own), root / name
        with open_workdir(folder, own) as workdir:
            train.run(plan, workdir, root / "sft", timeline=True)
        played = [t.facts.get("abandonment") for t in read_episodes(folder)]
        assert any(played) and {found["audited"] for found in played if found} == {share == 1.0}
        evaluated = list(read_episodes(folder, folder="episodes_eval"))
        assert evaluated and not any("abandonment" in t.facts for t in evaluated)
        assert {record["abandon/audited_frac"] for record in records(folder)} == {share}
        spans = json.loads((folder / "timeline.json").read_text())["traceEvents"]
        assert {span["name"] for span in spans} >= {"rollout", "learn", "publish", "eval", "idle", "decode", "prefill"}
    assert_equal_runs(plan, root / "audited", root / "whole")
    ended = [t for t in read_episodes(root / "given_up") if t.status is Status.ABANDONED]
    assert ended and all(t.n_turns == 1 and not t.facts["success"] for t in ended)
