"""Whoever can run does so within a few programs, whoever else there is; full programs go first all the same."""

import types

import pytest

from models.sampling import Sampling
from rl.rollout.device import Shapes
from rl.rollout.schedule import MOST_WAITED, next_plan
from rl.rollout.session import Request

SHAPES = Shapes(
    lanes=16, residents=64, capacity=1024, round_tokens=8, prefill_rows=16, prefill_chunk=64, contexts=(256, 1024)
)


def request(ids, cached, end_ids=(), constraint=None):
    session = types.SimpleNamespace(_ids=[0] * ids, _cached=cached, sampling=Sampling())
    return Request(session, ids, 10_000, (), end_ids, (), constraint)


@pytest.mark.parametrize(
    "lone",
    [request(1024, 64), request(300, 299), request(100, 99, constraint=object())],
    ids=["a long prompt", "another width", "a constraint"],
)
def test_a_lone_request_is_not_passed_over_for_long(lone):
    crowd = [request(100, 99) for _ in range(16)]
    planned = [next_plan([*crowd, lone], SHAPES).requests for _ in range(400)]
    turns = [i for i, requests in enumerate(planned) if lone in requests]
    assert max(b - a for a, b in zip([-1, *turns], [*turns, 400], strict=True)) <= MOST_WAITED + 1
    assert sum(len(requests) == 16 for requests in planned) >= 400 * MOST_WAITED / (MOST_WAITED + 1) - 1


def test_many_kinds_take_turns():
    """More kinds of programs than may be waited for: each waits for the others, and for nobody twice."""
    kinds = [request(100, 99, constraint=object()) for i in range(8)] + [request(1024, 64), request(300, 299)]
    planned = [next_plan(kinds, SHAPES).requests for _ in range(100)]
    for one in kinds:
        turns = [i for i, requests in enumerate(planned) if one in requests]
        assert max(b - a for a, b in zip([-1, *turns], [*turns, 100], strict=True)) <= 10


def test_more_requests_than_lanes_take_turns():
    crowd = [request(100, 99) for _ in range(40)]
    planned = [next_plan(crowd, SHAPES) for _ in range(30)]
    assert all(len(plan.requests) == 16 and plan.crowded for plan in planned)
    for one in crowd:
        turns = [i for i, plan in enumerate(planned) if one in plan.requests]
        assert max(b - a for a, b in zip([-1, *turns], [*turns, 30], strict=True)) <= 3
    assert next_plan([], SHAPES) is None


def test_sessions_of_different_stops_share_a_round():
    crowd = [request(100, 99, end_ids=tuple(range(i))) for i in range(16)]
    assert next_plan(crowd, SHAPES).requests == crowd
