"""A constraint allows an id exactly where the text with it can still become a match, whatever the cut into tokens."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.constraint import from_regex, from_strings

END = 256
BYTES = [bytes([byte]) for byte in range(256)]
# Every byte, one end id, and pieces of several characters, some of which cut a character in two.
PIECES = [*BYTES, None, b"ab", b"ba", b"aab", b" a", b"a\xc3", b"\xbcb", "ü".encode(), b"12", b"", None]

atoms = st.sampled_from(
    ["a", "b", "ü", "[ab]", "[^a]", "[^ü-\U0001f600]", r"\d", r"\W", r"[^\d\s]", ".", r"\[", "(ab|ba)"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "??", "{1,3}", "{2}", "{2,}"])).map(lambda x: f"(?:{x[0]}){x[1]}"),
    ),
    max_leaves=5,
)
ways = st.lists(st.integers(0, 2**16), max_size=8)


def allowed(constraint, state):
    return np.flatnonzero(constraint.next_state[state] >= 0)


def finished(constraint, state):
    """The shortest way to an end id."""
    seen, layer = {state}, [(state, [])]
    while layer:
        following = []
        for at, ids in layer:
            if constraint.next_state[at, END] >= 0:
                return ids
            for token in allowed(constraint, at).tolist():
                after = int(constraint.next_state[at, token])
                if after not in seen:
                    seen.add(after)
                    following.append((after, [*ids, token]))
        layer = following
    raise AssertionError(f"no match can be reached from state {state}")


def text_of(ids):
    return b"".join(PIECES[i] for i in ids).decode()


@given(pattern=patterns, ways=ways)
def test_every_walk_can_be_finished_and_is_a_match(pattern, ways):
    constraint, ids, state = from_regex(pattern, PIECES, [END]), [], 0
    for way in ways:
        choice = [i for i in allowed(constraint, state).tolist() if i != END]
        if not choice:
            break
        ids.append(choice[way % len(choice)])
        state = int(constraint.next_state[state, ids[-1]])
    assert constraint.after(ids) == state
    text = text_of(ids + finished(constraint, state))
    assert re.fullmatch(pattern, text, re.ASCII), (pattern, text)


@given(pattern=patterns, text=st.text("abü1[\n", max_size=5), data=st.data())
def test_a_text_is_accepted_exactly_if_it_matches_however_it_is_cut(pattern, text, data):
    constraint, rest, ids = from_regex(pattern, PIECES, [END]), text.encode(), []
    while rest:
        fits = [i for i, piece in enumerate(PIECES) if piece and rest.startswith(piece)]
        ids.append(data.draw(st.sampled_from(fits)))
        rest = rest[len(PIECES[ids[-1]]) :]
    try:
        constraint.after([*ids, END])
    except ValueError:
        assert not re.fullmatch(pattern, text, re.ASCII)
    else:
        assert re.fullmatch(pattern, text, re.ASCII)


@given(strings=st.lists(st.text(max_size=4), min_size=1, max_size=5), other=st.text(max_size=4))
def test_of_strings_these_alone_are_accepted(strings, other):
    constraint = from_strings(strings, PIECES, [END])
    for text in [*strings, other]:
        try:
            constraint.after([*text.encode(), END])
        except ValueError:
            assert text not in strings
        else:
            assert text in strings


def test_worked_table():
    pieces = [b"a", b"b", b"ab", b"c", None]
    constraint = from_regex("ab+", pieces, [4])
    assert constraint.next_state.shape == (3, 5)  # nothing, "a", "ab..."
    assert [allowed(constraint, state).tolist() for state in range(3)] in ([[0, 2], [1], [1, 4]], [[0, 2], [1, 4], [1]])
    assert constraint.after([0, 1]) == constraint.after([2]) == constraint.after([2, 1, 1, 4])
    with pytest.raises(ValueError, match="got id 3 at place 1, want one that state"):
        constraint.after([2, 3])


def test_what_these_ids_cannot_spell_to_the_end_is_not_begun():
    pieces = [b"y", b"ye", b"n", b"o", None]
    assert allowed(from_strings(["yes", "no"], pieces, [4]), 0).tolist() == [2]
    with pytest.raises(ValueError, match="'yes', of which the tokenizer's ids can spell no match"):
        from_strings(["yes"], pieces, [4])


@pytest.mark.parametrize(
    ("pattern", "ends", "message"),
    [
        ("(", [END], "pattern '\\(': missing \\), unterminated subpattern"),
        ("a(?=b)", [END], "got ASSERT, want no anchor, look-around"),
        ("^a", [END], "got AT, want no anchor"),
        ("(a)\\1", [END], "got GROUPREF, want"),
        ("(?:a*+)b", [END], "got POSSESSIVE_REPEAT, want"),
        ("(?i)a", [END], "got flags, want none"),
        ("(?i:a)", [END], "got SUBPATTERN, want"),
        ("[^\x00-\U0010ffff]", [END], "nothing matches it"),
        ("a", [], "got end ids \\(\\), want one or more from 0 to"),
        ("a", [999], "got end ids \\(999,\\)"),
    ],
)
def test_what_cannot_be_is_refused(pattern, ends, message):
    with pytest.raises(ValueError, match=message):
        from_regex(pattern, PIECES, ends)


def test_no_strings_are_refused():
    with pytest.raises(ValueError, match="got no strings"):
        from_strings([], PIECES, [END])
