"""The warm start: cross-entropy on the action tokens of demonstrations, by the same learner as RL."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rl.curriculum import permutation
from rl.hosts import ALONE, Hosts
from rl.learner import Learner, TrainState, skipped_in_a_row
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
    log: Callable[[int, Mapping[str, Any]], None],
    evaluate: Callable[[TrainState], float] | None,
    save: Callable[[TrainState, Progress, float | None], None],
    eval_every: int,
    save_every: int,
    stop: Callable[[], bool] = lambda: False,
    hosts: Hosts = ALONE,
) -> TrainState:
    """Train on packed `rows` until `progress.step` is `steps`, or until `stop()` in any process after a step; updates
    `progress`.

    The rows of step s are addressed by (seed, s); of several processes each hands in its share of them. Evaluation
    counts into `progress.trained_s`, as it does in RL.
    """
    last, skipped = progress.step >= steps, 0
    while not last:
        start = time.monotonic()
        picked = pick_rows(rows, progress.step, rows_per_step, seed)
        share = jax.tree.map(lambda x: x[hosts.index :: hosts.count], picked)
        state, learned = learner.train_step(state, share)
        learned = jax.device_get(learned)  # D2H, once a step; waits for the update
        progress.step += 1
        skipped = skipped_in_a_row(learned, skipped)
        with hosts.telling():
            record, success = dict(learned), None
            if evaluate and eval_every and (progress.step % eval_every == 0 or progress.step == steps):
                measured = evaluate(state)
                record["eval/sampled"] = measured
                success = measured if np.isfinite(measured) else None  # NaN: every world failed
            progress.trained_s += time.monotonic() - start
            log(progress.step, record | {"time/trained_s": progress.trained_s})
        last = any(hosts.exchange(progress.step >= steps or stop()))
        if last or success is not None or (save_every and progress.step % save_every == 0):
            save(state, progress, success)
    return state


def pick_rows(rows: TrajectoryBatch, step: int, n: int, seed: int) -> TrajectoryBatch:
    """`n` rows for `step`: each epoch visits every row once, in an order addressed by (seed, epoch)."""
    total = rows.tokens.shape[0]
    places = np.arange(step * n, (step + 1) * n)
    order = {epoch: permutation(total, seed, epoch) for epoch in sorted({int(place) // total for place in places})}
    chosen = [order[int(place) // total][int(place) % total] for place in places]
    return jax.tree.map(lambda x: x[chosen], rows)
