"""Laws between the engine and the learner's side of the model.

engine logp == learner logp · turns of different stops share rounds, each to its own end · a token's logp is that of
the weights of its version, also after a swap in the middle of a turn · same request, same tokens in any batch mix · an
interrupted request goes on as an uninterrupted one · after close() nothing is left.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from models.config import ModelConfig
from models.logprobs import token_logp
from models.sampling import Sampling
from rl.rollout.engine import Engine, request_key
from tests.models.weights import drawn

CAPACITY = 64
SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 64}
PLAIN = ModelConfig(**SHAPE)
QUICK = ModelConfig(**SHAPE, qk_norm=True, key_shift=True, init="mimetic")  # what no Hugging Face family has
CONFIGS = pytest.mark.parametrize("config", [PLAIN, QUICK], ids=["plain", "key_shift"])


def make_params(config, seed=0):
    return drawn(config, seed)


def make_engine(config, params, **kwargs):
    options = {
        "version": 0, "lanes": 4, "residents": 6, "capacity": CAPACITY, "view": lambda ids: "".join(chr(48 + i) for i in
        ids), "end_ids": (), "round_tokens": 4, "prefill_rows": 3, "prefill_chunk": 8, "contexts": (24, CAPACITY),
        **kwargs,
    }  # fmt: skip
    return Engine(config, params, **options)


def learner_logp(config, params, ids, temperature):
    """logp of every token given those before it, by the learner's path: packed forward, chunked log-softmax."""
    row = jnp.array([ids + [0] * (CAPACITY - len(ids))])
    segment = (jnp.arange(CAPACITY) < len(ids)).astype(jnp.int32)[None]
    return np.asarray(_row_logp(config, params, row, segment, temperature))[0]


@partial(jax.jit, static_argnums=0)
def _row_logp(config, params, row, segment, temperature):
    hidden = transformer.apply(params, config, row, segment, jnp.arange(CAPACITY)[None])
    return token_logp(params, hidden, row, temperature=temperature, chunk=16)[0]


def together(calls):
    """Run all calls at once, each in its own thread; their results in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def play(engine, key, sampling, worlds, max_tokens=9):
    """An episode of a few turns: (session ids, turns)."""
    with engine.open(key, sampling) as session:
        turns = [session.generate(new_ids, max_tokens=max_tokens) for new_ids in worlds]
        return session.ids, turns


def worlds(seed, turns=3):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, rng.integers(1, 12)).tolist() for _ in range(turns)]


def sampled(worlds, turns):
    """(positions in the episode's ids, logp, version) of what the policy sampled."""
    position, logp, version, at = [], [], [], 0
    for new_ids, turn in zip(worlds, turns, strict=True):
        at += len(new_ids)
        position += range(at, at + len(turn.ids))
        logp, version = logp + turn.logp, version + turn.version
        at += len(turn.ids)
    return np.array(position), np.array(logp), np.array(version)


@CONFIGS
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_engine_logp_is_learner_logp(config, temperature):
    params = make_params(config)
    engine = make_engine(config, params)
    episodes = together(
        [lambda i=i: play(engine, request_key(0, i, 0), Sampling(temperature=temperature), worlds(i)) for i in range(6)]
    )
    engine.close()
    for i, (ids, turns) in enumerate(episodes):
        position, logp, _ = sampled(worlds(i), turns)
        assert len(position) == 27
        np.testing.assert_allclose(logp, learner_logp(config, params, ids, temperature)[position], atol=1e-4, rtol=0)


@CONFIGS
def test_tokens_that_were_sampled_past_a_stop_leave_no_trace(config):
    """Stop strings that the device does not watch are found after the round; what the round sampled beyond undone."""
    params = make_params(config)
    engine = make_engine(config, params)
    stop = tuple(chr(48 + a) + chr(48 + b) for a in range(64) for b in range(a % 3, 64, 3))  # a third of all pairs
    given = worlds(4, turns=4)
    with engine.open(request_key(0, 4, 0), Sampling()) as session:
        turns = [session.generate(new_ids, max_tokens=9, stop=stop) for new_ids in given]
        ids = session.ids
    stats = engine.stats()
    engine.close()
    assert stats["tokens_sampled"] > stats["tokens_kept"] and {t.reason for t in turns} >= {"stop"}
    position, logp, _ = sampled(given, turns)
    np.testing.assert_allclose(logp, learner_logp(config, params, ids, 1.0)[position], atol=1e-4, rtol=0)


@CONFIGS
def test_a_turn_that_ends_on_the_device_leaves_no_trace(config):
    """The round after the one with the end id has begun when that is read: the lane must do nothing in it."""
    params = make_params(config)
    engine = make_engine(config, params, end_ids=tuple(range(0, 64, 6)), round_tokens=2)
    given = worlds(4, turns=4)
    with engine.open(request_key(0, 4, 0), Sampling()) as session:
        turns = [session.generate(new_ids, max_tokens=7) for new_ids in given]
        ids = session.ids
    engine.close()
    assert sum(turn.reason == "stop" for turn in turns) >= 2
    position, logp, _ = sampled(given, turns)
    np.testing.assert_allclose(logp, learner_logp(config, params, ids, 1.0)[position], atol=1e-4, rtol=0)


@CONFIGS
def test_turns_of_different_stops_share_rounds_and_each_ends_at_its_own(config):
    """On the device: none runs past its own stop, and none ends at a neighbour's."""
    params = make_params(config)
    engine = make_engine(config, params)

    def ask(i, stop=()):
        with engine.open(request_key(0, i, 0), Sampling()) as session:
            return session.generate([i], max_tokens=12, stop=stop)

    free = [ask(i) for i in range(4)]
    stops = [chr(48 + turn.ids[2 + 2 * i]) for i, turn in enumerate(free)]
    ends = [turn.ids.index(ord(stop) - 48) + 1 for turn, stop in zip(free, stops, strict=True)]
    before, gate = engine.stats(), threading.Event()
    held = threading.Thread(target=lambda: engine._commands.run(lambda: gate.wait(60)))
    held.start()  # until all have asked
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(ask, i, (stop,)) for i, stop in enumerate(stops)]
        while engine.stats()["requests"] < 4:
            time.sleep(0.001)
        gate.set()
        turns = [call.result(60) for call in calls]
    held.join()
    after = engine.stats()
    engine.close()
    assert [turn.ids for turn in turns] == [turn.ids[:n] for turn, n in zip(free, ends, strict=True)]
    assert {turn.reason for turn in turns} == {"stop"}
    assert after["tokens_sampled"] - before["tokens_sampled"] == sum(ends)
    # One more than the longest needs has begun when that is read.
    assert after["rounds"] - before["rounds"] <= -(-max(ends) // 4) + 1


@CONFIGS
@pytest.mark.parametrize("rounds", [0, 1, 3, 4, 6])
def test_logp_is_that_of_the_version_that_sampled_the_token(config, rounds):
    """CASES D5, D9: weights change after so many rounds: before the first, within a turn, between turns."""
    params = [make_params(config, seed) for seed in (0, 1)]
    engine = make_engine(config, params[0])
    decode, ran = engine._rounds.device.decode, []

    def publishing(*args, **kwargs):
        if len(ran) == rounds:
            engine.publish(params[1], 1)  # taken up after this round
        ran.append(0)
        return decode(*args, **kwargs)

    engine._rounds.device.decode = publishing
    ids, turns = play(engine, request_key(0, 0, 0), Sampling(), worlds(0))
    engine.close()
    position, logp, version = sampled(worlds(0), turns)
    assert set(version) == {0, 1} and np.all(np.diff(version) >= 0)
    want = np.stack([learner_logp(config, p, ids, 1.0) for p in params])
    np.testing.assert_allclose(logp, want[version, position], atol=1e-4, rtol=0)
    assert np.abs(want[0] - want[1])[position].max() > 0.1  # the two policies can be told apart


@CONFIGS
def test_repeated_prompt_after_an_update_is_a_cold_engines_answer(config):
    """CASES D5: bit for bit."""
    old, new = make_params(config), jax.tree.map(lambda x: x * 1.5, make_params(config))
    warm, cold = make_engine(config, old), make_engine(config, new, version=1)
    session = warm.open(request_key(0, 0, 0), Sampling())
    prompt = list(range(20))
    session.generate(prompt, max_tokens=9)
    warm.publish(new, 1)
    assert play(warm, request_key(0, 1, 0), Sampling(), [prompt]) == play(
        cold, request_key(0, 1, 0), Sampling(), [prompt]
    )
    # A session from before the update goes on as a cold one that is given all its ids.
    ids = session.ids
    turn = session.generate([3], max_tokens=9)
    want = cold.open(request_key(0, 0, 0), Sampling()).generate([*ids, 3], max_tokens=9)
    assert turn == want
    for engine in (warm, cold):
        engine.close()


@CONFIGS
def test_same_request_same_tokens_in_any_batch_mix(config):
    """Alone, among few, in a crowd that waits for lanes and rows, in another order, beside others: bit for bit."""
    params = make_params(config)
    request = (request_key(0, 5, 1), Sampling(temperature=1.2), worlds(5))

    def run(neighbours, place):
        engine = make_engine(config, params)
        calls = [
            lambda i=i: play(engine, request_key(1, i, 0), Sampling(temperature=0.7), worlds(i), 5 + i % 5)
            for i in neighbours
        ]
        calls.insert(place, lambda: play(engine, *request))
        out = together(calls)[place]
        engine.close()
        return out

    alone = run([], 0)
    for neighbours, place in (([1, 2], 1), (range(10, 20), 0), (range(10, 20), 9), (range(20, 27), 7)):
        assert run(neighbours, place) == alone


@CONFIGS
@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling()], ids=["greedy", "sampled"])
def test_interrupted_at_every_token_goes_on_as_if_it_were_not(config, sampling):
    """CASES D9: same weights; ids exactly, logp within float noise (sums are split where a round or a chunk begins)."""
    engine = make_engine(config, make_params(config))
    prompt, n = worlds(3)[0], 12
    whole = engine.open(request_key(0, 0, 0), sampling).generate(prompt, max_tokens=n)
    for k in range(1, n):
        with engine.open(request_key(0, 0, 0), sampling) as kept:
            first = kept.generate(prompt, max_tokens=k)
            rest = kept.generate([], max_tokens=n - k)
        assert first.ids + rest.ids == whole.ids
        np.testing.assert_allclose(first.logp + rest.logp, whole.logp, atol=1e-5, rtol=0)
        with engine.open(request_key(0, 0, 0), sampling) as fresh:
            again = fresh.generate(prompt + first.ids, max_tokens=n - k)
        assert first.ids + again.ids == whole.ids
        np.testing.assert_allclose(first.logp + again.logp, whole.logp, atol=1e-5, rtol=0)
    engine.close()


def test_after_close_no_lane_no_resident_no_thread():
    before = set(threading.enumerate())
    engine = make_engine(PLAIN, make_params(PLAIN))
    engine.open(request_key(0, 9, 0), Sampling()).generate([1, 2], max_tokens=3)  # left open
    calls = [lambda i=i: play(engine, request_key(0, i, 0), Sampling(), worlds(i)) for i in range(8)]
    together(calls)
    engine.close()
    stats = engine.stats()
    assert (stats["busy_lanes"], stats["requests"], stats["sessions"], stats["free_rows"]) == (0, 0, 0, 6)
    assert set(threading.enumerate()) == before
