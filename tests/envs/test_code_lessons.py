"""Lessons are of a library, judged by their text, and never among tasks; bugs of chosen kinds are of those alone."""

import functools
import itertools
import re

import numpy as np
import pytest

from envs import make_world
from envs.base import Message, Task
from envs.code import lessons, operators, scripted, tasks
from envs.code.scripted import function_text
from envs.play import play
from launch import build

LIBRARY = {
    "shop/till.py": b"""\
class Till:
    def add(self, price, count=1):
        if count < 1:
            raise ValueError("count")
        self.sum += price * count

    def is_open(self):
        return not self.closed and self.sum >= 0

if True:
    def under(a, b):
        def inner(x):
            return x - a
        return inner(b)
""",
    "broken.py": b"def f(:\n",
    "latin.py": b"# \xe9\ndef g(a):\n    return a + 1\n",
}
KINDS = tasks.Kinds(("compare", "drop_not"), 12)


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(lessons, "tree", lambda: LIBRARY)


@pytest.fixture
def made(library, tmp_path):
    how = {"data_dir": str(tmp_path), "accept_rlimits": True, "lessons": 3, "max_function_lines": 12}
    return functools.partial(make_world, "code", operators=["compare", "drop_not"], show="function", **how)


@pytest.fixture
def world(made):
    return made()


def test_lessons_are_of_the_kinds_asked_in_a_drawn_order(library, tmp_path):
    found = lessons.build(6, tmp_path, kinds=KINDS)
    assert sorted(task.data["operators"][0] for task in found[:3]) == ["compare", "compare", "drop_not"]
    assert lessons.build(6, tmp_path, kinds=KINDS) == found
    assert {tuple(t.data["operators"]) for s in range(9) for t in lessons.build(1, tmp_path, seed=s, kinds=KINDS)} == {
        ("compare",),
        ("drop_not",),
    }
    with pytest.raises(ValueError, match="Python's library has no place for such a bug"):
        lessons.build(1, tmp_path, kinds=tasks.Kinds(("truth",), 12))


def test_a_lesson_comes_again_under_other_names(library, tmp_path):
    """The same function and the same bug, with words in the places of words: nothing else is different."""
    found = lessons.build(3 * 20, tmp_path, kinds=KINDS)
    again = [task for task in found if task.data["operators"] == ["drop_not"]]
    texts = [text for task in again for text in task.data["files"].values()]
    assert len({path for task in again for path in task.data["files"]}) > 3 and len(set(texts)) > 3
    shape = r"class \w+:\n    def (\w+)\(self\):\n        return not self\.\w+ and self\.\w+ >= 0\n"
    for task, text in zip(again, texts, strict=True):
        (path,) = task.data["files"]
        name = re.fullmatch(shape, text).group(1)
        assert task.data["functions"] == [f"{path}:{text[6:].partition(':')[0]}.{name}"]
        ((_, _, wrong),) = task.data["bug"][path]
        assert wrong == text.replace("not ", "")


def test_an_earlier_function_of_the_same_name_is_no_place_for_a_bug(monkeypatch):
    one = "    def f(a):\n        return a,not a\n"
    monkeypatch.setattr(lessons, "tree", lambda: {"twice.py": f"class A:\n{one}{one}".encode()})
    ((right, wrong, *_),) = lessons._snippets(tasks.Kinds(("drop_not",), 12))[0]
    assert (right, wrong) == (one[:-1], one[:-1].replace("not a", "a"))


def test_names_are_changed_where_they_stand_whatever_else_ends_a_line_elsewhere():
    text = "x = 'a\x85b'  # \x0c\nx.y(x, 'x')\n"
    assert lessons._renamed(text, {"x": "long"}) == "long = 'a\x85b'  # \x0c\nlong.y(long, 'x')\n"


def test_words_of_comments_and_plain_strings_are_changed_like_names():
    """But none where an escape or a prefix could change what the text means, and no keyword."""
    text = 'def road(self):  # not the road\n    """The road\n    is long."""\n'
    kept = 'return "\\\\road", f"{road} road", rb"road", self\n'
    new = {"road": "way", "long": "short", "not": "or", "self": "x"}
    changed = 'def way(self):  # not the way\n    """The way\n    is short."""\n'
    assert lessons._renamed(f"{text}    {kept}", new) == f"{changed}    {kept}"


def test_a_lesson_is_judged_by_its_text(world):
    env = world.make_env()
    for task in world.lessons():
        (path,) = task.data["bug"]
        assert task.family == "lesson" and f"{path}\n    def " in task.prompt[-1].content
        verdicts = {name: play(env, task, world.policies[name](task))[1] for name in ("gold", "noop", "wrong")}
        assert {name: facts["success"] for name, facts in verdicts.items()} == {
            "gold": True,
            "noop": False,
            "wrong": False,
        }
        assert verdicts["gold"]["similarity"] == 1 and not verdicts["gold"]["exploited"]
        gold, wrong = (world.policies[name](task) for name in ("gold", "wrong"))
        both = [wrong([]), gold([]), gold([""])]
        assert not play(env, task, lambda seen, both=both: both[len(seen)])[1]["success"]  # right, and something else


def test_demonstrations_are_of_lessons(world):
    demos = build._demonstrate(world, 12, 0)
    assert {demo.task.family for demo in demos} == {"lesson"}
    assert 0 < sum(demo.success for demo in demos) < 12


def test_the_tokenizer_is_trained_on_what_is_demonstrated(world, monkeypatch):
    """A token that tasks alone have has an embedding that no demonstration trains: no policy could copy it."""
    monkeypatch.setattr(tasks, "build", lambda *_, **__: pytest.fail("no task is asked for"))
    prompts = {task.prompt[-1].content for task in world.lessons()}
    texts = list(world.texts())
    assert set(texts[::2]) == prompts and all(re.match(r"<(edit|submit)>", action) for action in texts[1::2])


def test_a_wrong_demonstration_edits_what_the_prompt_shows(made):
    world, seen = made(demonstrations={"slips": 0.0}), set()
    for task, seed in itertools.product(world.lessons(), range(40)):
        action = world.demonstrate(task, seed)([])
        if action.startswith("<edit>"):
            search = action.split("SEARCH\n")[1].split("=======")[0]
            seen.add(search in task.prompt[-1].content)
    assert seen == {True}


def test_a_wrong_edit_is_of_a_line_that_can_be_turned_where_there_is_one():
    """Not of any line with a comment added: a policy that unlearns the comment is left with an edit of nothing."""
    right = ("    if not a:\n", "    if a:\n")
    shown = "def f(a):\n    # why\n    if not a:\n        return b == 3\n    return None\n"
    task = Task("t", "one", "train", 0, (Message("user", ""),), {"functions": ["a.py:f"]}, 1.0)

    class Seen:
        seen = staticmethod(lambda path: shown)

    def wrong(elsewhere):
        rngs = map(np.random.default_rng, range(20))
        return {scripted._wrong_edit(task, Seen, shown, right, elsewhere=elsewhere, rng=rng) for rng in rngs}

    assert wrong(elsewhere=True) == {("        return b == 3\n", "        return b != 3\n")}
    assert wrong(elsewhere=False) == {("        return b == 3\n", "        return b != 3\n")}  # `if not a` is the bug
    right = ("    return None\n", "    return a\n")
    assert wrong(elsewhere=False) == {("    return None\n", "    return a  # ?\n")}


def test_a_slip_is_refused_and_then_the_edit_is_done_as_it_was_meant(made):
    worlds, kinds = [made(demonstrations={"slips": slips}) for slips in (0.0, 1.0)], set()
    env = worlds[0].make_env()
    for task, seed in itertools.product(worlds[0].lessons(), range(30)):
        (plain, facts), (slipped, after) = (play(env, task, world.demonstrate(task, seed)) for world in worlds)
        edited = len(plain) > 1  # the others submit at once
        assert facts["success"] == after["success"] and slipped[edited:] == plain
        if edited:
            assert (after["bad_edits"], facts["bad_edits"], after["exploits"]) == (1, 0, [])
            kinds.add(next(word for word in ("no file", "0 times", "the same") if word in slipped[0][1]))
    assert len(kinds) == 3


def test_what_is_left_of_a_line_without_a_word_may_stand_in_the_file():
    text = "def f(x):\n"
    for seed in range(30):
        path, search, replace = scripted._slip(text, "a.py", text, "def g(x):\n", np.random.default_rng(seed))
        assert path != "a.py" or search == replace or search not in text


def test_a_world_of_one_turn_has_no_slips_and_bad_shares_are_refused(made):
    for protocol, slips in (("patch", {0}), ("tags", {0, 1})):
        world = made(protocol=protocol)
        found = [world.demonstrate(task, seed)([]) for task in world.lessons() for seed in range(40)]
        search = r"<<<<<<< SEARCH\n(.*)=======\n(.*)>>>>>>> REPLACE"
        blocks = [re.search(search, action, re.DOTALL).groups() for action in found if "SEARCH" in action]
        assert {int(before == after) for before, after in blocks} == slips
    world = made(demonstrations={"slips": 1.5})
    with pytest.raises(ValueError, match="slips: got 1.5"):
        world.demonstrate(world.lessons()[0], 0)


def test_a_function_under_an_if_is_found_and_its_inner_one(world, library):
    class Seen:
        seen = staticmethod(lambda path: LIBRARY[path].decode())

    assert function_text(Seen, "shop/till.py:under.inner") == (
        "shop/till.py",
        "        def inner(x):\n            return x - a\n",
    )
    assert function_text(Seen, "shop/till.py:nowhere")[1] == LIBRARY["shop/till.py"].decode()


def test_only_bugs_of_the_kinds_asked_are_proved(monkeypatch):
    base = tasks.Base(None, {"till.py": LIBRARY["shop/till.py"]}, frozenset(), (), 0.1, (), ())
    monkeypatch.setattr(tasks, "is_source", lambda package, path: True)
    monkeypatch.setattr(tasks, "prove", lambda base, suites, changes: changes)
    rng = np.random.default_rng(0)
    found = [site for _, site in tasks._single(base, None, rng, KINDS)]
    assert sorted(site[1] for site in found) == ["compare", "compare", "drop_not"]
    assert len(list(tasks._single(base, None, rng, tasks.ANY))) > len(found)
    assert not list(tasks._single(base, None, rng, tasks.Kinds(("compare",), 1)))


def test_an_unknown_operator_is_refused(tmp_path):
    with pytest.raises(ValueError, match="operators: got \\['comparison'\\]"):
        make_world("code", data_dir=str(tmp_path), accept_rlimits=True, operators=["comparison"])
    assert set(KINDS.only) <= set(operators.OPERATORS)
