"""No held-out entity is named in what training can show; every answer stands on the page that its chain says."""

from collections import Counter

import pytest

from envs.search import questions, splits
from envs.search.corpus import Entry, Fact, is_plain, words

ORDER = {split: rank for rank, split in enumerate(splits.SPLITS)}


@pytest.fixture(scope="module")
def shipped():
    return questions.load()


@pytest.fixture(scope="module")
def tasks():
    return {split: questions.all_tasks(split) for split in splits.SPLITS}


def _later_names(corpus, split):
    return splits.by_first_word(n for later in splits.SPLITS[ORDER[split] + 1 :] for n in corpus.names[later])


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_held_out_name_is_visible(shipped, tasks, split):
    hidden = _later_names(shipped.corpus, split)
    shown = {text for p in splits.visible(shipped.corpus.passages, split) for text in (p.title, *p.pages)}
    shown |= {message.content for task in tasks[split] for message in task.prompt}
    shown |= {text for task in tasks[split] for text in (*task.data["answers"], task.data["subject"])}
    shown |= {link[key] for task in tasks[split] for link in task.data["chain"] for key in ("title", "value")}
    leaks = [(name, text) for text in shown for name in splits.find_names(text, hidden)]
    assert not leaks, leaks[:5]
    assert sum(len(names) for names in hidden.values()) > 1000  # the law is not empty


def test_no_task_leaves_its_split(shipped, tasks):
    for split, group in tasks.items():
        assert {shipped.passages[link["passage_id"]].split for task in group for link in task.data["chain"]} == {split}
        assert {task.split for task in group} == {split}


def test_sizes(shipped):
    countries = Counter(shipped.corpus.split_of.values())
    assert [round(countries[split] / countries.total(), 2) for split in splits.SPLITS] == [0.64, 0.12, 0.24]
    per_split = {s: {p.entity for p in shipped.corpus.passages if p.split == s} for s in splits.SPLITS}
    assert not per_split["train"] & per_split["test"] and not per_split["validation"] & per_split["test"]
    elements = {
        s: {p.entity for p in shipped.corpus.passages if p.split == s and p.source == "mendeleev"} for s in ORDER
    }
    assert all(len(countries) >= 3 for countries in elements.values()), elements


def test_visible_grows_and_refuses_an_unknown_split(shipped):
    seen = [{p.passage_id for p in splits.visible(shipped.corpus.passages, split)} for split in splits.SPLITS]
    assert seen[0] < seen[1] < seen[2] and len(seen[2]) == len(shipped.corpus.passages)
    with pytest.raises(ValueError, match="got 'dev', wanted one of train, validation, test"):
        splits.visible(shipped.corpus.passages, "dev")


def _country(code, name, *facts, prose=(), aliases=()):
    passage_id = f"country/{code}"
    made = tuple(Fact(name, relation, value, passage_id, 0, target) for relation, value, target in facts)
    return Entry(passage_id, name, code, "test", made, prose, aliases)


def _city(name, code):
    return Entry(f"city/{name}", name, code, "test", (Fact(name, "city_in", code, f"city/{name}"),))


def test_components_follow_borders_and_contained_names():
    entries = [
        _country("A", "Alpha", ("longest_border", "Beta", "country/B")),
        _country("B", "Beta"),
        _country("C", "New Alpha"),
        _country("D", "Delta", aliases=("Port Beta",)),
        _country("E", "Epsilon"),
        _city("Epsilon Alpha", "E"),  # cities tie nothing together: they are left out instead
    ]
    assert splits.components(entries) == [["A", "B", "C", "D"], ["E"]]


def test_assign_is_deterministic_and_balanced():
    groups = [["x" * 9 + str(i) for i in range(30)]] + [[f"g{i}"] for i in range(70)]
    split_of = splits.assign(groups, seed=3)
    assert Counter(split_of.values()) == {"train": 64, "validation": 12, "test": 24}
    assert {split_of[entity] for entity in groups[0]} == {"train"}  # too large for the others
    assert split_of == splits.assign(groups, seed=3) != splits.assign(groups, seed=4)
    with pytest.raises(ValueError, match="wanted 3 positive numbers with sum 1"):
        splits.assign(groups, seed=0, fractions=(0.5, 0.5, 0.5))


def test_separate_leaves_out_what_names_another_split():
    entries = [
        _country(
            "A",
            "Alpha",
            ("highest_point", "Mount Omega", ""),
            ("capital", "Aville", ""),
            prose=("It is dry.", "OMEGA is near."),
        ),
        _country("Z", "Omega", prose=("It fought Alpha.",)),
        *(_city(name, "A") for name in ("York", "Fine", "Of", "Omega Bay")),
        *(_city(name, "Z") for name in ("New York", "Good", "Alpha Falls")),
    ]
    corpus = splits.separate(entries, {"A": "train", "Z": "test"}, reserved=["capital of"])
    assert [p.title for p in corpus.passages] == ["Alpha", "Omega", "Fine", "Good"]
    alpha, omega = corpus.passages[:2]
    assert alpha.pages == ("capital: Aville", "It is dry.") and alpha.split == "train"
    assert omega.pages[-1] == "It fought Alpha."  # test may name what training knows
    assert {fact.relation for fact in corpus.facts if fact.subject == "Alpha"} == {"capital"}


def test_find_names_is_by_words_not_by_letters():
    index = splits.by_first_word([("niger",), ("new", "york")])
    assert list(splits.find_names("Nigeria, NEW-YORK; new yorker; Niger's", index)) == [("new", "york"), ("niger",)]


def test_every_task_is_answered_by_its_chain(shipped, tasks):
    for task in (task for group in tasks.values() for task in group):
        chain, (answer,) = task.data["chain"], task.data["answers"]
        assert chain[-1]["value"] == answer and chain[0]["title"] == task.data["subject"]
        assert len(chain) == task.data["hops"] == task.difficulty
        for link, following in zip(chain, chain[1:], strict=False):
            assert link["value"] == following["title"]
        for link in chain:
            passage = shipped.passages[link["passage_id"]]
            assert passage.title == link["title"] and f" {link['value']}" in passage.pages[link["page"]]
            assert is_plain(link["title"])
        assert (chain[-1]["page"] > 0) == (task.family == "open1")


def test_prompts_are_short_and_names_stand_alone(tasks):
    for task in (task for group in tasks.values() for task in group):
        text, subject = task.prompt[0].content, task.data["subject"]
        assert f" {subject} " in text and "  " not in text and "{" not in text
        assert len(text.split()) <= 19
        given = words(text)
        answer = words(task.data["answers"][0])
        assert answer not in [given[i : i + len(answer)] for i in range(len(given))] or len(answer[0]) <= 2


def test_ids_and_seeds_are_stable_and_unique(tasks):
    for group in tasks.values():
        assert len({task.task_id for task in group}) == len(group)
    task = next(task for task in tasks["train"] if task.task_id.startswith("search/train/capital/country/AE/"))
    assert 0 <= task.seed < 2**31
    again = questions.make_task(questions.load(), "train", "hop1", ("capital",), "country/AE", int(task.task_id[-1]))
    assert again == task


@pytest.mark.parametrize("split", splits.SPLITS)
def test_draw_follows_the_mix_without_repeats(split):
    drawn = questions.draw_tasks(split, 400, seed=1)
    assert Counter(task.family for task in drawn) == {"hop1": 180, "hop2": 180, "hop3": 40}
    assert len({task.task_id for task in drawn}) == 400
    assert questions.draw_tasks(split, 250, seed=1) == drawn[:250]
    assert questions.draw_tasks(split, 20, seed=2) != drawn[:20]


def test_countries_come_before_any_comes_again(shipped):
    drawn = questions.draw_tasks("train", 400, 0, {"hop1": 1.0})
    cities = [task for task in drawn if task.data["chain"][0]["relation"] == "city_in"]
    countries = Counter(shipped.passages[task.data["chain"][0]["passage_id"]].entity for task in cities)
    assert len(cities) > 25 and max(countries.values()) <= 3 and len(countries) > 0.7 * len(cities)
    pairs = Counter((task.data["subject"], task.task_id.split("/")[2]) for task in drawn)
    assert max(pairs.values()) <= 2  # only small groups (elements) are asked again, otherwise phrased


def test_open_questions_and_instruction():
    drawn = questions.draw_tasks("validation", 30, 0, {"open1": 1.0}, instruction="Use <search>. ")
    assert {task.family for task in drawn} == {"open1"}
    assert all(task.prompt[0].content.startswith("Use <search>. ") for task in drawn)


def test_bad_requests():
    with pytest.raises(ValueError, match="got 'dev'"):
        questions.draw_tasks("dev", 1, 0)
    with pytest.raises(ValueError, match="wanted shares >= 0 of hop1, hop2, hop3, open1"):
        questions.draw_tasks("train", 1, 0, {"hop9": 1.0})
    with pytest.raises(ValueError, match="got n=100000 for test, but hop3 has"):
        questions.draw_tasks("test", 100000, 0, {"hop3": 1.0})
