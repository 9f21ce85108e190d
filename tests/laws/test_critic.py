"""Laws of a critic's credit on the device: wherever the rows of an episode lie, in other packed rows, micro-batches and
on other devices, its tokens get what the episode alone would give them; and PPO's update is the same.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models import heads
from models.sharding import make_mesh
from rl import critic
from rl.advantages import bi_level_gae, gae, turn_level_gae
from rl.learner import make_learner, make_optimizer
from rl.losses import recipes
from rl.rollout.batcher import pack
from rl.types import Row, Status, Trajectory
from tests.laws import test_learner as learning

HOW = dict(discount=0.9, lambda_=0.8)
PLAIN = critic.token_level(discount=1.0, lambda_=1.0)
CRITICS = {
    "token": critic.token_level(**HOW),
    "turn": critic.turn_level(**HOW),
    "bi_level": critic.bi_level(**HOW, turn_discount=0.7),
    "plain": PLAIN,
    "whitened": critic.whitened(PLAIN),
}
ALONE = {
    "token": lambda rewards, values, turn, mask: gae(rewards, values, mask, **HOW),
    "turn": partial(turn_level_gae, **HOW),
    "bi_level": partial(bi_level_gae, **HOW, turn_discount=0.7),
}
CUTS = {0: (4,), 2: (3, 5, 8), 3: (2,)}
PPO = recipes.ppo(entropy_coef=0.01)


def turns(length):
    """A new turn at every second token after the prompt."""
    return np.maximum(np.arange(length) - 1, -1) // 2


def rows_of(e, cuts):
    """The episode as rows that begin anew before each of `cuts`; a row's context is its prompt, and no action there."""
    begin = 0
    for end in [*cuts, len(e["tokens"])]:
        mask = e["action_mask"][:end] & (np.arange(end) >= begin)
        fields = np.where(mask, e["behavior_logp"][:end], 0), np.where(mask, 0, -1)
        turn = np.where(np.arange(end) >= begin, turns(len(e["tokens"]))[:end], -1)
        yield Row(e["tokens"][:end].astype(np.int32), turn.astype(np.int32), mask,
                  fields[0].astype(np.float32), fields[1].astype(np.int32))  # fmt: skip
        begin = end


def batch_of(cuts, length=24):
    trajectories = [
        Trajectory("t", i, 0, Status.DONE, tuple(rows_of(e, cuts.get(i, ()))), {"success": True}, {})
        for i, e in enumerate(learning.episodes())
    ]
    zero, reward = ({(i, 0): x for i in range(5)} for x in (0.0, 1.5))
    shape = dict(rows=8, length=length, micro_rows=1, version=0, pad_id=0)
    return pack(trajectories, zero, reward, **shape, shares=True, chains=True)[0]


@cache
def params():
    start = heads.add(learning.params(), learning.CONFIG, ("value_head",), jax.random.key(1))
    start["value_head"]["weight"] = jnp.linspace(-1, 1, learning.CONFIG.d_model)
    return start


@cache
def learner(name, mesh=(1, 1, 1), micro_rows=4, loss_fn=PPO, tx=learning.KEEP_GRADIENTS, names=("value_head",)):
    options = dict(micro_rows=micro_rows, chunk=8, heads=names, critic=CRITICS[name])
    return make_learner(learning.CONFIG, loss_fn, tx, make_mesh(*mesh), **options)


def prepared(name, batch, **options):
    """(episode, place in it) -> value, advantage, return of every action token."""
    machine = learner(name, **options)
    out = jax.device_get(machine.prepare(machine.init_state(params()), None, batch))
    for x in (out.values, out.advantages, out.returns):
        assert not np.any(x[~out.action_mask])
    at = np.nonzero(out.action_mask)
    keys = zip((out.episode[at] >> 16).tolist(), out.position[at].tolist(), strict=True)
    return dict(zip(keys, zip(out.values[at], out.advantages[at], out.returns[at], strict=True), strict=True))


@pytest.mark.parametrize("name", ALONE)
def test_a_packed_token_gets_what_its_episode_alone_gives_it(name):
    whole = prepared(name, batch_of({}))
    for i, e in enumerate(learning.episodes()):
        mask = e["action_mask"]
        values, got, returns = (np.zeros(len(mask), np.float32) for _ in range(3))
        for t in np.flatnonzero(mask):
            values[t], got[t], returns[t] = whole[i, int(t)]
        rewards = np.where(np.arange(len(mask)) == np.flatnonzero(mask)[-1], np.float32(1.5), 0)
        assert len(set(values[mask])) == mask.sum()
        want = ALONE[name](rewards, values, turns(len(mask)), mask)
        assert_allclose(np.stack([got, returns]), want, rtol=1e-5, atol=1e-5)
    several = batch_of(CUTS, length=13)
    assert len(np.unique(several.episode[several.action_mask])) == 5 and several.segment.max() > 1
    for mesh, micro_rows in (((1, 1, 1), 1), ((2, 2, 2), 4)):
        again = prepared(name, several, mesh=mesh, micro_rows=micro_rows)
        assert again.keys() == whole.keys()
        for key, want in whole.items():
            assert_allclose(again[key], want, rtol=1e-4, atol=1e-5, err_msg=str(key))


def test_an_update_of_ppo_is_the_same_however_laid_out_cut_and_spread():
    def update(batch, **options):
        machine = learner("turn", **options)
        state = machine.init_state(params())
        state, metrics = machine.train_step(state, machine.prepare(state, None, batch))
        return jax.device_get((state.opt_state, metrics))

    want = update(batch_of({}))
    assert np.any(want[0]["value_head"]["weight"]) and np.isfinite(want[1]["value/explained"].value)
    learning.assert_same(update(batch_of({}), micro_rows=8, mesh=(2, 2, 2)), want)
    learning.assert_same(update(batch_of({}), micro_rows=1), want)


def test_a_critic_learns_and_without_one_the_returns_are_the_advantages():
    """30 updates on one batch whose episodes earn 0 or 1, under λ = 1: the values come to explain the returns."""
    batch = batch_of({})
    own = (batch.episode >> 16) % 2
    batch = dataclasses.replace(batch, rewards=np.where(batch.rewards != 0, own, 0).astype(np.float32))
    tx = make_optimizer(learning_rate=1e-2)
    machine = learner("plain", loss_fn=recipes.critic(clip=None), tx=tx)
    state, explained = (
        machine.init_state(heads.add(learning.params(), learning.CONFIG, ("value_head",), jax.random.key(0))),
        [],
    )
    for _ in range(30):
        ready = machine.prepare(state, None, batch)
        if not explained:  # a fresh head says 0: no baseline
            assert not np.any(ready.values)
            assert_array_equal(ready.advantages, ready.returns)
            assert_array_equal(ready.returns, np.where(batch.action_mask, own, 0))
        state, metrics = machine.train_step(state, ready)
        explained.append(float(metrics["value/explained"].value))
    assert abs(explained[0]) < 1e-6 and explained[-1] > 0.9, explained[::5]
    # whitened, over all tokens of the batch, and with no head at all: REINFORCE++
    machine = learner("whitened", loss_fn=recipes.reinforce_pp(), names=())
    ready = machine.prepare(machine.init_state(learning.params()), None, batch)
    found = np.asarray(ready.advantages)[batch.action_mask]
    assert (found.mean(), found.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-5))
    assert_array_equal(np.asarray(ready.returns), np.where(batch.action_mask, own, 0))


def test_a_penalty_is_of_action_tokens_and_of_the_policy_before_the_update():
    """Rewards 1.5 at the end less β(log π - log π_ref), summed from each token on; garbage off the mask is not read."""
    batch = batch_of(CUTS, length=13)
    mask, rng = batch.action_mask, np.random.default_rng(3)
    own, ref = rng.normal(size=(2, *mask.shape)).astype(np.float32)
    plain = critic.fill(batch, None, PLAIN)
    for name, other in (("behavior_logp", {}), ("proximal_logp", {"behavior_logp": np.full_like(own, 7)})):
        fields = {**other, name: np.where(mask, own, np.nan), "ref_logp": np.where(mask, ref, np.inf)}
        ready = dataclasses.replace(batch, **fields)
        filled = critic.fill(ready, None, PLAIN, kl_coef=0.2)
        assert_array_equal(np.isfinite(filled.advantages), True)
        paid = dataclasses.replace(batch, rewards=np.where(mask, own - ref, 0).astype(np.float32))
        penalty = critic.fill(paid, None, PLAIN).returns
        assert_allclose(filled.returns, plain.returns - 0.2 * penalty, atol=1e-5)
        assert_array_equal(filled.rewards, batch.rewards)
    with pytest.raises(ValueError, match="needs batch.ref_logp, got None"):
        critic.fill(batch, None, PLAIN, kl_coef=0.2)


def test_a_batch_without_chains_is_refused():
    machine = learner("turn")
    with pytest.raises(ValueError, match=r"needs batch.episode and batch.turn, got None; use pack\(..., chains=True\)"):
        machine.prepare(machine.init_state(params()), None, learning.lay_out(learning.PACKED, 24))
