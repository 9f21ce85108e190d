"""Law: whatever the engine does between a session's tokens (evicting it, interrupting it, swapping weights, cutting its
prompt in chunks, copying it from another, mixing it with others), they are those of a naive whole forward pass.
"""

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from models import transformer
from models.config import ModelConfig
from models.sampling import Sampling
from rl.rollout.engine import CapacityError, Engine, request_key

CAPACITY = 96
SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 64}
CONFIGS = {
    "plain": ModelConfig(**SHAPE),
    "key_shift": ModelConfig(**SHAPE, qk_norm=True, key_shift=True, init="mimetic"),
}
# (lanes, residents, round_tokens, prefill_rows, prefill_chunk): few, because each is compiled once.
SHAPES = [(2, 2, 4, 2, 8), (3, 4, 8, 1, 16), (1, 2, 1, 2, 5)]


@functools.cache
def params_of(name, seed=0):
    return jax.jit(lambda key: transformer.init(CONFIGS[name], key))(jax.random.key(seed))


@functools.partial(jax.jit, static_argnames="name")
def logp_of(name, params, row, length):
    """The naive pass: log-probabilities of every next id after every id of one row."""
    segment = (jnp.arange(CAPACITY) < length).astype(jnp.int32)[None]
    hidden = transformer.apply(params, CONFIGS[name], row[None], segment, jnp.arange(CAPACITY)[None])
    return jax.nn.log_softmax(transformer.unembed(params, CONFIGS[name], hidden)[0])


def check(name, ids, turns):
    """Every sampled token is the likeliest one under the weights of its version, with its logp there: those of an even
    version are of seed 0, of an odd one of seed 1. Turns: (place of its first id, Turn).
    """
    row = np.zeros(CAPACITY, np.int32)
    row[: len(ids)] = ids
    logp = np.stack([logp_of(name, params_of(name, seed), row, len(ids)) for seed in (0, 1)])
    for first, turn in turns:
        n = len(turn.ids)
        assert ids[first : first + n] == turn.ids
        before = logp[np.array(turn.version, int) % 2, first - 1 + np.arange(n)]
        np.testing.assert_array_equal(before.argmax(-1), turn.ids)
        np.testing.assert_allclose(turn.logp, before[np.arange(n), turn.ids], atol=1e-4, rtol=0)


worlds = st.lists(
    st.tuples(st.lists(st.integers(0, 63), min_size=1, max_size=12), st.integers(1, 9), st.booleans()),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("name", CONFIGS)
@settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(
    shape=st.sampled_from(SHAPES),
    sessions=st.lists(worlds, min_size=1, max_size=5),
    same_prompt=st.booleans(),
    publish_after=st.lists(st.integers(0, 6), max_size=2),
)
def test_greedy_sessions_are_the_naive_forward_pass(name, shape, sessions, same_prompt, publish_after):
    lanes, residents, round_tokens, prefill_rows, prefill_chunk = shape
    engine = Engine(
        CONFIGS[name], params_of(name), version=0, lanes=lanes, residents=residents, sessions=8, capacity=CAPACITY,
        view=lambda ids: "".join(chr(48 + i) for i in ids), end_ids=(), round_tokens=round_tokens,
        prefill_rows=prefill_rows, prefill_chunk=prefill_chunk, contexts=(32, CAPACITY),
    )  # fmt: skip
    decode, unlucky, lock, versions = engine._rounds.device.decode, set(), threading.Lock(), itertools.count(1)

    def cancelling(*args, **kwargs):
        """Whoever is to be interrupted is, while its round runs or the one before is not read yet."""
        out = decode(*args, **kwargs)
        for session in list(unlucky):
            session.cancel()
        return out

    engine._rounds.device.decode = cancelling

    def play(i, turns):
        """(ids, [(place, turn)]) of a session that is now and then interrupted, and forked at its end."""
        out = []
        with engine.open(request_key(0, i, 0), Sampling(greedy=True)) as session:

            def say(new, n):
                first = len(session.ids) + len(new)
                out.append((first, session.generate(new, max_tokens=n)))
                return out[-1][1]

            for k, (new, n, interrupt) in enumerate(turns):
                if k == 0 and same_prompt:
                    new = sessions[0][0][0]
                try:
                    if interrupt:
                        unlucky.add(session)
                        turn = say(new, n)
                        unlucky.discard(session)
                        assert turn.reason in ("cancelled", "length")
                        new, n = [], n - len(turn.ids)
                    if n and len(session.ids) < CAPACITY:
                        say(new, n)
                except CapacityError:
                    break
                if k in publish_after:
                    with lock:
                        version = next(versions)
                        engine.publish(params_of(name, version % 2), version)
            with session.fork(1)[0] as child:
                if len(child.ids) < CAPACITY:
                    out.append((len(child.ids), child.generate([], max_tokens=2)))
                return child.ids, out

    try:
        with ThreadPoolExecutor(len(sessions)) as threads:
            played = [f.result(60) for f in [threads.submit(play, i, turns) for i, turns in enumerate(sessions)]]
        for ids, turns in played:
            check(name, ids, turns)
    finally:
        engine.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_kept_kv_is_that_of_the_old_weights_and_recomputed_kv_of_the_new(name):
    """After an update: "recompute" gives a cold engine's logp; "keep" goes on from the KV it has, and says so; a prompt
    that others have had before the update is nobody's any more under either."""
    old, new = params_of(name), jax.tree.map(lambda x: x * 1.5, params_of(name))
    prompt, given = list(range(20)), [3, 1]
    turns, fresh = {}, {}
    for how in ("recompute", "keep", "cold"):
        engine = Engine(
            CONFIGS[name], new if how == "cold" else old, version=0, lanes=2, residents=4, capacity=CAPACITY,
            view=lambda ids: "", end_ids=(), round_tokens=4, prefill_rows=2, prefill_chunk=8, contexts=(32, CAPACITY),
            kv_on_update="recompute" if how == "cold" else how,
        )  # fmt: skip
        session = engine.open(request_key(0, 0, 0), Sampling(greedy=True))
        if how == "cold":
            first = turns["recompute"][0]
            turns[how] = first, session.generate([*prompt, *first.ids, *given], max_tokens=6)
        else:
            first = session.generate(prompt, max_tokens=6)
            engine.publish(new, 1)
            turns[how] = first, session.generate(given, max_tokens=6)
            assert turns[how][1].version == [1] * 6 and engine.stats()["kv_kept"] == (how == "keep")
        fresh[how] = engine.open(request_key(0, 1, 0), Sampling(greedy=True)).generate(prompt, max_tokens=6)
        engine.close()
    assert turns["recompute"][1].ids == turns["cold"][1].ids and turns["recompute"][1].logp == turns["cold"][1].logp
    assert np.abs(np.subtract(turns["keep"][1].logp[:1], turns["cold"][1].logp[:1])).max() > 1e-3
    assert fresh["keep"].logp == fresh["recompute"].logp == fresh["cold"].logp
