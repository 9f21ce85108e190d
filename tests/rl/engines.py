"""A tiny engine, and threads that call it."""

import threading
import time

import jax
import jax.numpy as jnp

from models import transformer
from models.config import ModelConfig
from models.sampling import Sampling
from rl.rollout.engine import Engine, request_key

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64)
GREEDY = Sampling(greedy=True)
PROMPT = [5, 9, 2, 7, 11]


def view(ids):
    """One printable character an id: id 0 is '0'."""
    return "".join(chr(48 + i) for i in ids)


def make_engine(params, **kwargs):
    options = {
        "version": 0, "lanes": 3, "residents": 4, "capacity": 48, "view": view, "end_ids": (), "round_tokens": 4,
        "prefill_rows": 2, "prefill_chunk": 8, "contexts": (16, 48), **kwargs,
    }  # fmt: skip
    return Engine(CONFIG, params, **options)


def key(i):
    return request_key(1, i, 0)


def greedy_by_apply(params, ids, n):
    """The reference: a whole forward pass for each token."""
    ids = list(ids)
    for _ in range(n):
        tokens = jnp.array([ids + [0] * (48 - len(ids))])
        segment = (jnp.arange(48) < len(ids)).astype(jnp.int32)[None]
        ids.append(int(jnp.argmax(_logits(params, tokens, segment)[0, len(ids) - 1])))
    return ids


@jax.jit
def _logits(params, tokens, segment):
    hidden = transformer.apply(params, CONFIG, tokens, segment, jnp.arange(48)[None])
    return transformer.unembed(params, CONFIG, hidden)


def slow(engine, monkeypatch, seconds=0.02, before=lambda: None):
    decode = engine._rounds.device.decode

    def slower(*args, **kwargs):
        before()
        time.sleep(seconds)
        return decode(*args, **kwargs)

    monkeypatch.setattr(engine._rounds.device, "decode", slower)


def in_thread(call):
    out = []

    def run():
        try:
            out.append(call())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out
