"""The workloads of `python -m launch.bench async`, a dict each: what running ahead of the learner saves.

`loop`: rl/loop.py whole (engine, pool, gate, decoupled PPO of a tiny policy), over worlds that take their time. The
latencies are addressed by (ticket, member, turn): every arm meets the same ones, and so does the schedule beside it in
which nothing but the worlds takes time. `interruption`: what interrupting generation at a weight update is worth.
"""

import heapq
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envs.base import Env, Task
from models import transformer
from models.config import ModelConfig
from models.sampling import Sampling
from models.sharding import make_mesh
from rl import credit, loop
from rl.learner import make_learner, make_optimizer
from rl.losses import recipes
from rl.rewards.compose import RewardTerm
from rl.rollout.batcher import pack
from rl.rollout.engine import Engine
from rl.rollout.keys import request_key
from rl.rollout.pool import Pool
from rl.rollout.staleness import StalenessGate, capacity
from rl.rollout.worker import Record
from rl.timeline import Timeline, shares
from rl.types import Status, Trajectory

TINY = {"n_layers": 1, "d_model": 32, "d_ff": 64, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 128}
TURNS, MEDIAN_S, SIGMA = 6, 0.3, 1.0  # of a world: log-normal latencies
GROUPS, SIZE, WORKERS = 8, 4, 32  # 32 episodes a batch
OBSERVED, SAMPLED = 8, 4  # tokens a turn
STEPS = 30


def workloads(seed: int, traces: Path | None = None) -> Iterator[dict[str, Any]]:
    """Every workload, in turn; a trace of each run of the loop in the folder `traces`, if it is given."""
    sync = arm(seed, 0, WORKERS, traces=traces)
    yield {"bench": "async/loop", **sync}
    for staleness, workers in ((1, WORKERS), (4, WORKERS), (4, 2 * WORKERS), (8, 2 * WORKERS)):
        own = arm(seed, staleness, workers, traces=traces)
        bound = sync["ideal_s"] / own["ideal_s"]
        gain = {
            "sync_over_async": round(sync["wall_s"] / own["wall_s"], 3),
            "bound": round(bound, 3),
            "of_bound": round(sync["wall_s"] / own["wall_s"] / bound, 3),
        }
        yield {"bench": "async/loop", **gain, **own}
    yield {"bench": "async/interruption", **interruption(seed)}


@cache
def latencies(seed: int, ticket: int, member: int) -> tuple[float, ...]:
    """Seconds that the world of an episode takes at each turn."""
    rng = np.random.default_rng((seed, ticket, member))
    return tuple(MEDIAN_S * np.exp(SIGMA * rng.standard_normal(TURNS)))


def ideal_s(seed: int, max_staleness: int, workers: int, *, steps: int, groups: int, size: int) -> float:
    """Wall seconds of `steps` batches where worlds alone take time: each worker plays the first episode in line, the
    gate lets in what rl/rollout/staleness.py says, and a batch is learnt from in no time once its last group has ended.
    """
    now, version, submitted = 0.0, 0, 0
    queue: deque[tuple[int, int]] = deque()
    playing: list[tuple[float, int]] = []
    left: dict[int, int] = {}  # members that have not ended, by ticket
    limits = {"batch": groups, "max_staleness": max_staleness, "max_running": steps * groups}
    while version < steps:
        room = capacity(version, submitted, 0, **limits)
        for ticket in range(submitted, min(submitted + max(room, 0), steps * groups)):
            queue.extend((ticket, member) for member in range(size))
            left[ticket], submitted = size, ticket + 1
        while queue and len(playing) < workers:
            ticket, member = queue.popleft()
            heapq.heappush(playing, (now + sum(latencies(seed, ticket, member)), ticket))
        now, ticket = heapq.heappop(playing)
        left[ticket] -= 1
        while version < steps and all(left.get(t) == 0 for t in range(version * groups, (version + 1) * groups)):
            version += 1
    return now


class SlowWorld(Env):
    """Nothing but time: `episode` waits for it."""

    def close(self) -> None:
        pass


def episode(
    env: Any, task: Task, codec: Any, session: Any, *, ticket: int, member: int, seed: int, **limits: Any
) -> Trajectory:
    """TURNS turns of random ids; what is sampled is worth the share of even ids."""
    record, rng = Record(), np.random.default_rng((seed, ticket))
    for index, seconds in enumerate(latencies(seed, ticket, member)):
        given = rng.integers(1, TINY["vocab_size"], OBSERVED).tolist()
        turn = session.generate(given, max_tokens=SAMPLED)
        record.given(given, index - 1)
        record.sampled(turn, index)
        if turn.reason == "cancelled":
            return Trajectory(task.task_id, ticket, member, Status.CANCELLED, record.rows(), {}, {})
        time.sleep(seconds)
    return Trajectory(task.task_id, ticket, member, Status.DONE, record.rows(), {}, {})


def evenness(trajectory: Trajectory) -> float:
    """The reward: share of even ids of what was sampled."""
    (row,) = trajectory.rows
    return float(np.mean(row.tokens[row.action_mask] % 2 == 0))


def arm(
    seed: int, max_staleness: int, workers: int, *, steps: int = STEPS, traces: Path | None = None
) -> dict[str, Any]:
    """Wall seconds of `steps` steps of the loop, beside the ideal ones, and what it says of itself: `by_phase` is
    `rl.timeline.shares`. Its trace is timeline_eta{η}_{workers}.json in the folder `traces`.
    """
    config, length = ModelConfig(**TINY), TURNS * (OBSERVED + SAMPLED)
    micro_rows, shape = 8, {"rows": GROUPS * SIZE, "length": length, "pad_id": 0, "max_staleness": max_staleness}
    learner = make_learner(
        config, recipes.ppo_decoupled(), make_optimizer(learning_rate=1e-3), make_mesh(), micro_rows=micro_rows,
        chunk=length, fill_proximal=True,
    )  # fmt: skip
    state, timeline = learner.init_state(jax.random.key(seed)), Timeline()
    engine = Engine(
        config, state.params, version=0, lanes=16, residents=workers, capacity=length + 8, view=lambda ids: "",
        end_ids=(), round_tokens=SAMPLED, prefill_rows=16, prefill_chunk=16, contexts=(length + 8,),
        span=timeline.track("engine"),
    )  # fmt: skip
    engine.warm_up(truncated=False)
    records: list[dict[str, Any]] = []

    def train(pool: Pool, state: Any, n: int) -> float:
        gate = StalenessGate(batch=GROUPS, max_staleness=max_staleness, max_running=(max_staleness + 1) * GROUPS)
        began = time.monotonic()
        loop.train(
            learner, state, None, pool, gate, loop.Progress(),
            draw=lambda ticket: Task(f"task-{ticket}", "slow", "train", ticket, (), {}),
            outcome=lambda ticket, trajectories: None, observe=lambda outcomes, ticket: None,
            admit=lambda trajectories: True, terms=[RewardTerm("even", 1.0, "episode", evenness)],
            pack=partial(pack, micro_rows=micro_rows, **shape), publish=engine.publish,
            keep_episodes=lambda step, episodes: None, log=lambda step, record: records.append(dict(record)),
            evaluate=None, save=lambda *args: None, steps=n, groups_per_batch=GROUPS, group_size=SIZE,
            credit=partial(credit.relative, scale="std"), drop_equal_groups=False, eval_every=0, save_every=0,
            span=timeline.track("learner"),
        )  # fmt: skip
        return time.monotonic() - began

    pool = Pool(
        engine, SlowWorld, None, threads=workers, seed=seed, sampling=Sampling(), call_deadline_s=600.0,
        episode=partial(episode, seed=seed),
    )  # fmt: skip
    try:
        _compile(learner, engine, seed, partial(pack, micro_rows=micro_rows, **shape))
        before = engine.stats()
        wall_s = train(pool, state, steps)
        now = engine.stats()
    finally:
        pool.close()
        engine.close()
    if traces is not None:
        timeline.write(traces / f"timeline_eta{max_staleness}_{workers}.json")
    waited_s = sum(record["time/rollout_s"] for record in records)
    return {
        "max_staleness": max_staleness,
        "workers": workers,
        "steps": steps,
        "wall_s": round(wall_s, 2),
        "ideal_s": round(ideal_s(seed, max_staleness, workers, steps=steps, groups=GROUPS, size=SIZE), 2),
        "staleness": round(statistics.mean(float(r["policy/staleness"].value) for r in records), 2),
        "staleness_max": int(max(float(r["policy/staleness_max"].value) for r in records)),
        "learner_idle_frac": round(waited_s / wall_s, 3),
        "engine_idle_frac": round((now["idle_s"] - before["idle_s"]) / wall_s, 3),
        "by_phase": jax.tree.map(lambda share: round(share, 3), shares(timeline)),
    }


def _compile(learner: Any, engine: Engine, seed: int, packed: Callable[..., Any]) -> None:
    """Run the learner's programs once, on a state of its own."""
    record = Record()
    record.given([1], -1)
    with engine.open(request_key(seed, 0, 0), Sampling()) as session:
        record.sampled(session.generate([1], max_tokens=2), 0)
    one = Trajectory("warm up", 0, 0, Status.DONE, record.rows(), {}, {})
    state = learner.init_state(jax.random.key(seed))
    batch = learner.prepare(state, None, packed([one], {(0, 0): 1.0}, {(0, 0): 1.0}, version=0)[0])
    jax.block_until_ready(learner.train_step(state, batch))


class Turns:
    """Turns in flight, which can be kept from beginning."""

    def __init__(self):
        self._changed, self._paused, self._running = threading.Condition(), False, 0

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._running += 1

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        """Lets no other begin, and waits until those in flight have ended; or lets them begin again."""
        with self._changed:
            self._paused = paused
            self._changed.notify_all()
            self._changed.wait_for(lambda: not paused or not self._running)


def interruption(seed: int, *, seconds: float = 12.0, every_s: float = 1.0) -> dict[str, Any]:
    """Sampled tokens/s of 16 sessions with turns of 16 to 256 tokens, new weights every second: a turn is interrupted,
    and live KV computed again ("recompute") or kept ("keep"); or new weights wait until the turns in flight have ended
    and no other begins ("off").
    """
    from launch.bench_engine import SMALL, make_engine, together

    config, sessions = ModelConfig(**SMALL), 16
    params = jax.jit(lambda key: transformer.init(config, key))(jax.random.key(seed))
    rates = {}
    for how in ("recompute", "keep", "off"):
        engine = make_engine(config, params, capacity=640, kv_on_update="keep" if how == "off" else how)
        turns, ends = Turns(), time.monotonic() + seconds

        def play(i: int, engine: Engine = engine, turns: Turns = turns, ends: float = ends) -> int:
            rng, sampled = np.random.default_rng((seed, i)), 0
            for k in range(10_000):
                with engine.open(request_key(seed, i, k), Sampling()) as session:
                    for _ in range(2):
                        given, n = rng.integers(3, config.vocab_size, 32).tolist(), int(rng.integers(16, 257))
                        if time.monotonic() > ends:
                            return sampled
                        with turns:
                            sampled += len(session.generate(given, max_tokens=n).ids)
            return sampled

        def publish(engine: Engine = engine, turns: Turns = turns, ends: float = ends, how: str = how) -> int:
            version = 0
            while time.monotonic() + every_s < ends:
                time.sleep(every_s)
                version += 1
                if how == "off":
                    turns.pause(True)
                engine.publish(params, version)
                turns.pause(False)
            return 0

        try:
            took, sampled = together([publish, *(partial(play, i) for i in range(sessions))])
        finally:
            engine.close()
        rates[how] = sum(sampled) / took
    return {
        **{f"tokens_per_s_{how}": round(rate, 1) for how, rate in rates.items()},
        "recompute_over_off": round(rates["recompute"] / rates["off"], 3),
        "keep_over_off": round(rates["keep"] / rates["off"], 3),
    }
