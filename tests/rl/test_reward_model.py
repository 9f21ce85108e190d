"""Reward models on the host: worked numbers of the loss and of the measures, what is labelled, and the two terms."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from rl import reward_model
from rl.credit import by_process
from rl.losses.reward_model import binary_cross_entropy
from rl.losses.reward_model import reward_model as loss_of
from rl.metrics import reward_model as measures
from rl.metrics.episodes import term_means
from rl.rewards.compose import score_group
from rl.rewards.process import by_turn
from rl.rewards.terms import make_terms
from rl.types import Scored, Status, Trajectory, TrajectoryBatch
from tests.rl.test_credit import LONG, PROMPT, SHORT, row
from tests.rl.test_credit import episode as of_rows
from tests.rl.test_reward_terms import episode

# --- the loss


def test_the_loss_is_the_mean_over_what_is_judged_and_nothing_else_reaches_it():
    """z = ln 3, P = 3/4: y 1 → -ln .75 = .287682, y 0 → -ln .25 = 1.386294, y .5 → their mean .836988; z = 0 → ln 2."""
    z = jnp.log(jnp.array([[3.0, 3, 3, 1, 1]]))
    y = jnp.array([[1.0, 0, 0.5, 1, 0]])
    assert_allclose(binary_cross_entropy(z, y), [[0.287682, 1.386294, 0.836988, 0.693147, 0.693147]], rtol=1e-5)
    assert float(binary_cross_entropy(jnp.array(200.0), jnp.array(0.0))) == 200  # no overflow
    mask = jnp.array([[True, True, False, True, False]])
    z, y = jnp.where(mask, z, jnp.nan), jnp.where(mask, y, jnp.nan)
    index, zero = jnp.ones((1, 5), jnp.int32), jnp.zeros((1, 5))
    batch = TrajectoryBatch(index, index, index, mask, zero, index, rewards=y, advantages=zero)
    loss, metrics = loss_of()(Scored(zero, zero, log_odds=z), batch)
    assert_allclose([loss.total, loss.count], [0.287682 + 1.386294 + 0.693147, 3], rtol=1e-5)
    got = {name: float(mean.value) for name, mean in metrics.items()}
    # yes, yes, yes (P = 1/2 is a yes) of labels 1, 0, 1; P .75, .75, .5
    want = {"rm/loss": float(loss.value), "rm/accuracy": 2 / 3, "rm/p_yes": 2 / 3, "rm/label": 2 / 3}
    assert got == pytest.approx(want)
    slope = jax.grad(lambda z: loss_of()(Scored(zero, zero, log_odds=z), batch)[0].total)(z)
    assert_allclose(slope, [[0.75 - 1, 0.75, 0, 0.5 - 1, 0]], rtol=1e-6)  # σ(z) - y
    with pytest.raises(ValueError, match="needs log_odds, got none"):
        loss_of()(Scored(zero, zero), batch)


# --- the measures

P, Y = np.array([0.9, 0.8, 0.3, 0.3]), np.array([1.0, 0, 1, 0])


def test_measures_of_four():
    # said yes, yes, no, no of 1, 0, 1, 0
    assert (measures.accuracy(P, Y), measures.constant_accuracy(Y), measures.constant_accuracy(Y[:3])) == (
        *(0.5, 0.5),
        pytest.approx(2 / 3),
    )
    # .9 is above both failures; .3 is below one and ties with one: (2 + ½) / 4
    assert measures.auc(P, Y) == 0.625
    assert measures.brier(P, Y) == pytest.approx((0.01 + 0.64 + 0.49 + 0.09) / 4)
    # [0, .5): mean p .3, mean y .5; [.5, 1]: .85, .5; half of the places each
    assert measures.ece(P, Y, bins=2) == pytest.approx(0.5 * 0.2 + 0.5 * 0.35)
    assert measures.ece(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == 0  # 1 is in the last bin
    with pytest.raises(ValueError, match="want bins >= 1 and p in"):
        measures.ece(np.array([1.5]), np.array([1.0]))
    assert measures.report(P, Y)["auc"] == 0.625 and measures.report(P, Y)["n"] == 4
    alike = measures.report(P[:2], np.ones(2))  # nothing to tell apart
    assert alike["auc"] is None and alike["base_rate"] == alike["constant_accuracy"] == 1


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), st.integers(0, 4)), min_size=1, max_size=8))
def test_a_soft_label_is_several_samples_and_auc_counts_pairs(places):
    p, y = np.array([p for p, _ in places]), np.array([n / 4 for _, n in places])
    many = np.repeat(p, 4), np.concatenate([np.arange(4) < n for _, n in places]).astype(float)
    for measure in (measures.accuracy, measures.auc, measures.ece):
        assert_allclose(measure(p, y), measure(*many), atol=1e-12)
    won, lost = many[0][many[1] == 1], many[0][many[1] == 0]
    pairs = [(a > b) + 0.5 * (a == b) for a in won for b in lost]
    assert_allclose(measures.auc(p, y), np.mean(pairs) if pairs else np.nan)


# --- what is labelled


def test_what_is_written_down_is_ids_where_is_judged_and_labels(tmp_path):
    answer = episode([[5, 6], [7]], success=True, answer="GOLD", answers=["GOLD"])
    failed = episode([[8]], Status.TOKEN_LIMIT, success=True, answer="GOLD")
    examples = [e for t in (answer, failed) for e in reward_model.outcome_examples(t)]
    examples += reward_model.process_examples(answer, [0.25, 1.0])
    reward_model.write_examples(examples, tmp_path / "labelled" / "train.jsonl")
    text = (tmp_path / "labelled" / "train.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert all(record.keys() == {"task", "tokens", "turn_ends", "labels"} for record in records)
    assert "GOLD" not in text and {record.pop("task") for record in records} == {examples[0].task}
    whole = [0, 5, 6, 0, 7, 0]  # a token of the world before, between and after
    assert records == [
        {"tokens": whole, "turn_ends": [5], "labels": [1.0]},
        {"tokens": [0, 8, 0], "turn_ends": [2], "labels": [0.0]},  # a limit is a failure
        {"tokens": whole, "turn_ends": [2, 4], "labels": [0.25, 1.0]},
    ]
    for a, b in zip(reward_model.read_examples(tmp_path / "labelled" / "train.jsonl"), examples, strict=True):
        assert a.task == b.task
        for name in ("tokens", "ends", "labels"):
            assert_array_equal(getattr(a, name), getattr(b, name))
    (tmp_path / "x.jsonl").write_text('{"task": "a"}\n')
    with pytest.raises(ValueError, match="x.jsonl:1: no labelled row"):
        reward_model.read_examples(tmp_path / "x.jsonl")


def test_a_failed_world_and_what_nobody_knows_are_no_data():
    for status in (Status.ENV_ERROR, Status.CANCELLED):
        broken = episode([[1]], status, success=True)
        assert reward_model.outcome_examples(broken) == reward_model.process_examples(broken, [1.0]) == []
    assert reward_model.outcome_examples(of_rows(0)) == []
    (one,) = reward_model.process_examples(episode([[1], [2], [3]]), [math.nan, 0.5, math.nan])
    assert (one.ends.tolist(), one.labels.tolist()) == ([3], [0.5])
    assert reward_model.process_examples(episode([[1]]), [math.nan]) == []
    with pytest.raises(ValueError, match="episode of 1 turns: got 2 labels"):
        reward_model.process_examples(episode([[1]]), [0.0, 1.0])


def test_of_several_rows_the_last_is_judged_and_turns_where_they_were_sampled():
    again = row((-1, False, [1, 2, 10, 7]), (1, True, [12]), (1, False, [5]), (2, True, [13, 14]))
    split = of_rows(0, SHORT, again)
    (one,) = reward_model.outcome_examples(split)
    assert (one.tokens[one.ends].tolist(), len(one.tokens)) == ([14], 8)
    found = reward_model.process_examples(split, [0.0, 0.5, 1.0])
    assert [(e.tokens[e.ends].tolist(), e.labels.tolist()) for e in found] == [([16], [0.0]), ([12, 14], [0.5, 1.0])]


def test_no_task_is_on_both_sides():
    """Of 400 tasks with three episodes each about a fifth is held out, whole; another seed holds out others."""
    rows = [reward_model.outcome_examples(Trajectory(f"t{i}", 0, m, Status.DONE, (SHORT,), {"success": m > 1}, {}))
            for m in range(3) for i in range(400)]  # fmt: skip
    examples = [e for some in rows for e in some]
    train, held_out = reward_model.deal(examples, held_out=0.2, seed=0)
    assert len(train) + len(held_out) == 1200 and not {e.task for e in train} & {e.task for e in held_out}
    assert 50 < len({e.task for e in held_out}) < 110 and len(held_out) % 3 == 0
    other = reward_model.deal(examples, held_out=0.2, seed=1)[1]
    assert {e.task for e in other} != {e.task for e in held_out}
    assert reward_model.deal(reversed(examples), held_out=0.2, seed=0)[1][::-1] == held_out


# --- the terms


def test_a_turn_gets_what_it_moves():
    p = np.array([0.6, 0.9, 0.2, 0.5])
    assert_allclose(by_turn(p, how="last"), [0.6, 0.3, -0.7, 0.3])
    assert_allclose(by_turn(p, how="min"), [0.6, 0.0, -0.4, 0.0])
    p[0] = p[2] = math.nan  # not judged: it moves nothing
    assert_allclose(by_turn(p, how="last"), [0.0, 0.9, 0.0, -0.4])
    assert_allclose(by_turn(p, how="min"), [0.0, 0.9, 0.0, -0.4])
    assert math.isnan(by_turn(p[:1], how="min")[0]) and math.isnan(by_turn(p[:0], how="last")[0])


@given(st.lists(st.floats(0, 1) | st.just(math.nan), min_size=1, max_size=6), st.sampled_from(["min", "last"]))
def test_turns_add_up_to_the_score_of_the_episode(p, how):
    p, moved = np.array(p), by_turn(np.array(p), how=how)
    known = p[~np.isnan(p)]
    if len(known):
        want = known.min() if how == "min" else known[-1]
        assert math.fsum(moved) == pytest.approx(want, abs=1e-12) and len(moved) == len(p)
        assert all(-1 <= r <= 1 for r in moved)
    else:
        assert np.isnan(moved).all()


def test_terms_of_reward_models():
    """Asked once for a whole group, and for its scored members alone; NaN is not judged; max_shaping holds."""
    group = [of_rows(0, LONG), of_rows(1, SHORT), of_rows(2)]
    asked = []

    def outcome(trajectories):
        asked.append([t.member for t in trajectories])
        return np.array([0.75, 0.25, math.nan])[[t.member for t in trajectories]]

    def process(trajectories):
        return [np.array([0.5, 0.25])[: t.n_turns] for t in trajectories]

    options = {"orm": {"path": "rm"}, "prm": {"path": "rm", "how": "min"}}
    weights = {"success": 1.0, "orm": 0.2, "prm": 0.1}
    terms = make_terms(weights, {}, options, scorers={"orm": outcome, "prm": process})
    scored = score_group(terms, [*group, Trajectory("t", 0, 3, Status.ENV_ERROR, (LONG,), {}, {})])
    assert asked == [[0, 1, 2]] and scored[3].scores == {}
    assert [t.scores["orm"] for t in scored[:2]] == pytest.approx([0.15, 0.05]) and math.isnan(scored[2].scores["orm"])
    assert [t.scores["prm"] for t in scored[:2]] == pytest.approx([0.025, 0.05]) and math.isnan(scored[2].scores["prm"])
    means = term_means(terms, scored)
    assert means["reward/orm/raw"].value == pytest.approx(0.5) and means["reward/orm/not_judged_frac"].value == 1 / 3
    # by turns: .05 - .025 after it, with the outcome 1, against the other's 1 + .05
    got = by_process(scored[:2], [1.025, 1.05], scale="none", terms=terms)
    mean = (0.05 + 0.975 + 1.05) / 3
    assert_allclose(got[0, 0], [1.025 - 2 * mean, 0.975 - mean])
    assert_allclose(got[0, 1], [1.05 - mean])

    (led,) = make_terms({"orm": 1.0}, {}, {"orm": {"path": "rm", "threshold": 0.5}}, leader="orm",
                        scorers={"orm": outcome})  # fmt: skip
    assert led.values(group)[:2] == [1.0, 0.0] and math.isnan(led.values(group)[2])
    with pytest.raises(ValueError, match="shaping can reach 0.4"):
        make_terms({"success": 1.0, "orm": 0.4}, {}, {"orm": {"path": "rm"}})
    for name, own, message in [
        ("orm", {}, r"missing 1 required.*'path'; it takes \['path: str', 'threshold: float = 0.0'\]"),
        ("orm", {"path": ""}, "got path='', threshold=0.0; want the workdir"),
        ("orm", {"path": "rm", "threshold": 1.5}, "threshold=1.5"),
        ("prm", {"path": "rm", "how": "mean"}, "how='mean'; want the workdir .* how of"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_terms({"success": 1.0, name: 0.1}, {}, {name: own})
    (_, nobody) = make_terms({"success": 1.0, "prm": 0.1}, {}, {"prm": {"path": "rm"}})
    with pytest.raises(ValueError, match="prm: got nobody who judges, want the reward model in rm"):
        nobody.values(group)


def test_turn_ends():
    assert reward_model.turn_ends(LONG).tolist() == [3, 8] and reward_model.last_token(LONG).tolist() == [8]
    assert reward_model.turn_ends(row(PROMPT)).tolist() == []
