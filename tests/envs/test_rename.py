"""Invented names: one for one, nowhere a real name, the same task otherwise, and the same each time."""

import pytest

from envs import make_world
from envs.play import play
from envs.search import questions, rename
from envs.search.corpus import words

NAMES = rename.names_from(["Kaolack", "New Lisbon", "São Tomé", "Tal"], ["Kaolack", "Peru"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    sizes = {"train": 60, "validation": 10, "test": 10}
    return make_world("search", data_dir=str(tmp_path_factory.mktemp("data")), sizes=sizes, renamed_frac=1.0)


def test_names_are_cut_from_plain_words_of_titles():
    assert NAMES.words == ("Kaolack", "New", "Lisbon", "Tal")
    with pytest.raises(ValueError, match="want some to cut names from"):
        rename.names_from(["São", "A B"], [])


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
        assert rename.re.fullmatch(pattern, table[text]), table


def test_inventions_are_one_for_one_and_never_a_real_name():
    texts = [f"Name{i}" for i in range(200)]
    table = {}
    rename.invent(texts, table, NAMES, 0)
    assert len(set(table.values())) == 200
    assert not {words(new) for new in table.values()} & NAMES.real
    again = {}
    rename.invent(texts[:50], again, NAMES, 0)
    assert again == {text: table[text] for text in texts[:50]}  # addressed by (seed, text), not by what came after


def test_swap_replaces_whole_names_longest_first_in_one_pass():
    table = {"Guinea": "Aa", "Guinea Bissau": "Bb", "Aa": "Cc"}
    assert rename.swap("Guinea Bissau, Guinea; Guineas Aa", table) == "Bb, Aa; Guineas Cc"


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
