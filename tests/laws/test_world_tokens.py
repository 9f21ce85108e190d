"""Laws of observations that are trained (rl.train_on_world): the gradient is that of the policy's own tokens and, with
the turn's advantage, of exactly the tokens that the world said after it; never of a prompt.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models import transformer
from models.sharding import make_mesh
from rl.learner import make_learner
from rl.losses import recipes
from rl.rollout.batcher import pack
from rl.types import Row, Status, Trajectory
from tests.laws.test_learner import CONFIG, KEEP_GRADIENTS, params

TEMPERATURE = 0.7
# p the prompt, a a token that the policy sampled, o one of an observation or its glue; one string a row of an episode
EPISODES = {(0, 0): ("ppaaooaa", "pppaoa"), (0, 1): ("ppaoooa",), (1, 0): ("pppaa",)}
ADVANTAGES = {(0, 0): np.array([1.0, -2.0, 0.5, 3.0], np.float32), (0, 1): -0.7, (1, 0): 1.3}


def episode(key):
    rng, rows, index = np.random.default_rng(key), [], -1
    for kinds in EPISODES[key]:
        mask = np.array([kind == "a" for kind in kinds])
        begins = mask & ~np.append(False, mask[:-1])
        turn = np.where(np.array([*kinds]) == "p", -1, index + np.cumsum(begins))
        index = int(turn.max())
        logp = np.where(mask, rng.normal(-4, 0.1, len(kinds)), 0).astype(np.float32)
        tokens = rng.integers(1, CONFIG.vocab_size, len(kinds)).astype(np.int32)
        rows.append(Row(tokens, turn.astype(np.int32), mask, logp, np.where(mask, 0, -1).astype(np.int32)))
    return Trajectory("t", *key, Status.DONE, tuple(rows), {"success": True}, {})


def packed(**how):
    shape = {"rows": 4, "length": 16, "micro_rows": 2, "version": 0, "pad_id": 0}
    return pack([episode(key) for key in EPISODES], ADVANTAGES, dict.fromkeys(EPISODES, 0.0), **shape, **how)


def updated(*, world):
    """The batch as it is trained on, and the gradient of the sum of its tokens' losses."""
    loss = recipes.dr_grpo(length=1, clip_low=1.0, clip_high=1e6)  # no ratio is clipped
    how = {"micro_rows": 2, "temperature": TEMPERATURE, "chunk": 8, "fill_world": world}
    machine = make_learner(CONFIG, loss, KEEP_GRADIENTS, make_mesh(), **how)
    state = machine.init_state(params())
    batch = machine.prepare(state, None, packed(world=world)[0])
    kept = jax.device_get(batch)
    state, metrics = machine.train_step(state, batch)
    count = float(metrics["loss"].count)
    return kept, jax.tree.map(lambda g: np.asarray(g) * count, state.opt_state)


def logp_of(weights, tokens):
    """log π of each token but the first, by the whole table of log-probabilities."""
    one = jnp.ones((1, len(tokens)), jnp.int32)
    hidden = transformer.apply(weights, CONFIG, tokens[None], one, jnp.arange(len(tokens))[None])
    table = jax.nn.log_softmax(hidden[0] @ weights["embed"].T / TEMPERATURE)
    return table[jnp.arange(len(tokens) - 1), tokens[1:]]


def world_loss(weights):
    """-Σ A log π over what the world said, from the strings above alone."""
    total, turns = 0.0, {key: -1 for key in EPISODES}
    for key, texts in EPISODES.items():
        for row, kinds in zip(episode(key).rows, texts, strict=True):
            logp = logp_of(weights, jnp.asarray(row.tokens))
            for t, kind in enumerate(kinds):
                turns[key] += kind == "a" and kinds[t - 1] != "a"
                if kind == "o":
                    total -= np.broadcast_to(ADVANTAGES[key], 4)[turns[key]] * logp[t - 1]
    return total


def test_on_adds_the_gradient_of_the_observations_alone():
    (_, off), (batch, on) = updated(world=False), updated(world=True)
    want = jax.grad(world_loss)(params())
    assert max(np.abs(g).max() for g in jax.tree.leaves(want)) > 0.1
    added = jax.tree.map(np.subtract, on, off)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=2e-5), added, want)
    assert int(batch.world_mask.sum()) == sum(text.count("o") for texts in EPISODES.values() for text in texts)
    # nobody sampled them: what their ratio is to is the policy of the batch
    of_world = [logp_of(params(), jnp.asarray(row.tokens)) for key in EPISODES for row in episode(key).rows]
    texts = [text for own in EPISODES.values() for text in own]
    spoken = [logp[t - 1] for logp, text in zip(of_world, texts, strict=True) for t, k in enumerate(text) if k == "o"]
    assert_allclose(np.sort(batch.behavior_logp[batch.world_mask]), np.sort(spoken), atol=1e-5)


def test_off_nothing_knows_of_it():
    (off, stats), (on, more) = packed(), packed(world=True)
    assert off.world_mask is None and more["action_tokens"] - stats["action_tokens"] == on.world_mask.sum()
    assert_array_equal(off.action_mask, on.action_mask & ~on.world_mask)
    assert_array_equal(off.advantages, np.where(on.world_mask, 0, on.advantages))
    for name in ("tokens", "segment", "position", "behavior_logp", "staleness", "rewards"):
        assert_array_equal(getattr(off, name), getattr(on, name), err_msg=name)
    share = np.bincount(on.segment.ravel() * 100 + np.repeat(np.arange(4), 16), on.episode_share.ravel())
    assert share.sum() == pytest.approx(len(EPISODES), rel=1e-6), "an episode's tokens weigh 1 together"


def test_a_batch_without_the_mark_is_refused():
    machine = make_learner(CONFIG, recipes.grpo(), KEEP_GRADIENTS, make_mesh(), micro_rows=2, fill_world=True)
    state = machine.init_state(params())
    with pytest.raises(ValueError, match="fill_world: got no world_mask"):
        machine.prepare(state, None, packed()[0])
