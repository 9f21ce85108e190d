"""Law: a table that is padded beyond the tokenizer's ids is, for sampler and learner, the table without its padding.

Whatever the padding rows say: here their logits are far above all others.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models import transformer
from models.config import ModelConfig
from models.logprobs import token_logp
from models.sampling import Sampling
from models.sharding import make_mesh
from rl.learner import make_learner
from rl.losses import recipes
from rl.rollout.engine import Engine, request_key
from rl.types import TrajectoryBatch

N_IDS, LENGTH = 50, 48
TIED = ModelConfig(vocab_size=N_IDS, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
CONFIGS = pytest.mark.parametrize(
    "config", [TIED, dataclasses.replace(TIED, tie_embeddings=False)], ids=["tied", "own_head"]
)
SAMPLINGS = {
    "greedy": Sampling(temperature=0.8, greedy=True),
    "sampled": Sampling(temperature=0.8),
    "truncated": Sampling(temperature=0.8, top_k=60, top_p=0.9999, min_p=1e-5),
}


def padded(config):
    """(config, parameters) with 14 rows more, and the parameters without them."""
    params = transformer.init(config, jax.random.key(0))
    more = 1e3 * jax.random.normal(jax.random.key(1), (14, config.d_model))
    wide = params | {"embed": jnp.concatenate([params["embed"], more])}
    if not config.tie_embeddings:
        wide["lm_head"] = jnp.concatenate([params["lm_head"], more.T], axis=1)
    return dataclasses.replace(config, vocab_size=N_IDS + 14, n_ids=N_IDS), wide, params


def batch_of(ids):
    rows = np.zeros((len(ids), LENGTH), np.int32)
    for row, own in zip(rows, ids, strict=True):
        row[: len(own)] = own
    segment = (np.arange(LENGTH) < np.array([[len(own)] for own in ids])).astype(np.int32)
    zeros = np.zeros(rows.shape, np.float32)
    return TrajectoryBatch(
        tokens=rows, segment=segment, position=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), rows.shape),
        action_mask=segment > 0, behavior_logp=zeros, staleness=np.zeros_like(rows), rewards=zeros, advantages=zeros,
    )  # fmt: skip


@CONFIGS
def test_padding_is_never_sampled_and_the_learner_agrees(config):
    wide_config, wide, _ = padded(config)
    engine = Engine(
        wide_config, wide, version=0, lanes=3, residents=3, capacity=LENGTH, view=str, end_ids=(), round_tokens=4,
        prefill_rows=1, prefill_chunk=8,
    )  # fmt: skip
    ids, turns = [], []
    for i, how in enumerate(SAMPLINGS.values()):
        with engine.open(request_key(0, i, 0), how) as session:
            turns.append(session.generate([1 + i, 2, 3], max_tokens=40))
            ids.append(session.ids)
    engine.close()
    assert max(map(max, ids)) < N_IDS
    for mesh in ((1, 1, 1), (1, 1, 2)):  # with the vocabulary on two devices too
        learner = make_learner(
            wide_config, recipes.grpo(), optax.identity(), make_mesh(*mesh), micro_rows=3, temperature=0.8,
            fill_proximal=True,
        )  # fmt: skip
        logp = learner.prepare(learner.init_state(wide), None, batch_of(ids)).proximal_logp
        for row, turn, name in zip(np.asarray(logp), turns, SAMPLINGS, strict=True):
            # What is kept of the softmax has at least .9999 of it.
            assert_allclose(turn.logp, row[3:43], atol=2.5e-4 if name == "truncated" else 1e-4, rtol=0, err_msg=name)


@CONFIGS
@pytest.mark.parametrize("chunk", [5, LENGTH])
def test_scores_and_gradients_are_those_of_the_table_without_padding(config, chunk):
    wide_config, wide, narrow = padded(config)
    tokens = np.random.default_rng(0).integers(0, N_IDS, (2, LENGTH))
    segment, position = np.ones_like(tokens), np.broadcast_to(np.arange(LENGTH), tokens.shape)

    def loss(params, config):
        hidden = transformer.apply(params, config, tokens, segment, position)
        scores = token_logp(params, hidden, tokens, n_ids=config.n_ids, temperature=0.7, chunk=chunk)
        return jnp.mean(jnp.sin(scores[0]) + scores[1] ** 2), scores  # a mean: gradients of order 1, as atol wants

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, got), got_grads = grad(wide, wide_config)
    (_, want), want_grads = grad(narrow, config)
    assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for name, axis in [("embed", 0)] if config.tie_embeddings else [("embed", 0), ("lm_head", 1)]:
        rows, padding = jnp.split(got_grads.pop(name), [N_IDS], axis=axis)
        assert_array_equal(padding, 0)
        assert_allclose(rows, want_grads.pop(name), rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=1e-6), got_grads, want_grads)


def test_logits_of_the_ids_are_as_they_were():
    """Bit for bit, so parity with other programs holds over the ids; without padding the program is the same one."""
    config, params, _ = padded(TIED)
    hidden = jax.random.normal(jax.random.key(2), (1, 5, TIED.d_model))
    free = transformer.unembed(params, dataclasses.replace(config, n_ids=None), hidden)
    logits = transformer.unembed(params, config, hidden)
    assert_array_equal(logits[..., :N_IDS], free[..., :N_IDS])
    assert_array_equal(logits[..., N_IDS:], np.float32(transformer.NO_ID))
    assert free[..., N_IDS:].max() > 100 * free[..., :N_IDS].max()
    programs = [
        jax.jit(transformer.head_logits, static_argnums=2).lower(params, hidden, n_ids).as_text()
        for n_ids in (None, 64)
    ]
    assert programs[0] == programs[1]
