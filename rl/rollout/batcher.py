"""Ragged episodes on the host to packed rows for the device, in one compiled shape."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from rl.types import MEMBERS, Row, Trajectory, TrajectoryBatch

_Key = tuple[int, int]  # (ticket, member)
# An episode's number in a batch fits 31 bits: the tickets of one batch span less than 2^15, also over all processes.
_TICKETS = 2**15


@dataclasses.dataclass(frozen=True)
class _Item:
    """One row to place. Only an episode's last row carries its reward."""

    row: Row
    trained: Bool[np.ndarray, " t"]
    advantage: float | Float[np.ndarray, " t"]
    reward: float
    actions: int  # trained tokens of the whole episode
    episode: int
    part: int  # which of the mini-batches


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Mapping[_Key, float | Float[np.ndarray, " turns"]],
    rewards: Mapping[_Key, float],
    *,
    rows: int,
    length: int,
    micro_rows: int,
    version: int,
    pad_id: int,
    max_staleness: int | None = None,
    shares: bool = False,
    chains: bool = False,
    world: bool = False,
    minibatches: int = 1,
) -> tuple[TrajectoryBatch, dict[str, float]]:
    """Packs episodes into [rows, length] arrays, best-fit decreasing; the same batch whatever order they arrive in.
    Each row of an episode is a segment of its own, anywhere in the batch.

    Used rows come first (with several mini-batches an empty micro-batch may stand among them), and their number is
    rounded up to `micro_rows`, which is what the learner runs over. Episodes
    are dealt to the `minibatches` in turn, as they come by (ticket, member), so that each is a like share of the batch,
    whatever their lengths; its rows are the micro-batches k, k + minibatches, ..., as the learner takes them. On each
    action token of an episode stands its advantage, or that of the turn where it has one for each (by Row.turn); on the
    last one its reward; staleness = version - the version that sampled the token. Episodes that are not scored, and
    rows without an action token, add no loss and are left out. `episode_share` is filled if an episode has several
    rows, or if `shares`: where that can happen, ask for it, so that every batch has one structure and is compiled for
    once. `chains` fills `episode` and `turn`, which a critic on the device needs (rl/critic.py). With `world` the
    tokens of observations are trained like the policy's own: they are in `action_mask`, with the advantage of the turn
    that they answer, and `world_mask` says which they are. Stats: rows (used, rounded up), micro_batches, episodes,
    tokens, action_tokens (all that are trained), pad_frac (of the places in used rows).

    Raises ValueError for a row longer than `length`, for more rows than `rows`, for a scored episode without an
    advantage or reward, or with another number of turns than advantages, and for two episodes of one (ticket, member).
    AssertionError for a trained token more than `max_staleness` versions old: whoever admits work
    (rl/rollout/staleness.py) has let too much through.
    """
    if micro_rows < 1 or rows % micro_rows:
        raise ValueError(f"pack: got {rows=} and {micro_rows=}, want rows to be a multiple of micro_rows")
    items, episodes = _items(trajectories, advantages, rewards, world, minibatches)
    lengths = np.array([len(item.row.tokens) for item in items], np.int64)
    if len(items) and lengths.max() > length:
        raise ValueError(
            f"pack: got an episode with a row of {lengths.max()} tokens, want at most {length}; "
            "lower the episodes' max_tokens or raise length"
        )
    row_of, start_of = _assign_parts(lengths, [item.part for item in items], length, micro_rows, minibatches)
    used = -(-(int(row_of.max()) + 1) // micro_rows) * micro_rows if len(items) else 0
    if used > rows:
        raise ValueError(
            f"pack: got {lengths.sum()} tokens in {len(items)} rows of {episodes} episodes, which fill {used} packed "
            f"rows of {length}, want at most {rows}; raise rows (those without tokens cost nothing), or put fewer "
            "groups in a batch"
        )
    shares = shares or len(items) > episodes
    batch = _fill(items, lengths, row_of * length + start_of, (rows, length), version, pad_id, shares, chains, world)
    oldest = int(batch.staleness.max(initial=0))
    if max_staleness is not None and oldest > max_staleness:
        raise AssertionError(
            f"pack: got a token {oldest} versions old at version {version}, want at most {max_staleness=}; "
            "the staleness gate is broken, or the batch holds groups that it never admitted"
        )
    return batch, {
        "rows": used,
        "micro_batches": used // micro_rows,
        "episodes": episodes,
        "tokens": int(lengths.sum()),
        "action_tokens": int(batch.action_mask.sum()),
        "pad_frac": 1.0 - float(lengths.sum()) / (used * length) if used else 0.0,
    }


def assign(lengths: Int[np.ndarray, " n"], length: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Row and start column of each item: longest first, each into the fullest row that still holds it (best-fit
    decreasing).

    At most 11/9 of the fewest rows possible, plus 4 (Johnson 1974). Rows are numbered from 0 without gaps.
    """
    row_of, start_of = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    room = np.full(len(lengths), length, np.int64)  # of each row; an item may need its own
    opened = 0
    for i in np.argsort(-lengths, kind="stable"):
        fits = np.where(room[:opened] >= lengths[i], room[:opened], length + 1)
        row = int(np.argmin(fits)) if opened and fits.min() <= length else opened
        opened = max(opened, row + 1)
        row_of[i], start_of[i] = row, length - room[row]
        room[row] -= lengths[i]
    return row_of, start_of


def _assign_parts(lengths, parts, length: int, micro_rows: int, minibatches: int):
    """`assign` for each mini-batch alone, its micro-batches dealt out among those of the others."""
    row_of, start_of = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for part in range(minibatches):
        (own,) = np.nonzero(np.asarray(parts) == part)
        rows, start_of[own] = assign(lengths[own], length)
        row_of[own] = (rows // micro_rows * minibatches + part) * micro_rows + rows % micro_rows
    return row_of, start_of


def observed(row: Row) -> Bool[np.ndarray, " t"]:
    """What the world said after a turn, with the glue around it; not the prompt, nor a later row's."""
    return (row.turn >= 0) & ~row.action_mask


def _items(trajectories, advantages, rewards, world: bool, minibatches: int) -> tuple[list[_Item], int]:
    """Rows in (ticket, member) order with their episode's numbers, and how many episodes they come from."""
    kept = sorted((t for t in trajectories if t.status.scored), key=lambda t: (t.ticket, t.member))
    items, episodes = [], 0
    for before, trajectory in zip([None, *kept], kept, strict=False):
        key = (trajectory.ticket, trajectory.member)
        if before is not None and key == (before.ticket, before.member):
            raise ValueError(f"pack: got two episodes of (ticket, member) {key}, want one; did a group come twice?")
        missing = [name for name, of in (("advantage", advantages), ("reward", rewards)) if key not in of]
        if missing:
            name = trajectory.status.name
            raise ValueError(f"pack: episode {key} ({name}) has no {missing[0]}; give one for each scored episode")
        rows = [row for row in trajectory.rows if row.action_mask.any()]
        trained = [row.action_mask | observed(row) if world else row.action_mask for row in rows]
        # from the first ticket on: processes that have few episodes each do not begin with the same mini-batch
        part = (kept[0].ticket + episodes) % minibatches
        episodes += bool(rows)
        actions = sum(int(mask.sum()) for mask in trained)
        number = trajectory.ticket % _TICKETS * MEMBERS + trajectory.member
        for row, mask in zip(rows, trained, strict=True):
            reward = rewards[key] if row is rows[-1] else 0.0
            items.append(_Item(row, mask, _of_row(row, advantages[key], trajectory), reward, actions, number, part))
    return items, episodes


def _of_row(row: Row, advantage: float | np.ndarray, trajectory: Trajectory) -> float | Float[np.ndarray, " t"]:
    if np.ndim(advantage) == 0:
        return advantage
    turns = trajectory.n_turns
    if np.shape(advantage) != (turns,):
        key, got = (trajectory.ticket, trajectory.member), np.shape(advantage)
        raise ValueError(f"pack: episode {key}: got advantages of shape {got}, want one number, or {turns}: one a turn")
    return np.asarray(advantage)[np.maximum(row.turn, 0)]  # a prompt (-1) has no action, so no advantage


def _fill(
    items: Sequence[_Item],
    lengths,
    begin,
    shape: tuple[int, int],
    version: int,
    pad_id: int,
    shares: bool,
    chains: bool,
    world: bool,
) -> TrajectoryBatch:
    """Writes every field with one scatter; `begin` is the flat place of each item's first token."""
    inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # position in its item
    place = np.repeat(begin, lengths) + inside

    def spread(values, dtype, fill=0):
        out = np.full(shape[0] * shape[1], fill, dtype)
        out[place] = values
        return out.reshape(shape)

    def joined(name: str, dtype):
        return np.concatenate([getattr(item.row, name) for item in items]) if items else np.zeros(0, dtype)

    mask = joined("action_mask", np.bool_)
    trained = np.concatenate([item.trained for item in items]) if items else mask
    behind = joined("version", np.int32)
    if np.any(behind[mask] > version):
        newest = behind[mask].max()
        raise ValueError(f"pack: got a token sampled at version {newest}, want at most the learner's {version}")
    # the n-th segment of its packed row, in the order of their starts
    order = np.argsort(begin, kind="stable")
    row_sorted = begin[order] // shape[1]
    segment = np.empty(len(items), np.int32)
    segment[order] = np.arange(len(items)) - np.searchsorted(row_sorted, row_sorted) + 1
    last = np.zeros(len(mask), np.bool_)
    ends = np.cumsum(lengths)
    for item, end in zip(items, ends, strict=True):
        last[end - 1 - int(np.argmax(item.row.action_mask[::-1]))] = True
    each = [np.broadcast_to(np.float32(item.advantage), len(item.row.tokens)) for item in items]
    advantage = np.concatenate(each) if items else np.zeros(0, np.float32)
    reward = np.repeat(np.array([item.reward for item in items], np.float32), lengths)
    episode = np.repeat(np.array([item.episode for item in items], np.int32), lengths)
    share = np.repeat(1 / np.array([item.actions for item in items], np.float32), lengths) if shares else None
    return TrajectoryBatch(
        tokens=spread(joined("tokens", np.int32), np.int32, pad_id),
        segment=spread(np.repeat(segment, lengths), np.int32),
        position=spread(inside, np.int32),
        action_mask=spread(trained, np.bool_),
        behavior_logp=spread(joined("behavior_logp", np.float32), np.float32),
        staleness=spread(np.where(mask, version - behind, 0), np.int32),
        rewards=spread(np.where(last, reward, 0), np.float32),
        advantages=spread(np.where(trained, advantage, 0), np.float32),
        episode_share=None if share is None else spread(np.where(trained, share, 0), np.float32),
        episode=spread(episode, np.int32) if chains else None,
        turn=spread(joined("turn", np.int32), np.int32) if chains else None,
        world_mask=spread(trained & ~mask, np.bool_) if world else None,
    )
