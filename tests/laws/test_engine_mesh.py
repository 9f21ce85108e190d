"""Law: on a mesh of fake devices, split or in replicas, an engine samples the tokens that it samples on one device.

Law: four devices that train and four others that sample make the run of four that do both.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs.defaults import defaults
from launch import build
from launch.plan import make_plan
from models import lora
from models.config import ModelConfig
from models.sampling import Sampling
from models.sharding import make_mesh
from rl.learner import make_learner, make_optimizer
from rl.losses import recipes
from rl.rollout.batcher import pack
from rl.rollout.engine import Engine, request_key
from rl.rollout.replicas import Replicas
from rl.rollout.worker import Record
from rl.types import Status, Trajectory
from tests.models.weights import drawn

SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "d_ff": 64}
CONFIGS = {"plain": ModelConfig(**SHAPE), "key_shift": ModelConfig(**SHAPE, qk_norm=True, key_shift=True)}


def make_engine(config, params, devices=None, **options):
    shapes = {"lanes": 2, "residents": 2, "capacity": 64, "round_tokens": 4, "prefill_rows": 2, "prefill_chunk": 8}
    mesh = None if devices is None else make_mesh(tensor=len(devices), devices=devices)
    return Engine(
        config, params, version=0, view=lambda ids: "", end_ids=(), contexts=(32, 64), mesh=mesh, sessions=8,
        **(shapes | options),
    )  # fmt: skip


def publishing_in_round_2(engine, publish):
    """Has `publish` called by the thread of `engine` when it begins the next round but one."""
    device, began = engine._rounds.device, []
    decode = device.decode

    def patched(*args, **kwargs):
        began.append(0)
        if len(began) == 2:
            publish()
        return decode(*args, **kwargs)

    device.decode = patched


def play(engine, params):
    """(turns, stats) of six conversations at once, two of them of one group, on fewer rows than that. New weights come
    between their turns (versions 1 and 3), and within a turn of one alone (version 2): after two of its rounds.
    """
    how = [Sampling(greedy=True) if i % 2 else Sampling(temperature=1.3) for i in range(6)]
    sessions = [engine.open(request_key(0, i, 0), how[i]) for i in range(6)]

    def all_say(new, n):
        with ThreadPoolExecutor(6) as threads:
            return list(threads.map(lambda i: sessions[i].generate(new(i), max_tokens=n), range(6)))

    turns = all_say(lambda i: list(range(3, 14)) if i < 2 else [7 * i + j for j in range(5 + i)], 7)
    engine.publish(params[0], 1)
    turns += all_say(lambda i: [1, 2, 3], 6)
    publishing_in_round_2(sessions[0]._engine, lambda: engine.publish(params[1], 2))
    turns.append(sessions[0].generate([5], max_tokens=14))
    turns += all_say(lambda i: [6, i], 3)
    engine.publish(params[0], 3)
    for session in sessions:
        turns.append(session.generate([9], max_tokens=2))
        with session.fork(1)[0] as child:
            turns.append(child.generate([4], max_tokens=3))
    stats = engine.stats()
    engine.close()
    return turns, stats


@pytest.mark.parametrize("name, tensor, replicas", [("plain", 4, 2), ("key_shift", 2, 1), ("plain", 1, 3)])
def test_same_tokens_as_one_device(name, tensor, replicas):
    config, devices = CONFIGS[name], jax.devices()
    params, *new = (drawn(config, seed) for seed in (0, 1, 2))
    want, _ = play(make_engine(config, params), new)
    places = [devices[i * tensor : (i + 1) * tensor] for i in range(replicas)]
    got, stats = play(Replicas([make_engine(config, params, place) for place in places]), new)
    assert [turn.ids for turn in got] == [turn.ids for turn in want]
    versions = [[0] * 7] * 6 + [[1] * 6] * 6 + [[1] * 8 + [2] * 6] + [[2] * 3] * 6 + [[3] * 2, [3] * 3] * 6
    assert [turn.version for turn in got] == [turn.version for turn in want] == versions
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5, rtol=0)
    # Each fork took a row from somebody, for there were no more than lanes, and a copy of its parent's.
    assert stats["evictions"] >= 6 and stats["copies"] >= 6 and stats["swaps"] == 3 * replicas


def test_weights_and_cache_lie_in_parts_and_adapters_are_merged():
    config, mesh = CONFIGS["plain"], make_mesh(tensor=4, devices=jax.devices()[4:8])
    adapted = lora.add(drawn(config), config, lora.Lora(rank=2, alpha=4.0, targets=("wq", "down")), jax.random.key(0))
    adapted = jax.tree.map(lambda x: x + 0.01, adapted)  # B begins at 0: nothing to merge
    engine = make_engine(config, adapted, jax.devices()[4:8])
    try:
        served = engine._snapshot.params
        for got, want in zip(jax.tree.leaves(served), jax.tree.leaves(lora.merge(adapted)), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)
        assert served["blocks"]["attention"]["wq"].sharding.mesh == mesh
        assert served["blocks"]["attention"]["wq"].addressable_shards[0].data.shape == (2, 32, 2, 8)
        assert engine._rounds.device._cache.k.addressable_shards[0].data.shape == (2, 2, 1, 64, 8)
        engine.warm_up()
        compiles = engine.stats()["compiles"]
        engine.open(request_key(0, 0, 0), Sampling()).generate([1, 2, 3], max_tokens=9)
        assert engine.stats()["compiles"] == compiles
        assert engine._rounds.device._cache.k.addressable_shards[0].data.shape == (2, 2, 1, 64, 8)
    finally:
        engine.close()
    with pytest.raises(ValueError, match="kv_heads.* of 4 is not divisible by mesh axis 'tensor' of 8"):
        make_engine(config, drawn(config), jax.devices())


def plan_of(**engine):
    """An engine over four devices, and a learner over four."""
    c = defaults()
    c.mesh.data, c.mesh.fsdp, c.batch.micro_rows = 2, 2, 4
    c.engine.update({"tensor": 4, "lanes": 2, "residents": 2, "capacity": 64, "contexts": (64,)})
    c.engine.update({"round_tokens": 4, "prefill_rows": 2, "prefill_chunk": 8, **engine})
    c.rollout.max_episode_tokens, c.rollout.threads = 64, 4
    return make_plan(c)


def three_steps(learner, config, split):
    """(what was sampled, the parameters after it), and which devices sample."""
    state = learner.init_state(drawn(config))
    codec = SimpleNamespace(view=lambda ids: "", end_ids=())
    engine = build.build_engine(plan_of(split=split), config, state.params, 0, codec)
    devices = {d for e in engine._engines for x in jax.tree.leaves(e._snapshot.params) for d in x.devices()}
    turns = []
    try:
        for version in range(3):
            episodes = []
            for ticket in range(4):
                record, prompt = Record(), [5 + ticket, 9, 2]
                with engine.open(request_key(version, ticket, 0), Sampling()) as session:
                    turns.append(session.generate(prompt, max_tokens=9))
                record.given(prompt, -1)
                record.sampled(turns[-1], 0)
                episodes.append(Trajectory("toy", ticket, 0, Status.DONE, record.rows(), {}, {}))
            credit = {(ticket, 0): (-1.0) ** ticket for ticket in range(4)}
            shape = {"rows": 4, "length": 16, "micro_rows": 4, "version": version, "pad_id": 0, "max_staleness": 0}
            state, _ = learner.train_step(
                state, learner.prepare(state, None, pack(episodes, credit, credit, **shape)[0])
            )
            engine.publish(state.params, version + 1)
    finally:
        engine.close()
    return turns, jax.device_get(state.params), devices


def test_devices_that_train_and_others_that_sample_make_the_run_of_those_that_do_both():
    config, mesh = CONFIGS["plain"], make_mesh(data=2, fsdp=2)
    learner = make_learner(config, recipes.grpo(), make_optimizer(learning_rate=1e-2), mesh, micro_rows=4, chunk=16)
    (apart, weights, there), (together, same, here) = (three_steps(learner, config, split) for split in (True, False))
    assert there == {*jax.devices()[4:]} and here == {*jax.devices()[:4]} == {*mesh.devices.flat}
    assert [turn.ids for turn in apart] == [turn.ids for turn in together]
    assert [turn.version for turn in apart] == [[i // 4] * 9 for i in range(12)]
    for a, b in zip(apart, together, strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5, rtol=0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), weights, same)
    assert np.abs(weights["embed"] - drawn(config)["embed"]).max() > 1e-3
    with pytest.raises(ValueError, match="= 16 devices, but this process has 4 beside those of the learner"):
        build.build_engine(plan_of(split=True, replicas=4), config, None, 0, None)
