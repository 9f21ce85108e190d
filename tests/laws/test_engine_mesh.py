"""Law: on a mesh of fake devices, split or in replicas, an engine samples the tokens that it samples on one device."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from models import lora
from models.config import ModelConfig
from models.sampling import Sampling
from models.sharding import make_mesh
from rl.rollout.engine import Engine, request_key
from rl.rollout.replicas import Replicas
from tests.models.weights import drawn

SHAPE = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "d_ff": 64}
CONFIGS = {"plain": ModelConfig(**SHAPE), "key_shift": ModelConfig(**SHAPE, qk_norm=True, key_shift=True)}


def make_engine(config, params, devices=None, **options):
    shapes = {"lanes": 3, "residents": 4, "capacity": 64, "round_tokens": 4, "prefill_rows": 2, "prefill_chunk": 8}
    mesh = None if devices is None else make_mesh(tensor=len(devices), devices=devices)
    return Engine(
        config, params, version=0, view=lambda ids: "", end_ids=(), contexts=(32, 64), mesh=mesh, sessions=8,
        **(shapes | options),
    )  # fmt: skip


def play(engine, params):
    """Six conversations at once, two of them of one group, with new weights in the middle of it all."""

    def conversation(i):
        sampling = Sampling(greedy=True) if i % 2 else Sampling(temperature=1.3)
        prompt = list(range(3, 14)) if i < 2 else [7 * i + j for j in range(5 + i)]
        with engine.open(request_key(0, i, 0), sampling) as session:
            turns = [session.generate(prompt, max_tokens=7), session.generate([1, 2, 3], max_tokens=6)]
            with session.fork(1)[0] as child:
                return [*turns, child.generate([4], max_tokens=3)]

    with ThreadPoolExecutor(6) as threads:
        first = list(threads.map(conversation, range(6)))
        engine.publish(params, 1)
        second = list(threads.map(conversation, range(6)))
    engine.close()
    return [turn for turns in first + second for turn in turns]


@pytest.mark.parametrize("name, tensor, replicas", [("plain", 4, 2), ("key_shift", 2, 1), ("plain", 1, 3)])
def test_same_tokens_as_one_device(name, tensor, replicas):
    config, devices = CONFIGS[name], jax.devices()
    params, new = drawn(config, 0), drawn(config, 1)
    want = play(make_engine(config, params), new)
    places = [devices[i * tensor : (i + 1) * tensor] for i in range(replicas)]
    got = play(Replicas([make_engine(config, params, place) for place in places]), new)
    assert [turn.ids for turn in got] == [turn.ids for turn in want]
    assert [turn.version for turn in got] == [[0] * len(t.ids) for t in got[:18]] + [[1] * len(t.ids) for t in got[18:]]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5, rtol=0)


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
        assert engine._rounds.device._cache.k.addressable_shards[0].data.shape == (2, 4, 1, 64, 8)
        engine.warm_up()
        compiles = engine.stats()["compiles"]
        engine.open(request_key(0, 0, 0), Sampling()).generate([1, 2, 3], max_tokens=9)
        assert engine.stats()["compiles"] == compiles
        assert engine._rounds.device._cache.k.addressable_shards[0].data.shape == (2, 4, 1, 64, 8)
    finally:
        engine.close()
    with pytest.raises(ValueError, match="kv_heads.* of 4 is not divisible by mesh axis 'tensor' of 8"):
        make_engine(config, drawn(config), jax.devices())
