"""Laws of training adapters: the base is frozen bit for bit, no optimizer state and no gradient is of its size, layouts
and devices change nothing, the reference is the base, and what the engine serves is what the learner trains.

The start, B = 0, and merged == unmerged of the model alone: tests/models/test_lora.py.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from launch import build, evaluate, policy, runs, sft, train
from launch.plan import make_plan
from launch.workdir import open_workdir
from models import lora, transformer
from models.config import LORA_TARGETS, Lora, ModelConfig
from models.sampling import Sampling
from models.sharding import make_mesh
from rl import checkpoint
from rl.learner import make_learner, make_optimizer
from rl.losses import recipes
from rl.rollout.engine import request_key
from tests.laws import test_engine, test_learner, test_resume
from tests.laws.test_learner import CONFIG, KEEP_GRADIENTS, LOSSES, ONE_A_ROW, PACKED, assert_same, lay_out

LORA = Lora(2, 8.0)


def is_b(path) -> bool:
    return path[-1].key.endswith("_lora_b")


@cache
def adapted(config=CONFIG, seed=0):
    """Parameters whose adapters have learnt something."""

    @jax.jit
    def make(key):
        params = lora.add(transformer.init(config, key), config, LORA, key)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: 0.3 * jax.random.normal(key, x.shape) if is_b(path) else x, params
        )

    return make(jax.random.key(seed))


@cache
def learner(mesh=(1, 1, 1), **options):
    options = {"micro_rows": 4, "temperature": 0.7, "chunk": 8, "adapters": LORA, **options}
    return make_learner(CONFIG, LOSSES["grpo"], KEEP_GRADIENTS, make_mesh(*mesh), **options)


def gradients_and_metrics(batch, machine):
    state, metrics = machine.train_step(machine.init_state(adapted()), batch)
    return jax.device_get((state.opt_state, metrics))


def leaves(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(jax.device_get(tree))}


def test_layout_and_devices_change_nothing():
    want = gradients_and_metrics(lay_out(ONE_A_ROW, 24), learner())
    assert all(np.any(g) for g in jax.tree.leaves(want[0]))
    assert_same(gradients_and_metrics(lay_out(PACKED, 24), learner()), want)
    assert_same(gradients_and_metrics(lay_out(PACKED, 24), learner((2, 2, 2))), want)
    # what is clipped by is the norm of the adapters' gradients
    assert_allclose(want[1]["optim/grad_norm"].value, optax.global_norm(want[0]), rtol=1e-6)


def test_gradients_are_those_of_the_merged_matrix():
    """W' = W + s A B, so that dA = s dW' Bᵀ and dB = s Aᵀ dW', with dW' from training everything at W'."""
    batch, params = lay_out(PACKED, 24), adapted()
    got, _ = gradients_and_metrics(batch, learner())
    machine = test_learner.learner()
    whole, _ = machine.train_step(machine.init_state(lora.merge(params)), batch)
    for part in ("attention", "mlp"):
        p, g, d = params["blocks"][part], got["blocks"][part], jax.device_get(whole.opt_state["blocks"][part])
        for name in filter(p.__contains__, LORA_TARGETS):
            a, b = (np.asarray(p[f"{name}_lora_{kind}"][0]) for kind in "ab")
            a, b = a.reshape(-1, LORA.rank), b.reshape(LORA.rank, -1)
            dw = d[name][0].reshape(len(a), -1)
            for kind, want in (("a", LORA.scale * dw @ b.T), ("b", LORA.scale * a.T @ dw)):
                grad = g[f"{name}_lora_{kind}"][0].reshape(want.shape)
                assert_allclose(grad, want, atol=1e-4 * np.abs(want).max(), rtol=1e-4, err_msg=f"{name} {kind}")


def test_the_base_is_frozen_and_has_no_optimizer_state():
    tx = make_optimizer(learning_rate=1e-2, weight_decay=0.1)
    machine = make_learner(CONFIG, recipes.sft(), tx, make_mesh(), micro_rows=4, chunk=8, adapters=LORA)
    start = adapted()
    state, before = machine.init_state(start), leaves(start)
    for _ in range(3):
        given = state
        state, metrics = machine.train_step(state, lay_out(PACKED, 24))
        assert all(x.is_deleted() for x in jax.tree.leaves(given.params))  # donated, the base too
    assert not any(x.is_deleted() for x in jax.tree.leaves((start, state))) and int(state.step) == 3
    for name, after in leaves(state.params).items():
        if name.endswith(("_lora_a']", "_lora_b']")):
            assert np.mean(after != before[name]) > 0.9, name
        else:
            assert_array_equal(after, before[name], err_msg=name)
    moments = leaves(state.opt_state)
    assert all("_lora_a" in name or "_lora_b" in name or not x.shape for name, x in moments.items()), moments.keys()
    assert sum("_lora_" in name for name in moments) == 2 * 2 * len(LORA_TARGETS)  # Adam's two moments


def test_no_buffer_is_a_gradient_of_the_base():
    """By the compiled program's own account, of a model whose matrices are most of what there is."""
    shape = {"vocab_size": 32, "d_model": 128, "n_layers": 8, "n_heads": 4, "n_kv_heads": 4, "head_dim": 32}
    config = ModelConfig(**shape, d_ff=512, remat="full")  # else the backward pass keeps reshaped matrices
    tx = make_optimizer(learning_rate=1e-2)
    machine = make_learner(config, recipes.sft(), tx, make_mesh(), micro_rows=1, chunk=8, adapters=LORA)
    state = jax.eval_shape(machine.init_state, jax.random.key(0))
    batch = jax.tree.map(lambda x: x[:1, :8], lay_out(PACKED, 24))
    memory = machine.lower(state, batch).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))
    assert memory.temp_size_in_bytes < 0.25 * size, (memory, size)
    assert memory.argument_size_in_bytes < 1.1 * size, (memory, size)  # no moments of the base
    assert memory.alias_size_in_bytes > size, (memory, size)  # the base leaves in the buffers that it came in


def test_the_reference_is_the_base():
    machine, batch = learner(ref_is_base=True), lay_out(PACKED, 24)
    got = machine.prepare(machine.init_state(adapted()), None, batch)
    plain = test_learner.learner()
    base = lora.base(adapted())
    want = plain.prepare(plain.init_state(base), base, batch)
    real = batch.segment > 0
    assert_allclose(np.asarray(got.ref_logp)[real], np.asarray(want.ref_logp)[real], atol=1e-5)
    with pytest.raises(ValueError, match="got a reference, want None"):
        machine.prepare(machine.init_state(adapted()), base, batch)
    with pytest.raises(ValueError, match="ref_is_base: got no adapters"):
        make_learner(CONFIG, LOSSES["grpo"], KEEP_GRADIENTS, make_mesh(), micro_rows=2, ref_is_base=True)
    with pytest.raises(ValueError, match="init_state: got parameters without adapters and a learner with"):
        machine.init_state(base)
    with pytest.raises(ValueError, match="init_state: got parameters with adapters and a learner without"):
        plain.init_state(adapted())


@cache
def answers(served):
    """Episodes of two versions, greedy and sampled, of an engine that serves the adapters so: (version, sampling) ->
    (the worlds' ids, session ids, turns)."""
    config, played = test_engine.QUICK, {}
    with pytest.MonkeyPatch.context() as patch:
        if served == "unmerged":
            patch.setattr("rl.rollout.weights._copy", lambda params, config: jax.tree.map(jnp.copy, params))
        engine = test_engine.make_engine(config, adapted(config, 0))
        assert lora.adapted(engine._snapshot.params) is (served == "unmerged")
        for version in (0, 1):
            if version:
                engine.publish(adapted(config, 1), 1)
            for i, sampling in enumerate((Sampling(greedy=True), Sampling(temperature=0.8))):
                given = test_engine.worlds(i)
                played[version, sampling] = (
                    given,
                    *test_engine.play(engine, request_key(0, i, version), sampling, given),
                )
        engine.close()
    return played


@pytest.mark.parametrize("served", ["merged", "unmerged"])
def test_engine_logp_is_learner_logp(served):
    for (version, sampling), (given, ids, turns) in answers(served).items():
        position, logp, versions = test_engine.sampled(given, turns)
        assert set(versions) == {version} and len(position) == 27
        want = test_engine.learner_logp(
            test_engine.QUICK, adapted(test_engine.QUICK, version), ids, sampling.temperature
        )
        assert_allclose(logp, want[position], atol=1e-4, rtol=0)


def test_merged_and_unmerged_are_served_alike():
    for (case, (given, ids, turns)), (_, got, again) in zip(
        answers("merged").items(), answers("unmerged").values(), strict=True
    ):
        assert got == ids, case
        logp, other = (test_engine.sampled(given, played)[1] for played in (turns, again))
        assert_allclose(other, logp, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """A warm start with adapters of rank 2; RL with ones of rank 3 and a KL term, stopped on the way and resumed."""
    root = tmp_path_factory.mktemp("lora")
    warm, config = test_resume.tiny(root / "data"), test_resume.tiny(root / "data")
    with warm.unlocked(), config.unlocked():
        warm.lora.rank, warm.lora.targets = 2, ("wq", "wv")
        config.lora.rank, config.rl.kl_coef, config.rl.steps, config.eval.every = 3, 0.1, 2, 0
    with open_workdir(root / "sft", warm) as workdir:
        sft.run(make_plan(warm), workdir)
    plan = make_plan(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_terms", lambda plan, *given: [test_resume.TERM])
        with pytest.MonkeyPatch.context() as reading:
            reading.setattr(checkpoint, "restore", None)  # what is checked is not read: its arrays come later, once
            runs.check_start(plan, root / "rl", root / "sft")
        with open_workdir(root / "rl", config) as workdir:
            train.run(plan, workdir, root / "sft", stop_at_step=1)
        with open_workdir(root / "rl", config) as workdir:  # the folder alone: no init
            train.run(plan, workdir, None)
    return root, make_plan(warm), plan


def test_a_stage_starts_from_the_merged_one_before_it_and_resumes_alone(stages):
    root, warm, plan = stages
    codec = policy.load_codec(root / "rl")
    model = policy.build_model(plan, codec.vocab_size, root / "rl" / "tokenizer")
    trained = runs.load_params(root / "sft" / "ckpt", build.build_rl_learner(warm, model))
    assert np.any(trained["blocks"]["attention"]["wv_lora_b"])
    merged = leaves(lora.merge(trained))
    end = test_resume.params_of(plan, root / "rl").params
    base = leaves(lora.base(end))
    assert base.keys() == merged.keys()
    for name, x in base.items():
        assert_allclose(x, merged[name], atol=1e-6, err_msg=name)
    kept = jax.device_get(runs.load_params(root / "rl" / "init", build.build_rl_learner(plan, model)))
    jax.tree.map(assert_array_equal, lora.base(end), lora.base(kept))
    assert not any(np.any(x) for path, x in jax.tree_util.tree_leaves_with_path(kept) if is_b(path))
    assert all(np.any(x) for path, x in jax.tree_util.tree_leaves_with_path(end) if is_b(path))
    first, second = test_resume.records(root / "rl")
    assert max(r["policy/engine_gap_max"] for r in (first, second)) <= 1e-4
    assert first["policy/ref_kl"] < 1e-9 < second["policy/ref_kl"]  # the reference is where RL began


def test_a_run_of_adapters_is_evaluated(stages):
    root, _, plan = stages
    sampling = {"greedy": Sampling(greedy=True)}
    assert evaluate.of_run(plan, root / "rl", split="validation", n=4, samplings=sampling)["greedy"]["n"] == 4
