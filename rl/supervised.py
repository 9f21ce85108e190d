"""The warm start: cross-entropy on the action tokens of demonstrations, by the same learner as RL."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rl.curriculum import permutation
from rl.learner import Learner, TrainState
from rl.loop import Progress
from rl.types import TrajectoryBatch


def train(
    learner: Learner,
    state: TrainState,
    rows: TrajectoryBatch,
    progress: Progress,
    *,
    rows_per_step: int,
    seed: int,
    steps: int,
    seconds: float,
    log: Callable[[int, Mapping[str, Any]], None],
    evaluate: Callable[[TrainState], float] | None,
    save: Callable[[TrainState, Progress, float | None], None],
    eval_every: int,
    stop: Callable[[], bool] = lambda: False,
) -> TrainState:
    """Train on packed `rows` until `progress.step` is `steps`, or for `seconds` if that is not 0, or until `stop()`.

    The rows of step s are addressed by (seed, s). Evaluation counts into `progress.trained_s`, as it does in RL.
    """
    last = False
    while not last:
        start = time.monotonic()
        state, learned = learner.train_step(state, pick_rows(rows, progress.step, rows_per_step, seed))
        learned = jax.device_get(learned)  # D2H, once a step; waits for the update
        progress.step += 1
        progress.trained_s += time.monotonic() - start
        last = stop() or (progress.trained_s >= seconds if seconds else progress.step >= steps)
        record = {**learned, "time/trained_s": progress.trained_s}
        if last or (eval_every and progress.step % eval_every == 0):
            start = time.monotonic()
            success = evaluate(state) if evaluate else None
            progress.trained_s += time.monotonic() - start
            if success is not None:
                record["eval/sampled"] = success
            save(state, progress, success)
        log(progress.step, record)
    return state


def pick_rows(rows: TrajectoryBatch, step: int, n: int, seed: int) -> TrajectoryBatch:
    """`n` rows for `step`: each epoch visits every row once, in an order addressed by (seed, epoch)."""
    total = rows.tokens.shape[0]
    places = np.arange(step * n, (step + 1) * n)
    chosen = [int(permutation(total, seed, int(e))[i]) for e, i in zip(places // total, places % total, strict=True)]
    return jax.tree.map(lambda x: x[chosen], rows)
