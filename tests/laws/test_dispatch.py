"""Law: whatever runs on several devices is enqueued under the one lock of the process, and nobody waits under it.

Two threads that enqueue such programs in different orders on two devices would wait for each other for ever.
"""

import threading
from collections import Counter

import jax
import pytest

from models import sharding, transformer
from models.sampling import Sampling
from models.sharding import make_mesh
from rl import learner
from rl.losses import recipes
from rl.rollout import device, weights
from rl.rollout.engine import Engine, request_key
from tests.laws.test_learner import CONFIG, KEEP_GRADIENTS, lay_out


class Lock:
    """That knows who holds it."""

    def __init__(self):
        self._lock, self._holder = threading.Lock(), None

    def __enter__(self):
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_):
        self._holder = None
        self._lock.release()

    def mine(self):
        return self._holder == threading.get_ident()


class Program:
    """A compiled function that counts its calls, and those that were made without the lock."""

    def __init__(self, name, program, lock, ran):
        self._name, self._program, self._lock, self._ran = name, program, lock, ran

    def __call__(self, *args, **kwargs):
        self._ran[self._name if self._lock.mine() else f"{self._name} without the lock"] += 1
        return self._program(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._program, name)


class Jax:
    """jax, whose compiled functions are Programs."""

    def __init__(self, lock, ran):
        self._lock, self._ran = lock, ran

    def __getattr__(self, name):
        return getattr(jax, name)

    def jit(self, f, **how):
        return Program(getattr(f, "func", f).__name__, jax.jit(f, **how), self._lock, self._ran)


@pytest.fixture
def watched(monkeypatch):
    """(lock, how often each program ran)"""
    lock, ran = Lock(), Counter()
    monkeypatch.setattr(sharding, "_DISPATCH", lock)
    for name in ("_alloc", "_prefill", "_decode", "_copy"):
        monkeypatch.setattr(device, name, Program(name, getattr(device, name), lock, ran))
    placer = weights._placer
    monkeypatch.setattr(weights, "_placer", lambda *args: Program("_placer", placer(*args), lock, ran))
    monkeypatch.setattr(learner, "jax", Jax(lock, ran))
    return lock, ran


def test_engine_and_learner_enqueue_under_one_lock_and_wait_without_it(watched, monkeypatch):
    lock, ran = watched
    devices = jax.devices()
    params = jax.jit(transformer.init, static_argnums=0)(CONFIG, jax.random.key(0))
    machine = learner.make_learner(
        CONFIG, recipes.grpo(), KEEP_GRADIENTS, make_mesh(data=2, devices=devices[1:3]), micro_rows=2, chunk=8,
        fill_proximal=True,
    )  # fmt: skip
    state = machine.init_state(params)
    engine = Engine(
        CONFIG, params, version=0, lanes=2, residents=3, capacity=32, view=lambda ids: "", end_ids=(), round_tokens=2,
        prefill_rows=2, prefill_chunk=8, mesh=make_mesh(tensor=2, devices=devices[:2]),
    )  # fmt: skip
    read = engine._rounds.device.read

    def reading(out):
        ran["read under the lock" if lock.mine() else "read"] += 1
        return read(out)

    monkeypatch.setattr(engine._rounds.device, "read", reading)
    ended, failed = threading.Event(), []

    def play():
        try:
            for i in range(100):
                with engine.open(request_key(0, i, 0), Sampling()) as session:
                    session.generate([1, 2, 3], max_tokens=4)
                    with session.fork(1)[0] as child:
                        child.generate([1], max_tokens=2)
                if ended.is_set():
                    return
        except Exception as error:
            failed.append(error)

    player = threading.Thread(target=play)
    player.start()
    try:
        for version in (1, 2, 3):
            batch = machine.prepare(state, None, lay_out([[0, 1], [2, 3]], 32))
            state, metrics = machine.train_step(state, batch)
            jax.block_until_ready(metrics)
            engine.publish(state.params, version)
    finally:
        ended.set()
        player.join(60)
        engine.close()
    assert not failed
    names = {"_alloc", "_prefill", "_decode", "_copy", "_placer", "read", "prepare", "train_step", "<lambda>"}
    assert set(ran) == names and ran["train_step"] == 3 and ran["_placer"] == 4
