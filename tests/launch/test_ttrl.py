"""TTRL as a launch: what knows an answer is refused; a set and single queries, cut by a signal and resumed."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest

from configs import ttrl_arith, ttrl_search
from configs.defaults import defaults
from envs.base import Task
from launch import build, runs, ttrl
from launch.cli import ConfigError
from launch.plan import make_plan
from launch.workdir import open_workdir
from rl import loop
from rl.episodes import read_episodes
from rl.monitor import Monitor
from rl.rollout.engine import Engine
from rl.rollout.pool import Group
from rl.types import Status, Trajectory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward.terms.format": 0.2}, r"reward.terms.format: reads \['well_formed'\], wanted \['answer'\] at most"),
        ({"reward.terms.kimi_length": 0.1}, r"reward.terms.kimi_length: reads \['success'\]"),
        ({"reward.terms.f1": 0.1}, r"reward.terms.f1: reads \['f1'\]"),
        ({"curriculum.name": "learnability"}, "curriculum.name='learnability': wanted uniform"),
        ({"curriculum.admit_low": 0.1}, "curriculum.admit_low=0.1, admit_high=1.0: wanted 0 and 1"),
        ({"hints.prob": 0.5}, "hints.prob=0.5: wanted 0"),
        ({"eval.every": 5}, "eval.every=5: wanted 0; .*choose the checkpoint by the labels"),
        ({"ttrl.split": "validation"}, "ttrl.split='validation': wanted another split than eval.split"),
        (
            {"ttrl.split": "train", "rollout.abandon.prm_path": "runs/prm", "rollout.abandon.prm_below": 0.1},
            "ttrl.split='train' with a reward model: it was taught the outcomes of these tasks",
        ),
        ({"rl.group_size": 8}, "train_first=16: wanted at most rl.group_size=8"),
    ],
)
def test_what_knows_an_answer_is_refused(change, message):
    config = ttrl_arith.get_config()
    for name, value in change.items():
        *parents, last = name.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    plan = make_plan(config)
    with pytest.raises(ConfigError, match=message):
        ttrl.check_label_free(plan, build.build_terms(plan))


@pytest.mark.parametrize("module", [ttrl_arith, ttrl_search])
def test_what_needs_no_answer_passes(module):
    plan = make_plan(module.get_config())
    (term,) = build.build_terms(plan)
    ttrl.check_label_free(plan, [term])
    assert term.name == "majority" and plan.rl.kl_coef == 0.001  # SPECS section 6


def test_what_a_world_without_labels_lets_be_known():
    task = Task("t", "toy", "test", 0, (), {})
    said = [Trajectory("t", 0, m, Status.DONE, (), {"answer": a}, {}) for m, a in enumerate("aab")]
    group = Group(0, task, tuple(said), False, 0)
    found = ttrl.numbers([group], [group])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["avg_at_k"], found["greedy"], found["maj_at_k"], found["pass_at_k"]) == (None, None, {}, {})
    assert found["majority"]["ratio"] == pytest.approx(2 / 3) and found["majority"]["label_accuracy"] is None


def test_an_average_is_over_those_that_have_the_number():
    measures = [
        {"avg_at_k": 0.5, "pass_at_k": {"1": 0.5, "2": 1.0}, "greedy": None, "families": {"sum1": 1.0}},
        {"avg_at_k": 0.0, "pass_at_k": {"1": 0.0}, "greedy": None, "families": {"date1": 0.0}},
    ]
    want = {"avg_at_k": 0.25, "pass_at_k": {"1": 0.25, "2": 1.0}, "greedy": None}
    assert ttrl.averaged(measures) == want | {"families": {"sum1": 1.0, "date1": 0.0}}


def tiny(folder, **own):
    """A policy of chance whose whole text is its answer; it hardly scatters at a low temperature, so that it votes."""
    rows = [{"question": f"{i} ?", "answers": [str(i)]} for i in range(100)]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    c = defaults()
    c.name, c.world.name = "tiny", "qa"
    c.world.options.update({"file": str(folder / "q.jsonl"), "tag": None})
    c.tokenizer.vocab_size = 300
    c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads = 32, 1, 2, 2
    c.model.head_dim, c.model.d_ff = 16, 32
    c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 4, 4, 64, (64,)
    c.engine.prefill_rows, c.engine.prefill_chunk = 4, 32
    c.rollout.threads, c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 4, 1, 64
    ttrl_search.by_majority(c)
    c.reward.options.majority.train_first = 6
    c.rl.group_size, c.rl.groups_per_batch, c.rl.steps, c.rl.temperature = 8, 2, 2, 0.5
    c.rl.save_every = 0
    c.batch.rows, c.batch.length, c.batch.logp_chunk = 16, 64, 64
    c.eval.n = 2
    c.ttrl.n, c.ttrl.samples, c.ttrl.queries, c.ttrl.steps = 2, 4, 2, 2
    c.ttrl.update(own)
    return c


def cut_at(step, patch):
    """A signal, as the record of `step` is written."""
    write = Monitor.write

    def kill(self, at, metrics):
        write(self, at, metrics)
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Monitor, "write", kill)


def launched(config, folder, cut, monkeypatch):
    """The result of a run that is cut after step `cut` and resumed, what it had when it was cut, and its record."""
    plan = make_plan(config)
    with monkeypatch.context() as patch, open_workdir(folder, config) as workdir:
        cut_at(cut, patch)
        with pytest.raises(runs.Stopped):
            ttrl.run(plan, workdir, None)
        half = json.loads((workdir / "result.json").read_text())
    with open_workdir(folder, config) as workdir:
        result = ttrl.run(plan, workdir, None)
        assert result == json.loads((workdir / "result.json").read_text()) == ttrl.run(plan, workdir, None)
    assert result["name"] in ttrl.table(result)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(r["optim/grad_norm"] > 1e-3 for r in records)  # there are majorities to learn from
    assert all(r["reward/majority/not_judged_frac"] == 0.25 for r in records)  # two of eight only vote
    return result, half, [r["step"] for r in records]


def told(folder, step):
    """What was sampled when the policy was measured at `step`, episode by episode."""
    kept = read_episodes(folder, folder="episodes_eval", first=step, last=step)
    return [(t.task_id, [row.tokens.tolist() for row in t.rows]) for t in kept]


def test_a_set_and_then_single_queries_from_the_same_start(tmp_path, monkeypatch):
    """Each query is met by the start's policy, to the bit, whatever was learnt before it; nothing is compiled twice."""
    whole, half, steps = launched(tiny(tmp_path), tmp_path / "set", 1, monkeypatch)
    assert whole["before"] == half["before"] and "after" not in half and steps == [1, 2]
    assert whole["before"].keys() == whole["after"].keys() == {"adapted", "held_out"}
    assert len(told(tmp_path / "set", 0)) == len(told(tmp_path / "set", 2)) == 2 * 2 * (4 + 1)

    published, learners = [], []
    publish, build_learner = Engine.publish, build.build_rl_learner

    def watch(self, params, version):
        published.append((self, version, jax.device_get(params), self.stats()["compiles"]))
        publish(self, params, version)

    monkeypatch.setattr(Engine, "publish", watch)
    monkeypatch.setattr(build, "build_rl_learner", lambda *a: learners.append(build_learner(*a)) or learners[-1])
    each, half, steps = launched(tiny(tmp_path, per_query=True), tmp_path / "each", 3, monkeypatch)
    assert half["queries"] == each["queries"][:1] and len(each["queries"]) == 2 and steps == [1, 2, 3, 4]
    assert each["adapt_tokens"] == 2 * 2 * 8 and each["answer_tokens"] == 2 * (4 + 1)  # a turn is one token
    sampled, greedy = told(tmp_path / "set", 0)[:8], told(tmp_path / "set", 0)[8:10]
    for i in range(2):
        assert told(tmp_path / "each", 2 * (i + 1))[:5] == [*sampled[4 * i : 4 * i + 4], greedy[i]]

    start = runs.load_params(tmp_path / "each" / "init", learners[0])
    first, second = dict.fromkeys(engine for engine, *_ in published)
    of = {engine: {v: (params, n) for own, v, params, n in published if own is engine} for engine in (first, second)}
    assert list(of[first]) == [1, 2, 3, 4, 5, 7] and list(of[second]) == [4, 5, 6, 7]
    for own in of.values():
        assert [v for v, (params, _) in own.items() if is_equal(params, start)] == [v for v in own if v in (1, 4, 7)]
    assert of[first][4][1] == of[first][7][1]  # the engine's programs before and after the second query
    assert is_equal(of[first][5][0], of[second][5][0])  # the same query, begun anew
    assert [learner.compiled_steps() for learner in learners] == [1, 1]


def test_a_query_that_cannot_be_learnt_from_fails_alone(tmp_path, monkeypatch):
    """Its groups are all refused: it says so, and is in no mean; what comes after it is as if it had not been there."""
    judge, queries = loop.judge, []

    def judged(group, **how):
        queries.extend({group.task.task_id} - {*queries})
        found = judge(group, **how)
        return dataclasses.replace(found, admitted=False) if queries.index(group.task.task_id) in refused else found

    monkeypatch.setattr(loop, "judge", judged)
    config = tiny(tmp_path, per_query=True, steps=1)
    refused = {0}
    with open_workdir(tmp_path / "one", config) as workdir:
        result = ttrl.run(make_plan(config), workdir, None)
    first, second = result["queries"]
    assert "got 8 refused and 0 admitted groups" in first["failed"] and "after" not in first
    assert result["failed"] == 1 and "1 of them failed" in ttrl.table(result)
    assert (result["before"], result["after"]) == (second["before"], second["after"])
    refused = {0, 1}
    with open_workdir(tmp_path / "none", config) as workdir, pytest.raises(RuntimeError, match="any of 2 queries"):
        ttrl.run(make_plan(config), workdir, None)
    assert len(json.loads((tmp_path / "none" / "result.json").read_text())["queries"]) == 2


def is_equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
