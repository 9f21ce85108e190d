"""Where a stop string ends a turn; the vocabulary is read once, however many ask for whatever."""

import threading
import time

import pytest

from rl.rollout.stops import StopIds, first_stop
from tests.models.weights import drawn
from tests.rl.engines import CONFIG, GREEDY, PROMPT, in_thread, key, make_engine, view

TEXTS = ["a", "</x>", "b</x>", "</", "x>", "ab", "ba", "c"]


def test_first_stop_is_the_token_that_completes_the_string():
    assert first_stop(view, [1, 2, 3], 0, ()) is None
    assert first_stop(view, [1, 2, 3], 0, ("2",)) == 2
    assert first_stop(view, [1, 2, 3, 2, 3], 0, ("23",)) == 3
    assert first_stop(view, [1, 2, 3, 2, 3], 3, ("32",)) == 4  # begins in an earlier round
    assert first_stop(view, [1, 2, 3], 0, ("9", "31")) is None


def test_the_vocabulary_is_looked_through_once_for_all_callers():
    """A large one takes a second, and every thread of a pool begins with the same stop strings."""
    looked = []

    def counting(ids):
        if len(ids) == 1:
            looked.append(ids[0])
            time.sleep(0.001)
        return view(ids)

    engine = make_engine(drawn(CONFIG), view=counting, residents=8, lanes=8)
    try:
        sessions = [engine.open(key(i), GREEDY) for i in range(8)]
        how = {"max_tokens": 2, "stop": ("no token",)}
        for thread in [in_thread(lambda s=s: s.generate(PROMPT, **how))[0] for s in sessions]:
            thread.join(30)
        assert looked == list(range(CONFIG.vocab_size))
    finally:
        engine.close()


def test_ids_that_hold_a_string_rising_and_at_most_so_many_of_each():
    ids = StopIds(lambda ids: TEXTS[ids[0]], len(TEXTS), most=3)
    assert [ids(()), ids(("</x>",)), ids(("x> ",)), ids(("c", "</x>"))] == [(), (1, 2), (), (1, 2, 7)]
    assert ids(("a",)) == (0, 5, 6) and ids(("b",)) == (2, 5, 6) and ids(("x>", "b")) == (1, 2, 4, 5, 6)
    with pytest.raises(ValueError, match="non-empty"):
        ids(("a", ""))


def test_each_text_is_made_once_and_few_strings_are_remembered():
    made = []
    ids = StopIds(lambda ids: made.append(ids[0]) or TEXTS[ids[0]], len(TEXTS), most=16, remembered=2)
    for stop in [("a",), ("b", "a"), ("c", "b"), ("a",), *((str(i),) for i in range(50))]:
        ids(stop)
    assert made == list(range(len(TEXTS)))
    assert list(ids._found) == ["48", "49"]
    ids(("48",))  # asked for again: the other is forgotten first
    ids(("c",))
    assert list(ids._found) == ["48", "c"]


def test_who_asks_for_what_is_known_does_not_wait_for_who_looks():
    class Slow(str):
        def __contains__(self, part):
            if part == "new":
                looking.set()
                go.wait(30)
            return str.__contains__(self, part)

    looking, go = threading.Event(), threading.Event()
    ids = StopIds(lambda ids: Slow(TEXTS[ids[0]]), len(TEXTS), most=16)
    assert ids(("c",)) == (7,)
    looks, out = in_thread(lambda: ids(("new",)))
    assert looking.wait(10)
    knows, known = in_thread(lambda: ids(("c",)))
    knows.join(10)
    assert known == [(7,)] and not out
    go.set()
    looks.join(10)
    assert out == [()]
