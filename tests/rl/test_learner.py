"""The learner's own behaviour: updates, refusals, schedule, decay, precision. Layout laws:
tests/laws/test_learner.py."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models import transformer
from models.config import ModelConfig
from models.sharding import make_mesh
from rl import critic
from rl.learner import MOST_SKIPPED, make_learner, make_optimizer, make_schedule, skipped_in_a_row
from rl.losses import recipes
from rl.losses.kl import Penalty
from rl.types import Mean, TrajectoryBatch

CONFIG = ModelConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)


def batch(rows=2, length=8, advantage=1.0, seed=0):
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, length), bool)
    mask[:, 3:6] = True
    return TrajectoryBatch(
        tokens=rng.integers(0, 32, (rows, length)).astype(np.int32),
        segment=np.ones((rows, length), np.int32),
        position=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        action_mask=mask,
        behavior_logp=np.where(mask, -3.4, 0).astype(np.float32),
        staleness=np.zeros((rows, length), np.int32),
        rewards=np.zeros((rows, length), np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
    )


def learner(loss_fn, config=CONFIG, learning_rate=1e-2, **options):
    tx = make_optimizer(learning_rate=learning_rate)
    return make_learner(config, loss_fn, tx, make_mesh(), micro_rows=2, **options)


@cache
def sft():
    return learner(recipes.sft())


@cache
def grpo():
    return learner(recipes.grpo())


@cache
def fresh_params():
    return jax.jit(transformer.init, static_argnums=0)(CONFIG, jax.random.key(0))


def leaves(tree):
    return [np.array(x) for x in jax.tree.leaves(jax.device_get(tree))]


def test_sft_learns_its_batch_and_counts_its_steps():
    machine = sft()
    state, losses = machine.init_state(jax.random.key(0)), []
    for _ in range(30):
        state, metrics = machine.train_step(state, batch())
        losses.append(float(metrics["loss"].value))
    assert losses[0] == pytest.approx(np.log(32), abs=1.0) and losses[-1] < 0.3 * losses[0]
    assert (int(state.step), int(state.skipped)) == (30, 0)


def test_a_rewarded_token_becomes_likelier_and_a_punished_one_less():
    for advantage, sign in ((1.0, 1), (-1.0, -1)):
        machine = grpo()
        start = fresh_params()
        state = machine.init_state(start)
        before = machine.prepare(state, start, batch()).ref_logp
        on_policy = dataclasses.replace(batch(advantage=advantage), behavior_logp=before * batch().action_mask)
        state, metrics = machine.train_step(state, on_policy)
        assert float(metrics["policy/engine_gap_max"].value) < 1e-6 and float(metrics["policy/kl"].value) < 1e-9
        after = machine.prepare(state, state.params, batch()).ref_logp
        assert np.all(sign * (after - before)[batch().action_mask] > 0)


def test_a_gradient_that_is_not_finite_is_refused_whole():
    machine = grpo()
    state, _ = machine.train_step(machine.init_state(jax.random.key(0)), batch())
    before = leaves((state.params, state.opt_state))
    for poison in (np.nan, np.inf):
        state, metrics = machine.train_step(state, batch(advantage=poison))
        assert float(metrics["optim/skipped"].value) == 1
        for a, b in zip(before, leaves((state.params, state.opt_state)), strict=True):
            assert_array_equal(a, b)  # the schedule's count among them
    assert (int(state.step), int(state.skipped)) == (1, 2)
    state, metrics = machine.train_step(state, batch())
    assert float(metrics["optim/skipped"].value) == 0 and int(state.step) == 2
    assert any(np.any(a != b) for a, b in zip(before, leaves((state.params, state.opt_state)), strict=True))


def test_state_is_copied_in_and_donated():
    machine = sft()
    start = fresh_params()
    state = machine.init_state(start)
    fresh, _ = machine.train_step(state, batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(start))
    assert not any(x.is_deleted() for x in jax.tree.leaves(fresh))


def test_prepare_fills_what_was_asked_and_passes_the_rest():
    machine = learner(recipes.ppo_decoupled(), fill_proximal=True)
    state = machine.init_state(jax.random.key(0))
    ref = jax.tree.map(lambda x: 0.5 * x, state.params)
    filled = machine.prepare(state, ref, batch())
    logp = sft().prepare(state, state.params, batch()).ref_logp
    assert_array_equal(filled.proximal_logp, logp)
    assert np.any(filled.ref_logp != logp) and filled.values is None
    assert_array_equal(filled.tokens, batch().tokens)
    assert machine.prepare(state, None, batch()).ref_logp is None
    plain = sft().prepare(state, None, batch())
    assert plain.ref_logp is None and plain.proximal_logp is None
    _, metrics = machine.train_step(state, filled)
    assert float(metrics["policy/is_capped_frac"].value) == 0


def chained(**options):
    """The batch as one that a credit on the device can follow: an episode a row, one group."""
    plain = batch(**options)
    rows = np.arange(plain.tokens.shape[0], dtype=np.int32)[:, None]
    return dataclasses.replace(plain, episode=rows + 0 * plain.tokens, turn=0 * plain.tokens)


@cache
def adapting(in_reward):
    how = {"critic": critic.by_group(baseline="none")} if in_reward else {}
    penalty = Penalty(0.5, in_reward=in_reward, target=1e-4, gain=0.1)
    return learner(recipes.dapo(kl_coef=0.0 if in_reward else 0.5), kl=penalty, keep_ref=True, **how)


@pytest.mark.parametrize("in_reward", [False, True])
def test_beta_is_adapted_in_one_program_and_stays_where_an_update_is_refused(in_reward):
    """The reference is the policy at the start: KL 0 falls short of any target, then a far one exceeds it."""
    machine = adapting(in_reward)
    state, seen = machine.init_state(fresh_params()), []
    last = np.arange(8) == 5
    for advantage in (1.0, 1.0, np.nan, 1.0):
        played = dataclasses.replace(chained(), rewards=(last * np.array([[advantage], [0]])).astype(np.float32))
        played = dataclasses.replace(played, advantages=played.action_mask * np.float32(advantage))
        state, metrics = machine.train_step(state, machine.prepare(state, None, played))
        seen.append(float(metrics["policy/kl_coef"].value))
        kl = float(metrics["policy/ref_kl"].value)
    assert seen == pytest.approx([0.5, 0.5 * 0.98, 0.5 * 0.98 * 1.02, 0.5 * 0.98 * 1.02]) and kl > 1e-3
    assert (int(state.skipped), machine.compiled_steps()) == (1, 1)
    assert machine.init_state(jax.random.key(0)).kl_coef == 0.5 and grpo().init_state(jax.random.key(0)).kl_coef is None


def test_a_penalty_in_the_reward_is_what_the_state_says_it_is():
    """A group of two: the reward 1 : 0, less β · 3 tokens · (log π - log π_ref), π the one that sampled."""
    machine = adapting(True)
    state = machine.init_state(fresh_params())
    played = dataclasses.replace(chained(), rewards=((np.arange(8) == 5) * np.array([[1], [0]])).astype(np.float32))
    ref = grpo().prepare(grpo().init_state(fresh_params()), fresh_params(), batch()).ref_logp
    for coef in (0.5, 2.0):
        ready = machine.prepare(dataclasses.replace(state, kl_coef=jnp.float32(coef)), None, played)
        assert_allclose(ready.ref_logp, ref, atol=1e-6)
        k1 = np.where(played.action_mask, played.behavior_logp - ref, 0).sum(1)
        score = np.array([1, 0]) - coef * k1
        assert_allclose(ready.advantages[:, 4], score - score.mean(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="kl.in_reward: got no critic, want one"):
        learner(recipes.dapo(), kl=Penalty(0.5, in_reward=True))


def test_a_reference_that_is_refreshed_is_a_copy_in_buffers_of_its_own():
    machine = learner(recipes.grpo(kl_coef=0.1), keep_ref=True)
    start = fresh_params()

    def buffers(tree):
        return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}

    for state in (machine.init_state(jax.random.key(0)), machine.init_state(start)):
        assert not buffers(state.ref) & buffers(state.params)
        jax.tree.map(assert_array_equal, state.ref, state.params)
    given = machine.init_state(jax.tree.map(jnp.copy, start), donate=True)
    assert not buffers(given.ref) & buffers(given.params)
    state, _ = machine.train_step(state, machine.prepare(state, None, batch()))
    jax.tree.map(assert_array_equal, state.ref, start)
    assert np.any(state.params["embed"] != start["embed"])
    policy = jax.device_get(state.params)
    state = machine.refresh(state)
    assert not buffers(state.ref) & buffers(state.params)
    state, metrics = machine.train_step(state, machine.prepare(state, None, batch()))  # donates the policy alone
    jax.tree.map(assert_array_equal, state.ref, policy)
    assert float(metrics["policy/ref_kl"].value) < 1e-9
    with pytest.raises(ValueError, match="got a reference, want None; this learner's is in its state"):
        machine.prepare(state, start, batch())


def test_one_program_for_every_number_of_rows():
    machine = learner(recipes.sft())
    state = machine.init_state(jax.random.key(0))
    with jax.transfer_guard("disallow"):  # every crossing is explicit
        for used in (8, 2, 5, 0):
            full = batch(rows=8)
            keep = np.arange(8)[:, None] < used
            part = dataclasses.replace(full, segment=full.segment * keep, action_mask=full.action_mask & keep)
            state, metrics = machine.train_step(state, machine.prepare(state, None, part))
            assert jax.device_get(metrics["sft/nll"].count) == 3 * used
    assert machine.compiled_steps() == 1


def test_schedules():
    warm = make_schedule(learning_rate=2.0, warmup_steps=4)
    assert [float(warm(n)) for n in (0, 1, 3, 100)] == [0.5, 1.0, 2.0, 2.0]  # the first update moves
    line = make_schedule(learning_rate=2.0, warmup_steps=1, decay_steps=4, schedule="linear", final_frac=0.5)
    assert [float(line(n)) for n in (0, 2, 4, 9)] == [2.0, 1.5, 1.0, 1.0]
    bend = make_schedule(learning_rate=2.0, decay_steps=2, schedule="cosine")
    assert_allclose([float(bend(n)) for n in (0, 1, 5)], [1.0, 0.0, 0.0], atol=1e-6)
    with pytest.raises(ValueError, match="schedule: got 'step', want 'constant', 'linear' or 'cosine'"):
        make_schedule(learning_rate=1.0, schedule="step")
    with pytest.raises(ValueError, match="decay_steps: got 0 with schedule='cosine'"):
        make_schedule(learning_rate=1.0, schedule="cosine")


def test_matrices_alone_are_decayed():
    config = dataclasses.replace(CONFIG, tie_embeddings=False, attention_bias=True, qk_norm=True, key_shift=True)
    shapes = jax.eval_shape(lambda key: transformer.init(config, key), jax.random.key(0))
    tx = make_optimizer(learning_rate=0.1, weight_decay=0.5)

    @jax.jit
    def update():
        params, zeros = (jax.tree.map(lambda x, v=v: jnp.full(x.shape, v, x.dtype), shapes) for v in (1.0, 0.0))
        return tx.update(zeros, tx.init(params), params)[0]

    updates = update()
    moved = {path[-1].key for path, u in jax.tree_util.tree_leaves_with_path(updates) if np.any(np.asarray(u))}
    assert moved == {"wq", "wk", "wv", "wo", "gate", "up", "down", "lm_head"}


def test_bf16_compute_keeps_f32_masters_and_small_updates():
    machine = learner(recipes.sft(), config=dataclasses.replace(CONFIG, dtype="bfloat16"), learning_rate=1e-6)
    state = machine.init_state(jax.random.key(0))
    before = leaves(state.params["blocks"])
    for _ in range(5):
        state, _ = machine.train_step(state, batch())
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    changed = [np.mean(a != b) for a, b in zip(before, leaves(state.params["blocks"]), strict=True)]
    assert min(changed) > 0.9, changed


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="micro_rows: got 3, want a multiple of data x fsdp = 2 devices"):
        make_learner(CONFIG, recipes.sft(), make_optimizer(learning_rate=1.0), make_mesh(2), micro_rows=3)
    machine = sft()
    with pytest.raises(ValueError, match="batch: got 3 rows, want a multiple of micro_rows=2"):
        machine.train_step(machine.init_state(jax.random.key(0)), batch(rows=3))


def test_a_run_in_which_no_update_can_be_made_ends():
    refused, made = ({"optim/skipped": Mean(jnp.float32(x), jnp.float32(1))} for x in (1, 0))
    partly = {"optim/skipped": Mean(jnp.float32(1), jnp.float32(4))}  # one of four mini-batches had no row
    assert skipped_in_a_row(partly, MOST_SKIPPED - 1) == 0
    count = 0
    for _ in range(MOST_SKIPPED - 1):
        count = skipped_in_a_row(refused, count)
    assert (count, skipped_in_a_row(made, count)) == (MOST_SKIPPED - 1, 0)
    with pytest.raises(RuntimeError, match=f"got {MOST_SKIPPED} batches in a row whose updates were refused"):
        skipped_in_a_row(refused, count)
