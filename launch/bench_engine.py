"""The engine's workloads of `python -m launch.bench engine`, a dict each. Random weights and ids; nothing stops early.

A four-layer model of 256 in float32 (about 5 million parameters), on whatever device there is.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import transformer
from models.config import ModelConfig
from models.sampling import Sampling
from rl.rollout.engine import Engine
from rl.rollout.keys import request_key

SMALL = {"n_layers": 4, "d_model": 256, "d_ff": 1024, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "vocab_size": 4096}
SESSIONS, TURNS, OBSERVED, SAMPLED = 16, 6, 64, 32


def workloads(seed: int) -> Iterator[dict[str, Any]]:
    """Every workload, in turn."""
    config = ModelConfig(**SMALL)
    params = jax.jit(lambda key: transformer.init(config, key))(jax.random.key(seed))
    for workload in (turns, capacity, step, fork, occupancy):
        yield {"bench": f"engine/{workload.__name__}", **workload(config, params, np.random.default_rng(seed))}


def make_engine(config: ModelConfig, params: Any, *, sessions: int = SESSIONS, lanes: int = 0, **shapes: Any) -> Engine:
    """One with a lane for each session if not told otherwise, its shapes compiled."""
    shapes = {"capacity": 640, "round_tokens": 16, "prefill_rows": 16, "prefill_chunk": 64, **shapes}
    shapes.setdefault("contexts", tuple(range(128, shapes["capacity"] + 1, 128)))
    engine = Engine(
        config,
        params,
        version=0,
        lanes=lanes or sessions,
        residents=sessions,
        view=lambda ids: "",
        end_ids=(),
        **shapes,
    )
    engine.warm_up(truncated=False)
    return engine


def together(calls: list[Callable[[], Any]]) -> tuple[float, list[Any]]:
    """All at once, a thread each: seconds until the last has ended, and what they returned. Raises what one raised."""
    with ThreadPoolExecutor(len(calls), thread_name_prefix="bench") as threads:
        began = time.perf_counter()
        waiting = [threads.submit(call) for call in calls]
        results = [one.result() for one in waiting]
        return time.perf_counter() - began, results


def turns(config: ModelConfig, params: Any, rng: np.random.Generator, *, repeats: int = 5) -> dict[str, Any]:
    """16 conversations of 6 turns, each 64 observed and 32 sampled tokens: sampled tokens/s, what the machine allows,
    and what a turn costs late in a conversation.

    The limit is by the machine's own bandwidth and matrix peak (`_limit_s`).
    """
    engine = make_engine(config, params)
    warm = engine.stats()["compiles"]

    def ids() -> list[int]:
        return rng.integers(3, config.vocab_size, OBSERVED).tolist()

    def conversation(i: int, given: list[list[int]]) -> int:
        with engine.open(request_key(0, i, 0), Sampling()) as session:
            return sum(len(session.generate(new, max_tokens=SAMPLED).ids) for new in given)

    def lockstep() -> list[float]:
        sessions = [engine.open(request_key(1, i, 0), Sampling()) for i in range(SESSIONS)]
        took = []
        for _ in range(TURNS):
            given = [ids() for _ in sessions]
            calls = zip(sessions, given, strict=True)
            took.append(together([lambda s=s, new=new: s.generate(new, max_tokens=SAMPLED) for s, new in calls])[0])
        for session in sessions:
            session.close()
        return took

    def free() -> float:
        given = [[ids() for _ in range(TURNS)] for _ in range(SESSIONS)]
        seconds, sampled = together([lambda i=i, g=g: conversation(i, g) for i, g in enumerate(given)])
        return sum(sampled) / seconds

    try:
        free()
        rate = statistics.median(free() for _ in range(repeats))
        by_turn = np.median([lockstep() for _ in range(repeats)], axis=0)
        compiles = engine.stats()["compiles"] - warm
    finally:
        engine.close()
    limit_s = _limit_s(config, params)
    return {
        "tokens_per_s": round(rate, 1),
        "limit_tokens_per_s": round(SESSIONS * TURNS * SAMPLED / sum(limit_s), 1),
        "of_limit": round(rate * sum(limit_s) / (SESSIONS * TURNS * SAMPLED), 3),
        "turn_6_over_turn_1": round(by_turn[-1] / by_turn[0], 3),
        "limit_turn_6_over_turn_1": round(limit_s[-1] / limit_s[0], 3),
        "seconds_by_turn": [round(s, 3) for s in by_turn],
        "compiles": compiles,
    }


def _limit_s(config: ModelConfig, params: Any) -> list[float]:
    """Least seconds of each turn on this machine: a decode step takes its bytes (each weight once, each live key and
    value once a lane) or its products, whichever is longer; a prefill its products.
    """
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    flops = 2 * sum(x.size for x in jax.tree.leaves(params))  # a token; the tied table is the head's product
    kv_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * 4
    kv_flops = 4 * config.n_layers * config.n_heads * config.head_dim  # a token and one that it sees
    product = matmul_flops()
    peak, bandwidth = statistics.median(product() for _ in range(7)), _read_bytes()
    out = []
    for turn in range(TURNS):
        before = turn * (OBSERVED + SAMPLED)
        prefill = SESSIONS * OBSERVED * (flops + kv_flops * (before + OBSERVED / 2)) / peak
        live = before + OBSERVED + SAMPLED / 2
        moved = (n_bytes + SESSIONS * live * kv_bytes) / bandwidth
        computed = SESSIONS * (flops + kv_flops * live) / peak
        out.append(prefill + SAMPLED * max(moved, computed))
    return out


def capacity(config: ModelConfig, params: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Seconds a turn with rows of 4096 ids over those with rows of 1024, at the same live length."""
    engines = {size: make_engine(config, params, capacity=size, contexts=(256, 512, size)) for size in (1024, 4096)}
    prompt = rng.integers(3, config.vocab_size, 128).tolist()

    def once(engine: Engine, i: int) -> float:
        sessions = [engine.open(request_key(i, k, 0), Sampling()) for k in range(SESSIONS)]
        took, _ = together([lambda s=s: s.generate(prompt, max_tokens=SAMPLED) for s in sessions])
        for session in sessions:
            session.close()
        return took

    try:
        took = {size: [] for size in engines}
        for i in range(8):  # in turn, so that both meet the machine's good and bad moments
            for size, engine in engines.items():
                took[size].append(once(engine, i))
    finally:
        for engine in engines.values():
            engine.close()
    return {"capacity_4096_over_1024": round(statistics.median(took[4096][1:]) / statistics.median(took[1024][1:]), 3)}


def step(config: ModelConfig, params: Any, rng: np.random.Generator, *, context: int = 384) -> dict[str, Any]:
    """A decode step of 16 lanes over a bare program of the same matrix products that reads `context` columns a lane."""
    from rl.rollout.device import Device, Lanes

    rounds, n, live = 30, 8, context - 16
    device = Device(config, SESSIONS, 640)
    lanes = Lanes.idle(SESSIONS, no_row=SESSIONS)
    lanes.rows[:], lanes.remaining[:], lanes.lengths[:] = np.arange(SESSIONS), n, live
    lanes.last[:] = rng.integers(3, config.vocab_size, SESSIONS)
    shape = (config.n_layers, SESSIONS, config.n_kv_heads, context, config.head_dim)
    keys = jax.random.normal(jax.random.key(0), shape)

    @jax.jit
    def bare(params: Any, x: Any, keys: Any) -> Any:
        def one(_: Any, x: Any) -> Any:
            for i in range(config.n_layers):
                block = jax.tree.map(lambda w: w[i], params["blocks"])  # noqa: B023
                q, k, v = (jnp.einsum("sd,dnh->snh", x, block["attention"][name]) for name in ("wq", "wk", "wv"))
                q = q.reshape(SESSIONS, config.n_kv_heads, -1, config.head_dim)
                seen = jax.nn.softmax(jnp.einsum("skgh,skch->skgc", q, keys[i]), axis=-1)
                mixed = jnp.einsum("skgc,skch->skgh", seen, keys[i]).reshape(SESSIONS, -1, config.head_dim)
                x = x + jnp.einsum("snh,nhd->sd", mixed, block["attention"]["wo"]) + jnp.sum(k + v) * 1e-9
                x = x + (jax.nn.silu(x @ block["mlp"]["gate"]) * (x @ block["mlp"]["up"])) @ block["mlp"]["down"]
                x = x / (1 + jnp.max(jnp.abs(x)))
            return x + jnp.max(x @ params["embed"].T) * 1e-9

        return jax.lax.fori_loop(0, n, one, x)

    x = jax.random.normal(jax.random.key(1), (SESSIONS, config.d_model))
    ours, least = [], []
    for i in range(rounds):
        began = time.perf_counter()
        device.read(device.decode(params, lanes, context=context, n=n, truncated=False))
        middle = time.perf_counter()
        bare(params, x, keys).block_until_ready()
        if i > 2:
            ours.append(middle - began)
            least.append(time.perf_counter() - middle)
    ratio = statistics.median(a / b for a, b in zip(ours, least, strict=True))
    return {"step_ms": round(1e3 * statistics.median(ours) / n, 3), "step_over_bare": round(ratio, 3)}


def fork(config: ModelConfig, params: Any, rng: np.random.Generator) -> dict[str, Any]:
    """The prompt of a group of 8 over that of one session: seconds until the first token of all."""
    out = {}
    for length in (256, 1024):
        engine = make_engine(config, params, capacity=1280, contexts=(256, 512, 1024, 1280), round_tokens=1)

        def group(members: int, i: int, engine: Engine = engine, length: int = length) -> float:
            prompt = rng.integers(3, config.vocab_size, length).tolist()
            sessions = [engine.open(request_key(i, k, 0), Sampling()) for k in range(members)]
            took, _ = together([lambda s=s: s.generate(prompt, max_tokens=1) for s in sessions])
            for session in sessions:
                session.close()
            return took

        try:
            took = [(group(1, i), group(8, i)) for i in range(8)]
        finally:
            engine.close()
        out[f"group_of_8_over_1_prompt_{length}"] = round(statistics.median(b / a for a, b in took[1:]), 3)
    return out


def occupancy(config: ModelConfig, params: Any, rng: np.random.Generator) -> dict[str, Any]:
    """64 episodes of 2 to 10 turns of 8 to 48 tokens, worlds of .3 s, 16 lanes, 64 residents: lanes that sampled, of
    all lanes of the rounds that were begun while at least 16 sessions had work.
    """
    engine = make_engine(config, params, sessions=64, lanes=16, capacity=896, contexts=(256, 512, 896))
    plans = [rng.integers(8, 49, rng.integers(2, 11)).tolist() for _ in range(64)]
    observed = [[rng.integers(3, config.vocab_size, 32).tolist() for _ in plan] for plan in plans]

    def episode(i: int) -> int:
        sampled = 0
        with engine.open(request_key(2, i, 0), Sampling()) as session:
            for n, new in zip(plans[i], observed[i], strict=True):
                sampled += len(session.generate(new, max_tokens=n).ids)
                time.sleep(0.3)
        return sampled

    try:
        seconds, sampled = together([lambda i=i: episode(i) for i in range(64)])
        stats = engine.stats()
    finally:
        engine.close()
    return {
        "crowded_occupancy_frac": round(stats["crowded_lanes_used"] / max(1, 16 * stats["crowded_rounds"]), 3),
        "lane_occupancy_frac": round(stats["lane_occupancy_frac"], 3),
        "tokens_per_s": round(sum(sampled) / seconds, 1),
    }


def whole_step(seed: int, seconds: float, *, prompts: int = 16, group_size: int = 8) -> dict[str, Any]:
    """One RL step after another: 16 prompts of 64 tokens, 8 completions of 32 each, a toy reward, group advantages, one
    AdamW update, new weights published; sampled tokens/s of the whole, and the seconds of its halves.
    """
    from models.sharding import make_mesh
    from rl import advantages
    from rl.learner import make_learner, make_optimizer
    from rl.losses import recipes
    from rl.rollout.batcher import pack
    from rl.rollout.worker import Record
    from rl.types import Status, Trajectory

    config, rng = ModelConfig(**SMALL), np.random.default_rng(seed)
    members = prompts * group_size
    length, micro_rows = 8 * (OBSERVED + SAMPLED), 4
    learner = make_learner(
        config, recipes.grpo(), make_optimizer(learning_rate=1e-4), make_mesh(), micro_rows=micro_rows, chunk=length
    )
    state = learner.init_state(jax.random.key(seed))
    engine = make_engine(config, state.params, sessions=members, lanes=64, capacity=128, contexts=(128,))
    episodes: list[Any] = [None] * members

    def episode(version: int, prompt: list[int], ticket: int, member: int) -> int:
        with engine.open(request_key(seed, version * prompts + ticket, member), Sampling()) as session:
            turn = session.generate(prompt, max_tokens=SAMPLED)
        record = Record()
        record.given(prompt, -1)
        record.sampled(turn, 0)
        episodes[ticket * group_size + member] = Trajectory("toy", ticket, member, Status.DONE, record.rows(), {}, {})
        return len(turn.ids)

    def once(version: int) -> tuple[float, float, int]:
        nonlocal state
        asked = [rng.integers(3, config.vocab_size, OBSERVED).tolist() for _ in range(prompts)]
        sampled_s, sampled = together(
            [lambda t=t, m=m: episode(version, asked[t], t, m) for t in range(prompts) for m in range(group_size)]
        )
        began = time.perf_counter()
        places = [(t.ticket, t.member) for t in episodes]
        rewards = np.array([float(np.mean(t.rows[0].tokens[-SAMPLED:] % 2)) for t in episodes])
        credit = advantages.group_relative(rewards, np.array([t.ticket for t in episodes]), scale="std")
        batch, _ = pack(
            episodes, dict(zip(places, credit, strict=True)), dict(zip(places, rewards, strict=True)),
            rows=-(-members // 8) + micro_rows, length=length, micro_rows=micro_rows, version=version, pad_id=0,
        )  # fmt: skip
        state, metrics = learner.train_step(state, learner.prepare(state, None, batch))
        engine.publish(state.params, version + 1)
        jax.block_until_ready(metrics)
        return sampled_s, time.perf_counter() - began, sum(sampled)

    try:
        took, deadline = [once(0), once(1)], time.monotonic() + seconds
        while time.monotonic() < deadline or len(took) < 5:
            took.append(once(len(took)))
    finally:
        engine.close()
    sampled_s, learned_s, tokens = (statistics.median(part) for part in zip(*took[2:], strict=True))
    step_s = statistics.median(a + b for a, b, _ in took[2:])
    return {
        "tokens_per_s": round(tokens / step_s, 1),
        "step_s": round(step_s, 3),
        "sample_s": round(sampled_s, 3),
        "learn_s": round(learned_s, 3),
        "steps": len(took) - 2,
    }


def pretrained(config: ModelConfig, params: Any, seed: int, seconds: float) -> dict[str, Any]:
    """8 sessions of 64 random ids: observed tokens/s until all have their first token, then sampled tokens/s of 128."""
    sessions, sampled = 8, 128
    engine = make_engine(config, params, sessions=sessions, capacity=256, contexts=(128, 256), prefill_rows=sessions)
    rng, took = np.random.default_rng(seed), []

    def once(i: int) -> tuple[float, float]:
        opened = [engine.open(request_key(seed, i, k), Sampling()) for k in range(sessions)]
        given = rng.integers(100, config.n_ids or config.vocab_size, (sessions, OBSERVED)).tolist()
        begun = [lambda s=s, ids=ids: s.generate(ids, max_tokens=1) for s, ids in zip(opened, given, strict=True)]
        first_s, _ = together(begun)
        rest_s, _ = together([lambda s=s: s.generate([100], max_tokens=sampled) for s in opened])
        for session in opened:
            session.close()
        return first_s, rest_s

    try:
        once(0)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or len(took) < 3:
            took.append(once(1 + len(took)))
    finally:
        engine.close()
    first_s, rest_s = (statistics.median(part) for part in zip(*took, strict=True))
    return {
        "prefill_tokens_per_s": round(sessions * OBSERVED / first_s, 1),
        "decode_tokens_per_s": round(sessions * sampled / rest_s, 1),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "repeats": len(took),
    }


def matmul_flops(n: int = 2048) -> Callable[[], float]:
    """A function that times one f32 product of two [n n] matrices: FLOP/s, the peak that a program could reach."""
    x, y = jax.random.normal(jax.random.key(1), (2, n, n))
    product = jax.jit(lambda x, y: jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST))
    product(x, y).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        product(x, y).block_until_ready()
        return 2 * n**3 / (time.perf_counter() - start)

    return once


def _read_bytes(n: int = 1 << 26, repeats: int = 7) -> float:
    """Bytes read a second by a sum over an array that no cache holds."""
    x = jnp.ones(n, jnp.float32)
    total = jax.jit(jnp.sum)
    total(x).block_until_ready()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        total(x).block_until_ready()
        took.append(time.perf_counter() - began)
    return 4 * n / statistics.median(took)
