"""A regular expression as the least deterministic automaton over UTF-8 bytes that accepts exactly its matches.

Parsed by the parser of Python's own `re`, so a pattern means here what it means there under re.ASCII: then an automaton
that may be in several states at once (Thompson 1968), then one that is in one (Rabin & Scott 1959), then the least
(Moore 1956).
"""

import re
import sys
from collections.abc import Iterator, Sequence
from re import _parser

import numpy as np
from jaxtyping import Bool, Int

Ranges = list[tuple[int, int]]  # of code points or bytes, ends included

MOST_STATES = 4096  # of the automaton in one state; before that in several, 16 times as many
_LAST = sys.maxunicode
_SURROGATES = (0xD800, 0xDFFF)  # are no characters, and have no UTF-8
_ASCII: dict[str, Ranges] = {
    "CATEGORY_DIGIT": [(48, 57)],
    "CATEGORY_SPACE": [(9, 13), (32, 32)],
    "CATEGORY_WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
}


def byte_automaton(pattern: str) -> tuple[Int[np.ndarray, "Q 256"], Bool[np.ndarray, " Q"]]:
    """next_state[q, byte], -1 where no match can follow, from state 0; and which states accept.

    Covers literals, `.`, classes, `\\d \\s \\w` and their opposites (of ASCII), groups, `|`, `* + ? {m,n}` (lazy or
    not: the matches are the same). The match is of the whole text. Errors (ValueError): anchors, look-around,
    back-references, flags; a pattern that is none, that nothing matches, or that wants more than MOST_STATES.
    """
    try:
        parsed = _parser.parse(pattern, re.ASCII)
    except re.error as err:
        raise ValueError(f"pattern {pattern!r}: {err}") from err
    if parsed.state.flags & ~re.ASCII:
        raise ValueError(f"pattern {pattern!r}: got flags, want none")
    many = _Many(pattern)
    end = many.add(parsed, 0)
    next_state, accepting = _least(*_one_at_a_time(many, end))
    if not accepting.any():
        raise ValueError(f"pattern {pattern!r}: nothing matches it")
    return next_state, accepting


class _Many:
    """An automaton that may be in several states: `ways` by a byte from lo to hi, `free` by nothing."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.ways: list[list[tuple[int, int, int]]] = [[]]
        self.free: list[list[int]] = [[]]

    def new(self) -> int:
        if len(self.ways) >= 16 * MOST_STATES:
            raise _too_many(self.pattern)
        self.ways.append([])
        self.free.append([])
        return len(self.ways) - 1

    def add(self, items: Sequence[tuple], at: int) -> int:
        """Add what matches `items` one after the other from state `at` on; the state after it."""
        for op, value in items:
            match str(op):
                case "LITERAL":
                    at = self._characters([(value, value)], at)
                case "NOT_LITERAL":
                    at = self._characters(_others([(value, value)]), at)
                case "ANY":
                    at = self._characters(_others([(10, 10)]), at)
                case "IN":
                    at = self._characters(_class(value), at)
                case "BRANCH":
                    at = self._branch(value[1], at)
                case "SUBPATTERN" if not value[1] and not value[2]:
                    at = self.add(value[3], at)
                case "MAX_REPEAT" | "MIN_REPEAT":
                    at = self._repeat(*value, at)
                case name:
                    raise ValueError(
                        f"pattern {self.pattern!r}: got {name}, want no anchor, look-around, back-reference, flag or "
                        "possessive repeat; the whole text is matched as it is"
                    )
        return at

    def _branch(self, branches: Sequence, at: int) -> int:
        end = self.new()
        for branch in branches:
            start = self.new()
            self.free[at].append(start)
            self.free[self.add(branch, start)].append(end)
        return end

    def _repeat(self, least: int, most: int, items: Sequence[tuple], at: int) -> int:
        for _ in range(least):
            at = self.add(items, at)
        end = self.new()
        if most is _parser.MAXREPEAT:
            loop = self.new()
            self.free[at].append(loop)
            self.free[self.add(items, loop)].append(loop)
            self.free[loop].append(end)
            return end
        for _ in range(most - least):
            self.free[at].append(end)
            start = self.new()
            self.free[at].append(start)
            at = self.add(items, start)
        self.free[at].append(end)
        return end

    def _characters(self, ranges: Ranges, at: int) -> int:
        end = self.new()
        ends = {(): end}  # by the bytes that are still to come: characters with the same last bytes share states
        for low, high in ranges:
            for first, *rest in _utf8(low, high):
                after = end
                for k in reversed(range(len(rest))):
                    if tuple(rest[k:]) not in ends:
                        ends[tuple(rest[k:])] = self.new()
                        self.ways[ends[tuple(rest[k:])]].append((*rest[k], after))
                    after = ends[tuple(rest[k:])]
                self.ways[at].append((*first, after))
        return end

    def closed(self, states: frozenset[int]) -> frozenset[int]:
        """With all that is reached by nothing."""
        reached, todo = set(states), list(states)
        while todo:
            for state in self.free[todo.pop()]:
                if state not in reached:
                    reached.add(state)
                    todo.append(state)
        return frozenset(reached)


def _too_many(pattern: str) -> ValueError:
    return ValueError(f"pattern {pattern[:80]!r}...: wants more than {MOST_STATES} states; bound shorter or not at all")


def _class(items: Sequence[tuple]) -> Ranges:
    """The characters of [...]."""
    ranges: Ranges = []
    for op, value in items:
        match str(op):
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case "CATEGORY":
                name = str(value)
                own = _ASCII[name.replace("_NOT_", "_")]
                ranges += _others(own) if "_NOT_" in name else own
    return _others(ranges) if str(items[0][0]) == "NEGATE" else ranges


def _others(ranges: Ranges) -> Ranges:
    """All other characters."""
    others, begin = [], 0
    for low, high in sorted(ranges):
        if begin < low:
            others.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*others, (begin, _LAST)] if begin <= _LAST else others


def _utf8(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """The UTF-8 of characters low to high, as sequences of byte ranges in which every combination is one of them."""
    split = next((cut for cut in (0x7F, 0x7FF, _SURROGATES[0] - 1, _SURROGATES[1], 0xFFFF) if low <= cut < high), None)
    if split is None and _SURROGATES[0] <= low and high <= _SURROGATES[1]:
        return
    if split is None:
        # Bytes below the first in which the ends differ must run over all of 0x80 to 0xBF.
        for bits in (6, 12, 18):
            below = (1 << bits) - 1
            if low | below >= high:
                break
            if low & below:
                split = low | below
                break
            if high & below != below:
                split = (high & ~below) - 1
                break
    if split is None:
        yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
    else:
        yield from _utf8(low, split)
        yield from _utf8(split + 1, high)


def _one_at_a_time(many: _Many, end: int) -> tuple[Int[np.ndarray, "Q 256"], Bool[np.ndarray, " Q"]]:
    """The automaton whose states are the sets of states in which `many` can be."""
    begin = many.closed(frozenset([0]))
    names, todo, rows = {begin: 0}, [begin], []
    for states in todo:  # grows meanwhile
        row = np.full(256, -1, np.int32)
        ways = [way for state in states for way in many.ways[state]]
        cuts = sorted({lo for lo, _, _ in ways} | {hi + 1 for _, hi, _ in ways})
        for low, above in zip(cuts, cuts[1:], strict=False):
            after = many.closed(frozenset(to for lo, hi, to in ways if lo <= low <= hi))
            if after:
                if after not in names:
                    if len(names) >= MOST_STATES:
                        raise _too_many(many.pattern)
                    names[after] = len(names)
                    todo.append(after)
                row[low:above] = names[after]
        rows.append(row)
    return np.stack(rows), np.array([end in states for states in todo])


def _least(
    next_state: Int[np.ndarray, "Q 256"], accepting: Bool[np.ndarray, " Q"]
) -> tuple[Int[np.ndarray, "q 256"], Bool[np.ndarray, " q"]]:
    """The same with equal states made one: those from which the same texts are accepted. State 0 stays first."""
    kind, kinds = accepting.astype(np.int32), 0
    _, bytes_apart = np.unique(next_state, axis=1, return_index=True)  # most bytes lead where another leads, always
    while True:
        seen = np.concatenate([kind[:, None], np.append(kind, -1)[next_state[:, bytes_apart]]], axis=1)
        _, first, kind = np.unique(seen, axis=0, return_index=True, return_inverse=True)
        if len(first) == kinds:
            break
        kinds = len(first)
    order = np.argsort(first)  # by first member: state 0 is in the first
    rank = np.append(np.argsort(order), -1)
    return rank[np.append(kind, -1)][next_state[first[order]]].astype(np.int32), accepting[first[order]]
