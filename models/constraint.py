"""Constrained decoding: which tokens may come next, as an automaton over token ids.

A regular expression is made an automaton over bytes, and that one over the tokenizer's ids: an id leads where its bytes
lead, so a text may be cut into tokens in any way (Willard & Louf 2023, Efficient Guided Generation, section 3). States
from which no match can be reached any more are left out, so whatever is sampled can still be finished. What is allowed
is a pure function of the ids of the turn so far, which is what would make it trainable; today's
learner knows of no constraint.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from models.regex import byte_automaton


@dataclasses.dataclass(frozen=True, eq=False)
class Constraint:
    """next_state[q, i]: the state after id i in state q, or -1 where i is not allowed; a turn begins in state 0.

    An id of `end_ids` is allowed in the states in which the text matches, and leads nowhere else: the turn is over.
    """

    next_state: Int[np.ndarray, "Q V"]
    end_ids: tuple[int, ...]

    def after(self, ids: Sequence[int]) -> int:
        """The state after the ids of a turn. Errors: ValueError at one that is not allowed."""
        state = 0
        for place, token in enumerate(ids):
            after = int(self.next_state[state, token])
            if after < 0:
                raise ValueError(f"constraint: got id {token} at place {place}, want one that state {state} allows")
            state = after
        return state


MOST_BYTES = 2**29  # of a constraint's table


def from_regex(pattern: str, id_bytes: Sequence[bytes | None], end_ids: Sequence[int]) -> Constraint:
    """The constraint that a turn's whole text, without its end id, matches `pattern`.

    `pattern` is read by models/regex.py. `id_bytes` is `Codec.id_bytes()`: what each id adds to the text; None (and
    nothing) is never allowed. Size: 4 bytes a state and id, 0.6 MB a state for 150k ids; `[^"]{0,60}` has 480 states,
    for it counts characters of any language, byte by byte, and `[^"]*` has 8.
    Errors (ValueError): a pattern that cannot be read, that wants a table over MOST_BYTES, or of which these ids can
    spell no match; no end id.
    """
    if not end_ids or not 0 <= min(end_ids) <= max(end_ids) < len(id_bytes):
        raise ValueError(f"constraint: got end ids {tuple(end_ids)}, want one or more from 0 to {len(id_bytes) - 1}")
    by_byte, accepting = byte_automaton(pattern)
    if 4 * len(by_byte) * len(id_bytes) > MOST_BYTES:
        raise ValueError(
            f"constraint: got a pattern of {len(by_byte)} states over {len(id_bytes)} ids, a table of "
            f"{4 * len(by_byte) * len(id_bytes)} bytes, want at most {MOST_BYTES}; bound shorter or not at all"
        )
    spelled = [None if i in set(end_ids) else text for i, text in enumerate(id_bytes)]
    next_state, accepting = _without_dead_ends(_by_token(by_byte, spelled), accepting)
    if next_state is None:
        raise ValueError(f"constraint: got pattern {pattern!r}, of which the tokenizer's ids can spell no match")
    matched = np.flatnonzero(accepting)
    next_state[np.ix_(matched, list(end_ids))] = matched[:, None]
    return Constraint(next_state, tuple(end_ids))


def from_strings(strings: Sequence[str], id_bytes: Sequence[bytes | None], end_ids: Sequence[int]) -> Constraint:
    """The constraint that a turn's text is one of `strings`; else as `from_regex`."""
    if not strings:
        raise ValueError("constraint: got no strings, want one or more")
    return from_regex("|".join(map(re.escape, strings)), id_bytes, end_ids)


def _by_token(by_byte: Int[np.ndarray, "Q 256"], spelled: Sequence[bytes | None]) -> Int[np.ndarray, "Q V"]:
    """Where every id leads from every state: from each all ids at once, a byte at a time, longest first."""
    known = sorted((i for i, text in enumerate(spelled) if text), key=lambda i: -len(spelled[i]))
    lengths = np.array([len(spelled[i]) for i in known])
    text = np.zeros((len(known), max(lengths, default=0)), np.uint8)
    for row, i in zip(text, known, strict=True):
        row[: len(spelled[i])] = np.frombuffer(spelled[i], np.uint8)
    longer = [int(np.sum(lengths > place)) for place in range(text.shape[1])]
    next_state = np.full((len(by_byte), len(spelled)), -1, np.int32)
    by_byte = np.concatenate([by_byte, np.full((1, 256), -1, np.int32)])  # -1, read as the last row, leads to itself
    for state, row in enumerate(next_state):
        after = np.full(len(known), state, np.int32)
        for place, n in enumerate(longer):
            after[:n] = by_byte[after[:n], text[:n, place]]
        row[known] = after
    return next_state


def _without_dead_ends(
    next_state: Int[np.ndarray, "Q V"], accepting: Bool[np.ndarray, " Q"]
) -> tuple[Int[np.ndarray, "q V"] | None, Bool[np.ndarray, " q"]]:
    """The states that are reached from state 0 and from which a match is reached, state 0 first; None if it is none."""
    states = len(next_state)
    leads = np.zeros((states, states + 1), bool)  # the last column is -1
    for state, ways in enumerate(next_state):
        leads[state, ways] = True
    leads = leads[:, :-1]
    alive = _closure(leads.T, accepting)
    kept = alive & _closure(leads, np.arange(states) == 0)
    if not kept[0]:
        return None, accepting
    new = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1).astype(np.int32)
    return new[next_state[kept]], accepting[kept]


def _closure(leads: Bool[np.ndarray, "Q Q"], begin: Bool[np.ndarray, " Q"]) -> Bool[np.ndarray, " Q"]:
    """All states that can be reached from those in `begin`."""
    reached = begin
    while True:
        more = reached | leads[reached].any(axis=0)
        if (more == reached).all():
            return reached
        reached = more
