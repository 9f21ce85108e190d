"""Which program the engine runs next, and for whom. Pure: nothing here touches a device."""

from collections.abc import Iterable
from typing import NamedTuple

from models.constraint import Constraint
from rl.rollout.device import Shapes
from rl.rollout.session import Request

MOST_WAITED = 4  # programs that run without somebody who could, before what runs next is the program of that one


class Plan(NamedTuple):
    """One program to run. A round takes lanes of one attention width and one constraint: a lane's own, whoever is
    beside it.
    """

    kind: str  # "prefill" or "decode"
    context: int
    truncated: bool  # top-k, top-p or min-p: a program of its own
    constraint: Constraint | None
    requests: list[Request]
    crowded: bool  # whether a lane is wanted for each


def next_plan(requests: Iterable[Request], shapes: Shapes) -> Plan | None:
    """The fullest program over `requests` (in order of arrival), or that of the one that has waited for longest, where
    that is long; None if there are none. Counts how often each was left waiting.

    The attention width is the least compiled one that holds the session's cached ids, a function of its own length
    alone. Requests with unread tokens are planned as if none of those ended the turn; as they have just had a lane,
    those that wait for one come first.
    """
    requests = list(requests)
    groups: dict[tuple, list[Request]] = {}
    for request in requests:
        session = request.session
        context = next(c for c in shapes.contexts if c >= request.cached)
        if request.cached < len(session._ids) - 1:
            context = context if session._cached else 0  # a first chunk reads no cache at all
            program = ("prefill", context, False, None)
        else:
            program = ("decode", context, session.sampling.truncated, request.constraint)
        groups.setdefault(program, []).append(request)
    if not groups:
        return None
    width = {"prefill": shapes.prefill_rows, "decode": shapes.lanes}
    # Stable: those that waited equally long go in order of arrival.
    first = {program: sorted(own, key=lambda r: -r.waited)[: width[program[0]]] for program, own in groups.items()}
    # A program costs the same however full, so the fullest goes first; but nobody is passed over more often than that.
    late = {program: own for program, own in first.items() if own[0].waited >= MOST_WAITED} or first
    waited = {program: own[0].waited for program, own in late.items()}
    fullness = {program: len(own) / width[program[0]] for program, own in late.items()}
    rank = (lambda p: (fullness[p], waited[p])) if late is first else (lambda p: (waited[p], fullness[p]))
    program = max(late, key=rank)
    chosen = first[program]
    for request in requests:
        request.waited += 1
    for request in chosen:
        request.waited = 0
    return Plan(*program, chosen, len(requests) >= shapes.lanes)
