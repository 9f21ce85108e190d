"""Laws of the learner: how episodes are laid out, cut and spread over devices changes no loss, no gradient, no metric.

Layouts of the same five episodes are compared through the compiled `train_step`; an optimizer that only keeps
what it is given shows the gradients as they are.
"""

import dataclasses
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from models import heads, transformer
from models.config import Lora, ModelConfig
from models.sharding import make_mesh
from rl.advantages import group_relative, leave_one_out
from rl.learner import make_learner, make_optimizer
from rl.losses import recipes
from rl.rollout import weights
from rl.rollout.weights import snapshot
from rl.types import Mean, TrajectoryBatch

CONFIG = ModelConfig(
    vocab_size=64, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, qk_norm=True, key_shift=True
)
KEEP_GRADIENTS = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)
LOSSES = {
    "grpo": recipes.grpo(kl_coef=0.1, entropy_coef=0.01, clip_high=0.3),
    "dapo": recipes.dapo(),
    "gspo": recipes.gspo(clip_low=0.1, clip_high=0.1),
    "sft": recipes.sft(),
}
LENGTHS = (7, 3, 11, 5, 4)


def episodes(lengths=LENGTHS, seed=0):
    """One dict of arrays an episode; the first token is a prompt token, about half of the others are actions."""
    rng = np.random.default_rng(seed)
    out = []
    for length in lengths:
        mask = (rng.random(length) < 0.5) & (np.arange(length) > 0)
        mask[-1] = True
        out.append(
            {
                "tokens": rng.integers(1, CONFIG.vocab_size, length),
                "position": np.arange(length),
                "action_mask": mask,
                "behavior_logp": np.where(mask, rng.normal(-4.2, 0.3, length), 0),
                "staleness": mask * rng.integers(0, 3),
                "advantages": mask * rng.normal(),
                "rewards": np.zeros(length),
                "ref_logp": np.where(mask, rng.normal(-4.2, 0.3, length), 0),
            }
        )
    return out


def lay_out(rows, length, of=None):
    """`rows[b]` lists the episodes of row b, in order."""
    of = episodes() if of is None else of
    dtypes = dict(tokens=np.int32, position=np.int32, action_mask=bool, staleness=np.int32, segment=np.int32)
    fields = [*of[0], "segment"]
    batch = {name: np.zeros((len(rows), length), dtypes.get(name, np.float32)) for name in fields}
    for b, members in enumerate(rows):
        begin = 0
        for number, i in enumerate(members, start=1):
            end = begin + len(of[i]["tokens"])
            for name, values in of[i].items():
                batch[name][b, begin:end] = values
            batch["segment"][b, begin:end] = number
            begin = end
    return TrajectoryBatch(**batch)


@cache
def params():
    return jax.jit(transformer.init, static_argnums=0)(CONFIG, jax.random.key(0))


@cache
def learner(loss="grpo", micro_rows=2, mesh=(1, 1, 1), temperature=0.7, chunk=8):
    mesh = make_mesh(*mesh)
    kwargs = dict(micro_rows=micro_rows, temperature=temperature, chunk=chunk)
    return make_learner(CONFIG, LOSSES[loss], KEEP_GRADIENTS, mesh, **kwargs)


def gradients_and_metrics(batch, **kwargs):
    machine = learner(**kwargs)
    state, metrics = machine.train_step(machine.init_state(params()), batch)
    return jax.device_get((state.opt_state, metrics))


def assert_same(got, want):
    """Up to f32 sums in another order: 1e-5 of a leaf's largest gradient; 1e-6 a token in a metric (terms cancel)."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got[0]), jax.tree.leaves(want[0]), strict=True):
        scale = max(float(np.max(np.abs(b))), 1e-3)
        assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))
    assert got[1].keys() == want[1].keys()
    for name, b in want[1].items():
        count = b.count if isinstance(b, Mean) else 1
        if isinstance(b, Mean):
            assert_array_equal(got[1][name].count, b.count, err_msg=name)
        total, expected = (m.total if isinstance(m, Mean) else m.value for m in (got[1][name], b))
        assert_allclose(total, expected, rtol=1e-5, atol=1e-6 * count, err_msg=name)


# All layouts below have the one shape [8 24], so that each loss is compiled once, unless the shape is what is tested.
ONE_A_ROW = [[0], [1], [2], [3], [4], [], [], []]
REORDERED = [[], [], [2], [1, 0], [], [], [4, 3], []]  # rows and segments, with unused micro-batches before and between
PACKED = [[0, 1, 2], [4, 3], [], [], [], [], [], []]  # three segments in a row of 24 tokens


@pytest.mark.parametrize("loss", LOSSES)
def test_packed_equals_one_per_row(loss):
    want = gradients_and_metrics(lay_out(ONE_A_ROW, 24), loss=loss)
    assert any(np.any(g) for g in jax.tree.leaves(want[0]))
    assert_same(gradients_and_metrics(lay_out(PACKED, 24), loss=loss), want)


@pytest.mark.parametrize(
    ("rows", "length", "micro_rows", "loss"),
    [
        (REORDERED, 24, 2, "grpo"),
        (REORDERED, 24, 2, "dapo"),
        ([[0, 1], [3, 4], [2], []], 13, 2, "grpo"),  # fewer rows and columns of padding
        (ONE_A_ROW, 24, 1, "grpo"),
        (ONE_A_ROW, 24, 8, "grpo"),
        (ONE_A_ROW, 24, 8, "dapo"),
    ],
)
def test_padding_row_order_and_cut_change_nothing(rows, length, micro_rows, loss):
    want = gradients_and_metrics(lay_out(ONE_A_ROW, 24), loss=loss)
    assert_same(gradients_and_metrics(lay_out(rows, length), loss=loss, micro_rows=micro_rows), want)


def test_log_probs_are_cut_into_chunks_without_trace():
    batch = lay_out(PACKED, 24)
    assert_same(gradients_and_metrics(batch), gradients_and_metrics(batch, chunk=64))


MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2))


@cache
def updated(mesh, micro_rows):
    """(state, metrics) after one step from `params()`; Adam's first moment is the (clipped) gradient, times 0.1.

    With Adam's usual eps of 1e-8, the sign of a gradient that is zero but for rounding would decide a whole step.
    """
    tx = make_optimizer(learning_rate=1e-2, weight_decay=0.1, eps=1e-3)
    options = dict(micro_rows=micro_rows, temperature=0.7, chunk=8)
    machine = make_learner(CONFIG, LOSSES["grpo"], tx, make_mesh(*mesh), **options)
    return jax.device_get(machine.train_step(machine.init_state(params()), lay_out(ONE_A_ROW, 24)))


@pytest.mark.parametrize("mesh", MESHES)
def test_one_device_equals_eight(mesh):
    """The same loss, gradients and update."""
    assert jax.device_count() >= 8, "tests/conftest.py asks for 8 fake devices before jax is imported"
    want = updated((1, 1, 1), 8)
    assert np.max(np.abs(want[0].params["embed"] - params()["embed"])) > 1e-3
    assert_same(updated(mesh, 4 if mesh == (2, 2, 2) else 8), want)


def with_heads(mesh):
    """(state before, state after) one step of a learner whose parameters have heads; all of it decays."""
    tx = optax.adamw(1e-2, weight_decay=0.1, eps=1e-3)
    options = dict(micro_rows=4, temperature=0.7, chunk=8, heads=("value_head", "orm_head"))
    machine = make_learner(CONFIG, LOSSES["grpo"], tx, make_mesh(*mesh), **options)
    start = heads.add(params(), CONFIG, ("value_head", "orm_head"), jax.random.key(1))
    start["value_head"]["weight"] = jnp.linspace(-1, 1, CONFIG.d_model)
    state = machine.init_state(start)
    places = {name: state.params[name]["weight"].sharding.spec for name in ("value_head", "orm_head")}
    assert places == {"value_head": PartitionSpec("fsdp"), "orm_head": PartitionSpec("fsdp", None)}
    with pytest.raises(ValueError, match=r"with heads \[\] and a learner with \['value_head', 'orm_head'\]"):
        machine.init_state(params())
    return start, jax.device_get(machine.train_step(state, lay_out(ONE_A_ROW, 24)))


def test_an_update_with_heads_is_that_of_one_device():
    start, want = with_heads((1, 1, 1))
    assert_allclose(want[0].params["value_head"]["weight"], (1 - 1e-3) * start["value_head"]["weight"], rtol=1e-5)
    assert np.any(start["orm_head"]["weight"] != want[0].params["orm_head"]["weight"])
    assert_same(with_heads((2, 2, 2))[1], want)


def test_heads_are_trained_beside_adapters_alone():
    options = dict(micro_rows=1, heads=("prm_head",), adapters=Lora(2, 4.0, ("wq",)))
    machine = make_learner(CONFIG, LOSSES["grpo"], KEEP_GRADIENTS, make_mesh(), **options)
    state = jax.eval_shape(machine.init_state, jax.random.key(0))
    assert state.opt_state.keys() == {"blocks", "prm_head"} and state.params.keys() >= {"embed", "prm_head"}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_a_kernel_is_divided_over_the_learner_s_mesh(mesh):
    """The compiler does not divide it: the program says that each device runs it on its own rows and heads."""
    config = dataclasses.replace(CONFIG, attention="splash")
    machine = make_learner(config, LOSSES["sft"], KEEP_GRADIENTS, make_mesh(*mesh), micro_rows=4, chunk=8)
    state = jax.eval_shape(machine.init_state, jax.random.key(0))
    program = machine.lower(state, lay_out(ONE_A_ROW, 24)).as_text()
    assert ("sdy.manual_computation" in program) is (mesh != (1, 1, 1))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_a_start_is_the_state_s_parameters_alone_and_may_be_given_away(mesh):
    """From a key bit for bit those of a state; given away, they are not copied: 3 times their size, not 4."""
    machine = learner(micro_rows=4, mesh=mesh)
    start = machine.init_params(jax.random.key(0))
    jax.tree.map(assert_array_equal, start, machine.init_state(jax.random.key(0)).params)
    held = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(start)]
    there = machine.init_params(start)
    assert [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(there)] == held
    assert not any(x.is_deleted() for x in jax.tree.leaves(start)) and machine.init_state(start)
    state = machine.init_state(start, donate=True)
    assert [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(state.params)] == held
    assert all(x.is_deleted() for x in jax.tree.leaves(start))


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_parameters_are_born_sharded(mesh):
    """Each device holds its share alone, and the program that makes them never has more on one: no whole matrix."""
    machine = learner(micro_rows=8, mesh=mesh)
    born = jax.jit(machine.init_state).lower(jax.random.key(0)).compile()
    state = machine.init_state(jax.random.key(0))
    assert_same((jax.device_get(state.params), {}), (jax.device_get(params()), {}))
    text = born.as_text()
    matrices = [x for x in jax.tree.leaves(state.params) if x.size >= CONFIG.d_model * CONFIG.head_dim * 2]
    assert len(matrices) >= 8
    for x in matrices:
        share = x.addressable_shards[0].data
        assert share.size * math.prod(mesh[1:]) == x.size
        assert f"[{','.join(map(str, share.shape))}]" in text
        assert f"[{','.join(map(str, x.shape))}]" not in text


def test_a_batch_is_dealt_without_moving_a_row():
    """[M S r T] on the host is [S M r T] on the devices: what one shard holds of a micro-batch was put there."""
    machine = learner(micro_rows=4, mesh=(2, 2, 2))
    batch = lay_out([[0], [1], [2], [3], [4], [], [], []], 24)
    dealt = machine.prepare(None, None, batch).tokens
    for shard, rows in enumerate([(0, 4), (1, 5), (2, 6), (3, 7)]):
        assert_array_equal(np.asarray(dealt)[2 * shard : 2 * shard + 2], batch.tokens[list(rows)])
    assert {s.data.shape for s in dealt.addressable_shards} == {(2, 24)}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_published_weights_lie_whole_on_one_device_in_buffers_of_their_own(mesh):
    machine = learner(micro_rows=4, mesh=mesh)
    state = machine.init_state(params())
    served = snapshot(state.params, 3)
    machine.train_step(state, lay_out(PACKED, 24))  # donates the state
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
    assert served.version == 3
    for x, want in zip(jax.tree.leaves(served.params), jax.tree.leaves(params()), strict=True):
        assert x.devices() == {jax.local_devices()[0]}
        assert_array_equal(x, want)


def test_in_one_process_no_device_but_the_sampling_one_gets_the_whole_policy(monkeypatch):
    monkeypatch.setattr(weights, "_gather", None)
    state = learner(micro_rows=4, mesh=(2, 2, 2)).init_state(params())
    jax.tree.map(assert_array_equal, snapshot(state.params, 0).params, params())


def test_published_for_bfloat16_matrices_have_half_the_bytes_and_compute_the_same():
    short = dataclasses.replace(CONFIG, dtype="bfloat16")
    served = snapshot(params(), 0, short).params
    kept = {path[-1].key for path, x in jax.tree_util.tree_leaves_with_path(served) if x.dtype == "float32"}
    assert kept == {"attention_norm", "mlp_norm", "final_norm", "q_norm", "k_norm", "key_shift"}
    jax.tree.map(lambda x, y: assert_array_equal(x, y.astype(x.dtype)), served, params())
    batch = lay_out(PACKED, 24)
    hidden = [transformer.apply(p, short, batch.tokens, batch.segment, batch.position) for p in (served, params())]
    assert_array_equal(*hidden)
    assert all(x.dtype == "float32" for x in jax.tree.leaves(snapshot(params(), 0, CONFIG).params))


def scores(rows, of=None):
    machine = learner()
    return machine.prepare(machine.init_state(params()), params(), lay_out(rows, 24, of)).ref_logp


def test_prepare_scores_a_packed_token_as_if_alone():
    alone, packed = scores(ONE_A_ROW), scores([[2, 0, 1], [3, 4], *[[]] * 6])
    begin = 0
    for i in (2, 0, 1):
        length = LENGTHS[i]
        # the first token of a segment is scored by whatever stands before it: never an action
        assert_allclose(packed[0, begin + 1 : begin + length], alone[i, 1:length], atol=1e-5)
        begin += length


def test_another_segment_cannot_be_seen():
    own = episodes()
    other = [dict(e) for e in own]
    other[1]["tokens"] = (own[1]["tokens"] + 7) % CONFIG.vocab_size
    a, b = scores(PACKED, own), scores(PACKED, other)
    assert_array_equal(a[0, : LENGTHS[0]], b[0, : LENGTHS[0]])
    assert_array_equal(a[0, 11:21], b[0, 11:21])  # episode 2, but for its first token
    assert np.any(a[0, 7:10] != b[0, 7:10])


def test_nothing_off_the_mask_trains():
    batch = lay_out(PACKED, 24)
    want = gradients_and_metrics(batch)
    off = ~batch.action_mask
    dirty = {
        name: np.where(off, np.float32(np.nan), getattr(batch, name))
        for name in ("behavior_logp", "advantages", "rewards", "ref_logp")
    }
    jax.tree.map(assert_array_equal, gradients_and_metrics(dataclasses.replace(batch, **dirty)), want)


def test_padding_holds_garbage_and_all_of_it_may_be_padding():
    batch = lay_out(ONE_A_ROW, 24)
    want = gradients_and_metrics(batch)
    dirty = dataclasses.replace(batch, tokens=np.where(batch.segment == 0, 63, batch.tokens))
    assert_same(gradients_and_metrics(dirty), want)
    grads, metrics = gradients_and_metrics(lay_out([[]] * 8, 24))
    assert not any(np.any(g) for g in jax.tree.leaves(grads))
    assert metrics["loss"].count == 0 and metrics["optim/skipped"].value == 1


@pytest.mark.parametrize("advantages", [lambda r, g: group_relative(r, g, scale="std"), leave_one_out])
def test_an_equal_group_pushes_nothing(advantages):
    credit = advantages(np.full(5, 0.3, np.float32), np.zeros(5, int))
    assert (credit == 0).all()
    of = [e | {"advantages": e["action_mask"] * a} for e, a in zip(episodes(), credit, strict=True)]
    grads, metrics = gradients_and_metrics(lay_out(PACKED, 24, of), loss="dapo")
    assert not any(np.any(g) for g in jax.tree.leaves(grads))
    assert metrics["loss"].total == 0 and metrics["optim/grad_norm"].total == 0


def test_a_part_of_an_episode_is_a_mean_over_that_part():
    """The rows of one episode may lie in several mini-batches: then the shares in one add up to less than 1."""
    (one,) = episodes(LENGTHS[:1])
    share = one["action_mask"] / one["action_mask"].sum()
    whole, part = (
        gradients_and_metrics(lay_out([[0], []], 24, [one | {"episode_share": frac * share}])) for frac in (1.0, 0.25)
    )
    assert float(part[1]["loss"].count) == pytest.approx(0.25)
    for a, b in zip(jax.tree.leaves(part[0]), jax.tree.leaves(whole[0]), strict=True):
        assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert any(np.abs(b).max() > 1e-3 for b in jax.tree.leaves(whole[0]))


def test_minibatches_are_updates_in_turn_from_one_proximal_policy():
    """Three micro-batches in two shares, 0 and 2, then 1, are two steps on what was prepared before either."""
    options = dict(micro_rows=2, temperature=0.7, chunk=8, fill_proximal=True)
    tx, loss = make_optimizer(learning_rate=3e-2), recipes.ppo_decoupled()
    one, two = (make_learner(CONFIG, loss, tx, make_mesh(), **options, minibatches=n) for n in (1, 2))
    batch, state = lay_out(ONE_A_ROW, 24), one.init_state(params())
    prepared = jax.device_get(one.prepare(state, None, batch))
    learned = []
    for rows in ([0, 1, 4], [2, 3]):
        keep = np.isin(np.arange(8), rows)[:, None]
        share = jax.tree.map(lambda x: np.where(keep, x, np.zeros_like(x)), prepared)  # noqa: B023
        state, metrics = one.train_step(state, share)
        learned.append(jax.device_get(metrics))
    both = two.init_state(params())
    both, got = two.train_step(both, two.prepare(both, None, batch))
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-6), both.params, state.params)
    assert int(both.step) == 2 and np.abs(both.params["embed"] - params()["embed"]).max() > 3e-2
    first, second = learned
    assert_allclose(got["loss"].total, first["loss"].total + second["loss"].total, rtol=1e-5)
    for name in ("policy/is_weight", "policy/entropy", "policy/staleness"):
        assert_array_equal(got[name].count, first[name].count + second[name].count)
    gaps = [float(metrics["policy/engine_gap_max"].value) for metrics in (got, first, second)]
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-5)  # what the policy has moved by then is no gap
