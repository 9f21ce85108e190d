"""Several engines with the face of one: each has its own devices, thread, lanes and residents."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from models.constraint import Constraint
from models.sampling import Sampling
from rl.rollout.engine import Engine
from rl.rollout.keys import key_data
from rl.rollout.session import Session


class Replicas:
    """Data-parallel sampling. A session lives in one replica; which one changes none of its tokens, since these depend
    on its key and ids alone.
    """

    def __init__(self, engines: Sequence[Engine]):
        if not engines:
            raise ValueError("Replicas: got no engine, want at least one")
        self._engines = tuple(engines)
        self._lock = threading.Lock()  # held while one is chosen
        self.config, self.capacity = engines[0].config, min(engine.capacity for engine in engines)

    def open(self, key: UInt32[np.ndarray, "2"], sampling: Sampling, *, timeout_s: float | None = None) -> Session:
        """As `Engine.open`, in the replica with the fewest sessions open or waited for, the first of equals."""
        keys = [key_data(key)]
        with self._lock:  # chosen and joined at once: callers that come together spread evenly
            engine = min(self._engines, key=lambda engine: engine.admission.load())
            ticket = engine.admission.join(1)
        return engine.admit(ticket, keys, sampling, timeout_s)[0]

    def publish(self, params: Any, version: int) -> None:
        """As `Engine.publish`, to all."""
        for engine in self._engines:
            engine.publish(params, version)

    def warm_up(self, *, truncated: bool = True, constraints: Sequence[Constraint] = ()) -> float:
        """As `Engine.warm_up`, one after the other; equal shapes on other devices compile again."""
        return sum(engine.warm_up(truncated=truncated, constraints=constraints) for engine in self._engines)

    def stats(self) -> dict[str, float]:
        """Sums over the replicas, the least `version`, and the mean of `idle_s`."""
        each = [engine.stats() for engine in self._engines]
        total = {name: sum(stats[name] for stats in each) for name in each[0]}
        return total | {
            "version": min(stats["version"] for stats in each),
            "kv_kept": each[0]["kv_kept"],
            "idle_s": total["idle_s"] / len(each),
            "lane_occupancy_frac": total["lanes_used"] / max(1, total["lane_places"]),
            "compiles": max(stats["compiles"] for stats in each),  # each counts those of the whole process
        }

    def drain(self, timeout_s: float) -> None:
        """As `Engine.drain`, one after the other within `timeout_s` each."""
        for engine in self._engines:
            engine.drain(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """As `Engine.close`; every replica is closed even where one hangs."""
        errors = []
        for engine in self._engines:
            try:
                engine.close(timeout_s)
            except TimeoutError as error:
                errors.append(error)
        if errors:
            raise errors[0]
