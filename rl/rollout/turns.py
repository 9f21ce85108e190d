"""Requests, checked, to the arrays of a decode round, and a round's tokens back into turns. Host arithmetic alone."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from models.constraint import Constraint
from models.generate import Round
from rl.rollout.device import Lanes, Shapes
from rl.rollout.session import Request
from rl.rollout.stops import first_stop


def check_asked(ids: Int[np.ndarray, " t"], max_tokens: int, vocab_size: int) -> None:
    """Errors: ValueError."""
    if max_tokens < 1:
        raise ValueError(f"generate: got {max_tokens=}, want at least 1")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"generate: ids run from {ids.min()} to {ids.max()}, want 0 to {vocab_size - 1}")


def check_constraint(constraint: Constraint, vocab_size: int, end_ids: Sequence[int]) -> None:
    """Errors: ValueError."""
    ids = constraint.next_state.shape[1]
    if ids > vocab_size or not set(constraint.end_ids) <= set(end_ids):
        raise ValueError(
            f"generate: got a constraint of {ids} ids that ends with {constraint.end_ids}, want at most {vocab_size} "
            f"ids and ends among {tuple(end_ids)}; make it from this engine's codec"
        )


def lane_arrays(requests: Sequence[Request], shapes: Shapes) -> Lanes:
    """One lane a request, the others idle. A request with unread tokens goes on from its lane of the round before."""
    arrays = Lanes.idle(shapes.lanes, no_row=shapes.residents)
    for i, request in enumerate(requests):
        s, how = request.session, request.session.sampling
        arrays.rows[i], arrays.lengths[i], arrays.keys[i] = s.row, request.cached, s.key
        arrays.remaining[i] = request.remaining(shapes.capacity)
        arrays.temperature[i], arrays.greedy[i] = how.temperature, how.greedy
        arrays.top_k[i], arrays.top_p[i], arrays.min_p[i] = how.top_k, how.top_p, how.min_p
        arrays.end_ids[i, : len(request.end_ids)] = request.end_ids
        if request.unread:
            arrays.after[i] = request.lane
            continue
        arrays.last[i] = s._ids[-1]
        if request.constraint is not None:
            arrays.state[i] = request.constraint.after(s._ids[request.first :])
    return arrays


def take(
    request: Request,
    out: Round,
    lane: int,
    version: int,
    view: Callable[[list[int]], str],
    end_ids: Sequence[int],
    capacity: int,
) -> tuple[int, str | None]:
    """Adds what a lane sampled to the turn, up to where it ends: (tokens kept, how it ended or None)."""
    session, old = request.session, len(request.logp)
    tokens = out.tokens[lane, : int(out.n_done[lane])].tolist()
    n, reason = len(tokens), None
    ends = [i for i, token in enumerate(tokens) if token in end_ids]
    if ends:
        n, reason = ends[0] + 1, "stop"
    crossing = first_stop(view, session._ids[request.first :] + tokens[:n], old, request.stop)
    if crossing is not None:
        n, reason = crossing - old, "stop"
    session._ids.extend(tokens[:n])
    request.logp.extend(out.logp[lane, :n].tolist())
    request.version.extend([version] * n)
    if out.forced is not None:
        request.forced.extend(old + i for i in np.flatnonzero(out.forced[lane, :n]).tolist())
    if reason is None and (len(request.logp) >= request.max_tokens or len(session._ids) >= capacity):
        reason = "length"
    return n, reason
