"""Reward models: from stored episodes to what one learns from, and from its parameters to scores.

An `Example` is a row of ids, the places in it at which is judged, and a label for each: nothing else is written down,
and nothing else reaches the process that trains. "orm_head" judges an episode once, at the last token of its last row;
"prm_head" each turn, at the last token sampled in it (models/heads.py).
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from models import transformer
from models.config import ModelConfig
from models.heads import log_odds
from rl.rewards.outcome import success
from rl.rollout.batcher import assign
from rl.types import Row, Trajectory, TrajectoryBatch

ORM, PRM = "orm_head", "prm_head"


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """One row that is judged: `labels[i]` in [0, 1] at the token `ends[i]`. `task` is a digest of the task's id."""

    task: str
    tokens: Int[np.ndarray, " t"]
    ends: Int[np.ndarray, " n"]
    labels: Float[np.ndarray, " n"]


# (tokens of a row, the places at which to judge it) -> P(yes) at each of them, for several rows at once
Judge = Callable[[Sequence[tuple[np.ndarray, np.ndarray]]], list[np.ndarray]]


# --- labels ----------------------------------------------------------------------------------------------------------


def outcome_examples(trajectory: Trajectory) -> list[Example]:
    """The whole episode, labelled by `outcome.success`; none where the world failed, or nothing was sampled."""
    if not trajectory.status.scored or not trajectory.rows:
        return []
    row = trajectory.rows[-1]
    label = np.array([success(trajectory)], np.float32)
    return [Example(_digest(trajectory.task_id), row.tokens, last_token(row), label)]


def process_examples(trajectory: Trajectory, labels: Sequence[float]) -> list[Example]:
    """A row each, its turns labelled by `labels` [n_turns]; NaN, nobody knows, is no data, and so is a failed world.

    Errors: ValueError for another number of labels.
    """
    if len(labels) != trajectory.n_turns:
        raise ValueError(f"episode of {trajectory.n_turns} turns: got {len(labels)} labels, want one for each")
    found = []
    for row in trajectory.rows if trajectory.status.scored else ():
        ends = turn_ends(row)
        own = np.asarray(labels, np.float32)[row.turn[ends]]
        known = np.isfinite(own)
        if known.any():
            found.append(Example(_digest(trajectory.task_id), row.tokens, ends[known], own[known]))
    return found


def last_token(row: Row) -> Int[np.ndarray, "1"]:
    """Where an outcome is judged."""
    return np.array([len(row.tokens) - 1])


def turn_ends(row: Row) -> Int[np.ndarray, " n"]:
    """Where turns are judged: the last token that was sampled in each."""
    (sampled,) = np.nonzero(row.action_mask)
    turn = row.turn[sampled]
    return sampled[np.append(turn[1:] != turn[:-1], True)] if len(sampled) else sampled


def deal(examples: Iterable[Example], *, held_out: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(what is learnt from, what is measured on): a share of the *tasks* is held out, addressed by (seed, task), each
    with all that is of it.
    """
    sides: tuple[list[Example], list[Example]] = [], []
    for e in examples:
        address = hashlib.sha256(f"{seed}/{e.task}".encode()).digest()
        sides[int.from_bytes(address[:8]) < held_out * 2**64].append(e)
    return sides


def _digest(task_id: str) -> str:
    return hashlib.sha256(task_id.encode()).hexdigest()[:16]


def write_examples(examples: Iterable[Example], file: Path) -> None:
    """One JSON line each: {task, tokens, turn_ends, labels}. Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w") as lines:
        for e in examples:
            arrays = {"tokens": e.tokens, "turn_ends": e.ends, "labels": e.labels}
            lines.write(json.dumps({"task": e.task} | {name: x.tolist() for name, x in arrays.items()}) + "\n")
    os.replace(temporary, file)


def read_examples(file: Path) -> list[Example]:
    """What `write_examples` wrote. Errors: ValueError for a line of something else."""
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            arrays = (np.array(record[name], np.int32) for name in ("tokens", "turn_ends"))
            found.append(Example(record["task"], *arrays, np.array(record["labels"], np.float32)))
        except (ValueError, KeyError, TypeError) as err:
            raise ValueError(f"{file}:{number}: no labelled row ({type(err).__name__}: {err})") from err
    return found


# --- on the device ---------------------------------------------------------------------------------------------------


def pack_examples(examples: Sequence[Example], *, length: int, pad_id: int) -> TrajectoryBatch:
    """Rows of `length` tokens for the learner: `action_mask` is where is judged, `rewards` the label there.

    Errors: ValueError for none, and for one that is longer.
    """
    lengths = np.array([len(e.tokens) for e in examples], np.int64)
    if not len(lengths) or lengths.max() > length:
        raise ValueError(f"pack_examples: got rows of {lengths.tolist()[:8]} tokens, want some, of at most {length}")
    row_of, start_of = assign(lengths, length)
    rows = [(e.tokens, e.ends) for e in examples]
    batch = _lay_out(rows, row_of, start_of, (int(row_of.max()) + 1, length), pad_id)
    rewards = np.zeros(batch.tokens.shape, np.float32)
    for e, row, start in zip(examples, row_of, start_of, strict=True):
        rewards[row, start + e.ends] = e.labels
    return dataclasses.replace(batch, rewards=rewards)


def _lay_out(rows, row_of, start_of, shape: tuple[int, int], pad_id: int) -> TrajectoryBatch:
    """Each of `rows` (tokens, ends) is a segment at its place; a turn is whatever ends at the next of `ends`."""
    tokens = np.full(shape, pad_id, np.int32)
    segment, position, turn = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, np.bool_)
    for (ids, ends), row, start in zip(rows, row_of, start_of, strict=True):
        at = slice(start, start + len(ids))
        tokens[row, at] = ids
        segment[row, at] = segment[row].max() + 1
        position[row, at] = np.arange(len(ids))
        turn[row, at] = np.searchsorted(ends, np.arange(len(ids)))
        mask[row, start + ends] = True
    zeros = np.zeros(shape, np.float32)
    return TrajectoryBatch(
        tokens, segment, position, mask, zeros, np.zeros(shape, np.int32), rewards=zeros, advantages=zeros, turn=turn
    )


def make_judge(config: ModelConfig, params: Any, *, lengths: Sequence[int], rows: int, pad_id: int) -> Judge:
    """The frozen reward model `params`: P(yes) of rows, in batches of `rows` under the compiled `lengths` (rising).

    It has a copy of `params` of its own, which nothing changes: a learner may donate those that it was given. Each row
    stands in a line of its own, padded to the least length that holds it: what else is judged with it changes nothing.
    A row over the last length is judged NaN. Thread-safe.
    """
    frozen = jax.tree.map(jnp.copy, params)
    widths = np.array(sorted(lengths))

    def judge(asked: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        out = [np.full(len(ends), np.nan) for _, ends in asked]
        width = np.searchsorted(widths, [len(ids) for ids, _ in asked])
        for i, w in enumerate(widths.tolist()):
            (own,) = np.nonzero(width == i)
            for begin in range(0, len(own), rows):
                some = own[begin : begin + rows]
                batch = _lay_out([asked[j] for j in some], range(len(some)), [0] * len(some), (rows, w), pad_id)
                p = jax.device_get(_p_yes(config, frozen, batch))
                for line, j in enumerate(some):
                    out[j] = p[line, asked[j][1]].astype(np.float64)
        return out

    return judge


@partial(jax.jit, static_argnums=0)
def _p_yes(config: ModelConfig, params: Any, batch: TrajectoryBatch) -> Float[jax.Array, "B T"]:
    hidden = transformer.apply(params, config, batch.tokens, batch.segment, batch.position)
    return jax.nn.sigmoid(log_odds(params, hidden, batch.segment, batch.turn, batch.action_mask))


def outcome_scores(judge: Judge, trajectories: Sequence[Trajectory]) -> Float[np.ndarray, " N"]:
    """P(the episode succeeds) of each; NaN where nothing was sampled, or its last row is too long."""
    there = [i for i, t in enumerate(trajectories) if t.rows]
    out = np.full(len(trajectories), np.nan)
    rows = [trajectories[i].rows[-1] for i in there]
    for i, p in zip(there, judge([(row.tokens, last_token(row)) for row in rows]), strict=True):
        out[i] = p[0]
    return out


def process_scores(judge: Judge, trajectories: Sequence[Trajectory]) -> list[Float[np.ndarray, " turns"]]:
    """P(success) after each turn of each; NaN for a turn of which nothing was sampled, or whose row is too long."""
    out = [np.full(t.n_turns, np.nan) for t in trajectories]
    places = [(i, row, turn_ends(row)) for i, t in enumerate(trajectories) for row in t.rows]
    for (i, row, ends), p in zip(places, judge([(row.tokens, ends) for _, row, ends in places]), strict=True):
        out[i][row.turn[ends]] = p
    return out
