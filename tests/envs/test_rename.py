"""Invented names: one for one, nowhere a real or a held-out name, the same task otherwise, the same each time."""

import dataclasses
import json
import random
import re

import pytest

from envs import checks, make_world
from envs.play import play
from envs.search import questions, rename, splits
from envs.search.corpus import words

NAMES = rename.names_from(
    ["Kaolack", "New Lisbon", "São Tomé", "Tal"], [("kaolack",), ("peru",)], [("old", "tal"), ("sector", "7")]
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    sizes = {"train": 60, "validation": 10, "test": 10}
    return make_world("search", data_dir=str(tmp_path_factory.mktemp("data")), sizes=sizes, renamed_frac=1.0)


def test_names_are_cut_from_plain_words_of_titles():
    assert NAMES.words == ("Kaolack", "New", "Lisbon", "Tal")
    with pytest.raises(ValueError, match="want some to cut names from"):
        rename.names_from(["São", "A B"], [], [])


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (".pe", r"\.[a-z]{2}"),
        ("PEN", "[A-Z]{3}"),
        ("+1-268", r"\+\d-\d{3}"),
        ("1774", r"\d{4}"),
        ("Cl", "[A-Z][a-z]"),
        ("Peru", r"[A-Z]\w+( [A-Z]\w+)?"),
    ],
)
def test_an_invention_looks_like_what_it_replaces(text, pattern):
    for seed in range(20):
        table = {}
        rename.invent([text], table, NAMES, seed)
        assert re.fullmatch(pattern, table[text]), table


def test_inventions_are_one_for_one_and_never_a_real_name():
    texts = [f"Name{i}" for i in range(200)]
    table = {}
    rename.invent(texts, table, NAMES, 0)
    assert len(set(table.values())) == 200
    assert not {words(new) for new in table.values()} & NAMES.real
    assert not {word for new in table.values() for word in words(new)} & {"old", "tal", "sector", "7"}
    again = {}
    rename.invent(texts[:50], again, NAMES, 0)
    assert again == {text: table[text] for text in texts[:50]}  # addressed by (seed, text), not by what came after


def test_swap_replaces_whole_names_longest_first_in_one_pass():
    table = {"Guinea": "Aa", "Guinea Bissau": "Bb", "Aa": "Cc"}
    assert rename.swap("Guinea Bissau, Guinea; Guineas Aa", table) == "Bb, Aa; Guineas Cc"


def test_inventions_grow_longer_where_none_of_their_length_is_left():
    table = {}
    rename.invent("0123456789", table, NAMES, 0)  # of one digit, nine are left
    assert len(set(table.values())) == 10 and "7" not in table.values()
    assert sorted(map(len, table.values())) == [1] * 9 + [2]
    nothing = dataclasses.replace(NAMES, held_out=frozenset("abcdefghijklmnopqrstuvwxyz"))
    rename.invent(["K"], table, nothing, 0)
    assert len(table["K"]) > 1


def test_swap_does_what_one_regular_expression_would():
    rng = random.Random(0)
    for _ in range(2000):
        table = {"".join(rng.choices("ab .é+_", k=rng.randint(1, 4))): f"<{i}>" for i in range(6)}
        text = "".join(rng.choices("ab .é+_", k=20))
        longest_first = "|".join(map(re.escape, sorted(table, key=len, reverse=True)))
        wanted = re.sub(rf"(?<![\w.])(?:{longest_first})(?!\w)", lambda found, table=table: table[found[0]], text)
        assert rename.swap(text, table) == wanted, (text, table)


def test_no_held_out_name_is_shown_under_invented_names(world):
    """The law of the splits, over all that training reads: prompts, actions and observations, gold's and others'."""
    names = questions.load().corpus.names
    hidden = splits.by_first_word(name for later in splits.SPLITS[1:] for name in names[later])
    env = world.make_env()
    for i, task in enumerate(world.tasks("train")):
        shown = [message.content for message in task.prompt] + [str(task.data["subject"])]
        for policy in (world.policies["gold"](task), world.demonstrate(task, i)):
            turns, _ = play(env, task, policy)
            shown += [text for turn in turns for text in turn]
        shown += [text for text in json.loads(env.snapshot())["renamed"].values()]
        leaks = [(name, text) for text in shown for name in splits.find_names(text, hidden)]
        assert not leaks, (task.task_id, leaks[:3])


def test_queries_are_translated_back(world):
    """What a policy searches by an invented name finds what the real name finds, under invented names."""
    env, plain = world.make_env(), world.make_env()
    for task in world.tasks("train")[:10]:
        env.reset(task)
        table = task.data["renamed"]
        title = task.data["chain"][0]["title"]
        real = next(real for real, new in table.items() if new == title)
        found = env.step(f"<search> {title} </search>").observation.text
        assert f"(Title: {title})" in found and f"(Title: {real})" not in found
        plain.reset(dataclasses.replace(task, data=dict(task.data) | {"renamed": {}}))
        unnamed = plain.step(f"<search> {real} </search>").observation.text
        state = json.loads(env.snapshot())
        assert rename.swap(unnamed, state["renamed"]) == found
        for new in re.findall(r"\(Title: (.*?)\) ", found):  # names invented on the way are understood, too
            assert f"(Title: {new})" in env.step(f"<search> {new} </search>").observation.text


def test_a_restored_episode_keeps_its_names(world):
    env, other = world.make_env(), world.make_env()
    for task in world.tasks("train")[:10]:
        chain = task.data["chain"]
        env.reset(task)
        first = env.step(f"<search> {chain[0]['title']} </search>").observation.text
        new = re.findall(r"\(Title: (.*?)\) ", first)[-1]  # not in the task: invented by the search
        other.restore(env.snapshot())
        for action in (
            f"<search> {new} </search>",
            "<open> 1 </open>",
            f"<answer> {task.data['answers'][0]} </answer>",
        ):
            assert checks.same(dataclasses.asdict(env.step(action)), dataclasses.asdict(other.step(action)))
        assert env.snapshot() == other.snapshot()


def test_inventions_of_an_episode_are_unique(world):
    env = world.make_env()
    for task in world.tasks("train"):
        play(env, task, world.policies["gold"](task))
        table = json.loads(env.snapshot())["renamed"]
        assert len(set(table.values())) == len(table) and table.items() >= task.data["renamed"].items()


def test_gold_succeeds_and_reads_no_real_name(world):
    real = {
        words(p.title): p.title for p in questions.load().corpus.passages if len(p.title) > 4 and " " not in p.title
    }
    env = world.make_env()
    for task in world.tasks("train"):
        turns, facts = play(env, task, world.policies["gold"](task))
        assert facts["success"] and facts["evidence_frac"] == 1.0, task
        first_pages = " ".join(o for a, o in turns if "<search>" in a)
        read = {words(token) for token in (task.prompt[-1].content + " " + first_pages).replace(":", " ").split()}
        # An invented word may be a real word at full length, but never a whole real title.
        shown = {title for key, title in real.items() if key in read}
        assert not shown & set(task.data["renamed"]), (task, shown)


def test_only_the_training_split_is_renamed_and_each_time_alike(world):
    assert all("renamed" in task.data for task in world.tasks("train"))
    assert not any("renamed" in task.data for split in ("validation", "test") for task in world.tasks(split))
    assert world.tasks("train")[3] == world.tasks("train")[3]
    assert world.tasks("train")[3].task_id.endswith("~")


def test_refused_options():
    with pytest.raises(ValueError, match="renamed_frac: got 1.5"):
        make_world("search", renamed_frac=1.5)
    with pytest.raises(ValueError, match="and the local index"):
        make_world("search", renamed_frac=0.5, url="http://127.0.0.1:1/retrieve")
