"""Laws of a reward model: what is scored is what was trained, whatever else is in the batch; and it is frozen."""

from functools import cache

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models import heads
from models.sharding import make_mesh
from rl import reward_model
from rl.learner import make_learner, make_optimizer
from rl.losses.reward_model import reward_model as loss_of
from rl.metrics.reward_model import auc
from rl.types import Row, Status, Trajectory
from tests.laws import test_learner as learning

KINDS = (reward_model.ORM, reward_model.PRM)
LENGTH = 24


@cache
def params(kind):
    return heads.add(learning.params(), learning.CONFIG, (kind,), jax.random.key(1))


def judge_of(kind, lengths=(8, LENGTH), of=None):
    return reward_model.make_judge(learning.CONFIG, of or params(kind), lengths=lengths, rows=3, pad_id=0)


@cache
def examples(kind):
    """Twenty rows of two turns; whether a turn is good is the parity of its last token."""
    rng, found = np.random.default_rng(0), []
    for i in range(20):
        tokens = rng.integers(1, 64, 4 + i % 9).astype(np.int32)
        ends = np.array([len(tokens) - 1] if kind == reward_model.ORM else [2, len(tokens) - 1])
        found.append(reward_model.Example(str(i), tokens, ends, (tokens[ends] % 2).astype(np.float32)))
    return tuple(found)


def asked(kind):
    return [(e.tokens, e.ends) for e in examples(kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_score_does_not_depend_on_what_it_is_scored_with(kind):
    rows, judge = asked(kind), judge_of(kind)
    want = judge(rows)
    flat = np.concatenate(want)
    assert len(set(flat)) == len(flat) and ((0 < flat) & (flat < 1)).all()
    for got in (judge(rows[::-1])[::-1], [judge([row])[0] for row in rows]):
        for a, b in zip(got, want, strict=True):
            assert_allclose(a, b, rtol=1e-6)
    for a, b in zip(judge_of(kind, lengths=(LENGTH,))(rows), want, strict=True):  # other padding
        assert_allclose(a, b, rtol=1e-5)
    assert np.isnan(judge([(np.ones(LENGTH + 1, np.int32), np.array([3]))])[0]).all() and judge([]) == []


def test_it_learns_what_it_is_scored_by_and_a_frozen_one_stays(kind=reward_model.ORM):
    """Its loss over packed rows is that of the scores of the rows alone; and the learner takes the buffers of what it
    starts from, which the frozen one must not mind.
    """
    tx = make_optimizer(learning_rate=1e-2)
    machine = make_learner(learning.CONFIG, loss_of(), tx, make_mesh(), micro_rows=2, chunk=8, heads=(kind,))
    start = machine.init_params(jax.tree.map(np.array, params(kind)))
    frozen = judge_of(kind, of=start)
    before = np.concatenate(frozen(asked(kind)))
    labels = np.concatenate([e.labels for e in examples(kind)])
    batch = reward_model.pack_examples(examples(kind), length=LENGTH, pad_id=0)
    assert batch.segment.max() > 1 and (batch.action_mask.sum(), batch.rewards.sum()) == (len(labels), labels.sum())
    batch = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[: len(x) % 2])]), batch)
    state = machine.init_state(start, donate=True)
    for step in range(60):
        state, metrics = machine.train_step(state, batch)
        if step == 0:
            assert_allclose(metrics["rm/p_yes"].value, before.mean(), rtol=1e-5)
            want = -np.where(labels == 1, np.log(before), np.log(1 - before)).mean()
            assert_allclose(metrics["rm/loss"].value, want, rtol=1e-5)
            assert metrics["loss"].count == len(labels)
    trained = np.concatenate(judge_of(kind, of=state.params)(asked(kind)))
    assert auc(trained, labels) > 0.95 > auc(before, labels) and float(metrics["rm/loss"].value) < 0.4
    assert_array_equal(np.concatenate(frozen(asked(kind))), before)


def test_scores_of_episodes():
    def row(n, first=0):
        mask = np.arange(n) >= 2
        turn = np.where(mask, first + (np.arange(n) >= 4), -1).astype(np.int32)
        return Row(np.arange(1, n + 1, dtype=np.int32), turn, mask, np.zeros(n, np.float32),
                   np.where(mask, 0, -1).astype(np.int32))  # fmt: skip

    def episode(*rows):
        return Trajectory("t", 0, 0, Status.DONE, rows, {"success": True}, {})

    three = [episode(row(6)), episode(), episode(row(6), row(7, first=2)), episode(row(LENGTH + 1))]
    got = reward_model.outcome_scores(judge_of(reward_model.ORM), three)
    assert np.isnan(got[[1, 3]]).all() and 0 < got[0] < 1
    assert_allclose(got[2], judge_of(reward_model.ORM)([(row(7).tokens, np.array([6]))])[0][0])
    got = reward_model.process_scores(judge_of(reward_model.PRM), three)
    assert [p.shape for p in got] == [(2,), (0,), (4,), (2,)] and np.isnan(got[3]).all()
    assert_allclose(got[2][:2], got[0], rtol=1e-6)


def test_one_head_judges():
    both = heads.add(params(reward_model.ORM), learning.CONFIG, (reward_model.PRM,), jax.random.key(2))
    with pytest.raises(ValueError, match="want one of the two heads, and turns for prm_head"):
        judge_of(reward_model.ORM, of=both)(asked(reward_model.ORM))
