"""Every recipe and credit that a config may name is built, with the numbers that the config gives it, and runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.arg import ConfigError
from configs.defaults import defaults
from launch import build, policy, recipe, runs, sweep, train
from launch.plan import make_plan
from launch.plan_checks import OF_CRITIC, ON_DEVICE, ON_HOST, RECIPES
from launch.workdir import open_workdir
from models.config import ModelConfig
from rl.credit import of_critic
from rl.losses.kl import Penalty
from rl.rewards.compose import RewardTerm
from rl.types import Scored, TrajectoryBatch
from tests.rl.test_losses import NEW, OLD, batch_of


def plan_of(name, /, **credit):
    config = defaults()
    config.rl.recipe, config.rl.loss_tokens, config.rl.clip_high = name, 4, 0.5
    config.credit.name = "token" if name == "ppo" else "group"
    config.credit.update(credit)
    return make_plan(config)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_the_config_s_clip(name):
    """One token of ratio 1.4, A = 1: within a clip of .5, so the loss moves with log π in every recipe."""
    ones = jnp.ones((1, 1))
    data = dict(advantages=ones, rewards=ones, values=ones, returns=ones, proximal_logp=0 * ones)
    index = jnp.ones((1, 1), jnp.int32)
    batch = TrajectoryBatch(index, index, index, index > 0, jnp.log(ones), index * 0, **data)
    loss_fn = recipe.build_loss(plan_of(name))

    def loss(logp):
        return loss_fn(Scored(logp, 0 * ones, ones), batch)[0].value

    scale = {"dr_grpo": 4, "rloo": 4}.get(name, 1)
    assert float(jax.grad(lambda x: loss(jnp.log(1.4 * ones) + x))(0.0)) == pytest.approx(-1.4 / scale, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "credit", "scale"),
    [("grpo", "group", "std"), ("dr_grpo", "group", "none"), ("rloo", "others", "std"), ("gigpo", "anchor", "std"),
     ("gspo_token", "anchor", "std"), ("reinforce_pp", "returns", "std"), ("ppo", "token", "std"),
     ("ppo_decoupled", "returns", "std")],
)  # fmt: skip
def test_what_a_config_leaves_open_is_the_recipe_s_own(name, credit, scale):
    config = defaults()
    config.rl.recipe, config.rl.loss_tokens = name, 4
    plan = make_plan(config)
    assert (plan.credit.name, plan.rl.scale) == (credit, scale)


def test_a_recipe_s_own_clip_is_its_paper_s():
    """GSPO silences a ratio of 1.01, GRPO does not."""
    ones, index = jnp.ones((1, 1)), jnp.ones((1, 1), jnp.int32)
    batch = TrajectoryBatch(index, index, index, index > 0, jnp.log(ones), index * 0, ones, ones)
    config = defaults()
    for name, want in {"grpo": -1.01, "gspo": 0.0}.items():
        config.rl.recipe = name
        loss_fn = recipe.build_loss(make_plan(config))
        slope = jax.grad(lambda x: loss_fn(Scored(jnp.log(1.01) + x * ones, 0 * ones), batch)[0].value)(0.0)  # noqa: B023
        assert float(slope) == pytest.approx(want, rel=1e-5)


def slope(name, ratio, advantage, *, behavior=0.0, ref=None, **keys):
    """d loss / d log π of one token by a config's loss: π/π_proximal is `ratio`, log π_proximal 0."""
    config = defaults()
    config.rl.recipe, config.rl.loss_tokens, config.rl.clip_high = name, 1, 0.5
    config.rl.update(keys)
    ones, index = jnp.ones((1, 1)), jnp.ones((1, 1), jnp.int32)
    data = dict(values=0 * ones, returns=0 * ones, proximal_logp=0 * ones, ref_logp=ref and ref * ones)
    batch = TrajectoryBatch(index, index, index, index > 0, behavior * ones, index * 0, ones, advantage * ones, **data)
    loss_fn = recipe.build_loss(make_plan(config))
    now = jnp.log(ratio) * ones
    return float(jax.grad(lambda x: loss_fn(Scored(now + x, 0 * ones, 0 * ones), batch)[0].value)(0.0))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_the_config_s_weights_and_bounds(name):
    """π_proximal/π_behavior is e = 2.718: cut to is_cap 2, or kept under 4; of decoupled PPO rejected over 2."""
    assert slope(name, 1.4, 1.0, behavior=-1.0, is_cap=4.0) == pytest.approx(-1.4 * np.e, rel=1e-5)
    over = 0.0 if name == "ppo_decoupled" else -1.4 * 2
    assert slope(name, 1.4, 1.0, behavior=-1.0, is_cap=2.0) == pytest.approx(over, rel=1e-5)
    plan = plan_of(name)
    assert recipe.wants_proximal(plan) == (name == "ppo_decoupled")
    if name == "cispo":
        with pytest.raises(ConfigError, match="rl.dual_clip=3.0 with rl.recipe='cispo': it bounds every weight"):
            slope(name, 4.0, -1.0, dual_clip=3.0)
        return
    assert slope(name, 4.0, -1.0) == pytest.approx(4.0, rel=1e-5)
    assert slope(name, 4.0, -1.0, dual_clip=3.0) == 0
    # k2 of log π - log π_ref = 1 in the loss; in the reward it is the learner's
    assert slope(name, 1.0, 0.0, ref=-1.0, kl_coef=0.5, kl_kind="k2") == pytest.approx(0.5, rel=1e-5)


def test_where_the_penalty_is_is_said_to_the_learner():
    config = defaults()
    config.rl.kl_coef = 0.1
    assert recipe.build_penalty(make_plan(config)) is None
    config.rl.kl_in, config.rl.kl_target = "reward", 0.05
    plan = make_plan(config)
    assert recipe.build_penalty(plan) == Penalty(0.1, in_reward=True, target=0.05, gain=16 * 8 / 10_000)
    assert recipe.build_critic(plan) is not None and recipe.build_credit(plan, []) is of_critic
    assert slope("grpo", 1.0, 0.0, ref=-1.0, kl_coef=0.1, kl_in="reward") == 0
    # a group of one token each on the device: RLOO's and Dr. GRPO's baseline, GRPO's scale
    for name, want in {"rloo": [1, -1], "dr_grpo": [0.5, -0.5], "grpo": [0.5**0.5, -(0.5**0.5)]}.items():
        config.rl.recipe, config.rl.loss_tokens, config.credit.name, config.rl.scale = name, 1, "", ""
        estimate = recipe.build_critic(make_plan(config))
        two = np.arange(2)
        got = estimate(np.array([1, 0], np.float32), np.zeros(2, np.float32), 0 * two, two > -1, two)[0]
        assert np.asarray(got) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("name", ON_HOST + ON_DEVICE)
def test_every_credit_is_of_the_host_or_of_the_device(name):
    ppo = name in OF_CRITIC
    plan = plan_of("ppo" if ppo else "grpo", name=name, discount=0.5, whiten=False)
    critic = recipe.build_critic(plan)
    assert callable(recipe.build_credit(plan, []))
    assert (critic is not None) == (name in ON_DEVICE)
    if critic is not None:  # two turns of one token; a reward of 1 at the end, no values: discounted once
        rewards, turn, mask = np.array([0, 1.0], np.float32), np.array([0, 1]), np.ones(2, bool)
        got = critic(rewards, np.zeros(2, np.float32), turn, mask, np.zeros(2, int))[0]
        assert np.asarray(got).tolist() == ([1, 1] if name == "bi_level" else [0.5, 1])
    assert recipe.heads(plan) == (("value_head",) if ppo else ())


def test_the_value_head_is_fresh_at_the_start_of_rl_and_nobody_samples_with_it():
    model = ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8, d_ff=8)
    params, key = {"embed": jnp.zeros((8, 8))}, jax.random.key(1)
    start = policy.with_heads(recipe.heads(plan_of("ppo")), model, params, key)
    assert start.keys() == {*params, "value_head"} and policy.sampled(start).keys() == params.keys()
    assert policy.with_heads(recipe.heads(plan_of("grpo")), model, params, key).keys() == params.keys()
    assert policy.with_heads(("value_head",), model, key, key) is key


def tiny(name, /, **credit):
    """Three steps in the world of known credit, by a policy of a few thousand weights."""
    c = defaults()
    c.name, c.world.name = "tiny", "credit"
    c.world.options.steps, c.world.options.switches = 3, 2
    c.tokenizer.vocab_size = 300
    c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads = 32, 1, 2, 2
    c.model.head_dim, c.model.d_ff = 16, 32
    c.batch.length, c.batch.rows, c.batch.micro_rows, c.batch.logp_chunk = 512, 8, 2, 128
    c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 8, 8, 512, (512,)
    c.rollout.threads, c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 8, 8, 512
    c.rl.recipe, c.rl.steps, c.rl.groups_per_batch, c.rl.group_size, c.rl.save_every = name, 2, 2, 4, 1
    c.eval.n, c.eval.every = 4, 0
    c.credit.update(credit)
    return c


@pytest.mark.parametrize(("name", "credit"), [("ppo", "turn"), ("gigpo", "anchor")])
def test_a_run_trains_is_resumed_and_its_policy_is_read(name, credit, tmp_path, monkeypatch):
    """A policy of chance hardly ever succeeds, so that the reward here is how many ids of an episode are even."""
    even = RewardTerm("outcome", 1.0, "episode", lambda t: float(np.mean(t.rows[-1].tokens % 2 == 0)))
    monkeypatch.setattr(build, "build_terms", lambda plan, *given: [even])
    config = tiny(name, name=credit)
    plan = make_plan(config)
    with open_workdir(tmp_path / "run", config) as workdir:
        train.run(plan, workdir, None, stop_at_step=1)
        train.run(plan, workdir, None)
        records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in records] == [1, 2] and all(r["policy/advantage_abs"] > 0 for r in records)
        assert all(r["optim/skipped"] == 0 for r in records)
        assert ("value/explained" in records[0]) == (name == "ppo")
        _, _, params = runs.open_policy(plan, workdir)
        assert "value_head" not in params and "embed" in params


def test_naive_and_decoupled_ppo_of_the_sweep_differ_by_the_correction_alone():
    """Where the proximal policy is the one that sampled, as at η = 0, both are one loss; elsewhere they are not."""
    loaded = sweep.load_sweep("configs/sweeps/staleness.py")
    naive, decoupled = (make_plan(sweep.arm_config(loaded, arm, 0)) for arm in ("naive PPO eta 4", "eta 4"))
    assert recipe.wants_proximal(decoupled) and not recipe.wants_proximal(naive)

    def gradient(plan, proximal):
        loss, batch = recipe.build_loss(plan), batch_of(proximal_logp=proximal)
        return jax.grad(lambda x: loss(Scored(x, 0 * x), batch)[0].total)(NEW)

    np.testing.assert_array_equal(gradient(naive, OLD), gradient(decoupled, OLD))
    assert np.abs(gradient(naive, NEW) - gradient(decoupled, NEW)).max() > 1e-3
    same = {"recipe": "", "reduce": ""}
    assert dataclasses.replace(naive.rl, **same) == dataclasses.replace(decoupled.rl, **same)
    assert naive.credit == decoupled.credit
