"""Tasks of the search world: questions with one exact answer, made from facts.

A question is a *path*: relations followed one after the other from a subject, "city_in>longest_border>capital". A path
of n relations is an n-hop question; family `open1` is a one-hop question whose answer stands on page 1 (0-based) or
later, so that the document must be opened. Left out: subjects and answers that are not plain names
(`corpus.is_plain`), and questions that contain their own answer (the capital of the country of Lima).
"""

import dataclasses
import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from envs.base import Message, Task
from envs.search import splits
from envs.search.corpus import LABELS, Fact, Passage, is_plain, read, readers, words

MIX: Mapping[str, float] = MappingProxyType({"hop1": 0.45, "hop2": 0.45, "hop3": 0.10})

_ATTRIBUTES = ("capital", "currency", "dialing_code", "internet_code")
_HEADS = ("city_in", "discovered_in", "longest_border")
_FAMILIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "hop1": tuple((r,) for r in (*_ATTRIBUTES, "longest_border", "city_in", "symbol", "year", "discovered_in")),
    "hop2": tuple((head, attribute) for head in _HEADS for attribute in _ATTRIBUTES),
    "hop3": tuple((head, "longest_border", attribute) for head in _HEADS[:2] for attribute in _ATTRIBUTES),
    "open1": tuple((r,) for r in ("highest_point", "nationality", "population", "atomic_number")),
}
FAMILIES = tuple(_FAMILIES)

# The last relation of a path asks; the ones before it describe an entity. The slot is always preceded by one space.
_ASK = {
    "capital": ("What is the capital of {} ?", "Which city is the capital of {} ?", "Name the capital of {} ."),
    "currency": ("What is the currency of {} ?", "Which currency has {} ?", "Name the currency of {} ."),
    "dialing_code": (
        "What is the dialing code of {} ?",
        "Which dialing code has {} ?",
        "Name the dialing code of {} .",
    ),
    "internet_code": (
        "What is the internet code of {} ?",
        "Which internet code has {} ?",
        "Name the internet code of {} .",
    ),
    "longest_border": (
        "Which country shares the longest border with {} ?",
        "What is the longest border neighbour of {} ?",
        "Name the country with the longest border to {} .",
    ),
    "city_in": ("In which country is {} ?", "Which country has the city {} ?", "Name the country of the city {} ."),
    "symbol": ("What is the symbol of {} ?", "Which symbol has the element {} ?", "Name the symbol of {} ."),
    "year": ("In which year was {} discovered ?", "When was {} discovered ?", "Name the year when {} was discovered ."),
    "discovered_in": (
        "In which country was {} discovered ?",
        "Where was {} discovered ?",
        "Name the country where {} was discovered .",
    ),
    "highest_point": (
        "What is the highest point of {} ?",
        "Which peak is the highest point of {} ?",
        "Name the highest point of {} .",
    ),
    "nationality": ("What is the nationality of {} ?", "Which nationality has {} ?", "Name the nationality of {} ."),
    "population": (
        "What is the population of {} ?",
        "How large is the population of {} ?",
        "Name the population of {} .",
    ),
    "atomic_number": (
        "What is the atomic number of {} ?",
        "Which atomic number has {} ?",
        "Name the atomic number of {} .",
    ),
}
_DESCRIBE = {
    "city_in": ("the country of {}", "the country where {} is", "the country with the city {}"),
    "discovered_in": (
        "the country that discovered {}",
        "the country where {} was discovered",
        "the discovery country of {}",
    ),
    "longest_border": (
        "the longest border neighbour of {}",
        "the neighbour with the longest border to {}",
        "the country with the longest border to {}",
    ),
}
PHRASINGS = 3


@dataclasses.dataclass(frozen=True)
class Questions:
    """A corpus with all that can be asked of it: `subjects[split][family][path][country]` -> passage ids."""

    corpus: splits.Corpus
    passages: Mapping[str, Passage]
    facts: Mapping[tuple[str, str], Fact]  # (passage id, relation)
    subjects: Mapping[str, Mapping[str, Mapping[tuple[str, ...], Mapping[str, Sequence[str]]]]]


@functools.lru_cache(maxsize=4)
def load(*, cities_per_country: int = 60, split_seed: int = 2) -> Questions:
    """Read, split and enumerate the shipped corpus (1.5 s, then cached; treat it as read-only).

    `split_seed` 2 was taken because all three splits then hold elements from several countries; nothing was trained
    for it.
    """
    entries = read(readers(cities_per_country=cities_per_country))
    split_of = splits.assign(splits.components(entries), seed=split_seed)
    reserved = [*LABELS.values(), *(text for table in (_ASK, _DESCRIBE) for texts in table.values() for text in texts)]
    return enumerate_questions(splits.separate(entries, split_of, reserved=reserved))


def enumerate_questions(corpus: splits.Corpus) -> Questions:
    """Every askable (subject, path) of a corpus, grouped for drawing."""
    passages = {passage.passage_id: passage for passage in corpus.passages}
    facts = {(fact.passage_id, fact.relation): fact for fact in corpus.facts}
    subjects: dict = {split: {family: {} for family in FAMILIES} for split in splits.SPLITS}
    starts: dict[str, list[Passage]] = defaultdict(list)  # first relation -> subjects that have it
    for fact in corpus.facts:
        if is_plain(fact.subject):
            starts[fact.relation].append(passages[fact.passage_id])
    for family, paths in _FAMILIES.items():
        for path in paths:
            for passage in starts[path[0]]:
                chain = _chain(facts, passage.passage_id, path)
                if chain and _is_askable(chain):
                    by_country = subjects[passage.split][family].setdefault(path, {})
                    by_country.setdefault(passage.entity, []).append(passage.passage_id)
    return Questions(corpus, passages, facts, subjects)


def draw_tasks(
    split: str,
    n: int,
    seed: int,
    mix: Mapping[str, float] = MIX,
    *,
    instruction: str = "",
    questions: Questions | None = None,  # None: the shipped corpus, `load()`
) -> list[Task]:
    """`n` different tasks: family by `mix`, then path, then country, then city or element, each uniform.

    Families follow `mix` exactly, to within one task, at every prefix; draw(n) is a prefix of draw(n + 1). Within a
    path a (subject, path) comes again, in another phrasing, only when each was drawn once.
    Raises ValueError for an unknown split or family, shares that are not positive, and more tasks than there are.
    """
    questions = questions or load()
    _check_request(split, mix)
    rng = np.random.default_rng([seed, splits.SPLITS.index(split)])
    pools = {family: _Pool(questions.subjects[split][family], rng) for family, share in mix.items() if share > 0}
    share = {family: mix[family] / sum(mix.values()) for family in pools}
    drawn = dict.fromkeys(pools, 0)
    tasks = []
    for i in range(n):
        family = max(pools, key=lambda family: share[family] * (i + 1) - drawn[family])
        item = pools[family].draw()
        if item is None:
            size = drawn[family]
            raise ValueError(
                f"draw_tasks: got n={n} for {split}, but {family} has {size} tasks; ask for less of it or more cities"
            )
        drawn[family] += 1
        tasks.append(make_task(questions, split, family, *item, instruction=instruction))
    return tasks


def all_tasks(split: str, *, instruction: str = "", questions: Questions | None = None) -> list[Task]:
    """Every (subject, path) of `split` once, in one phrasing each, in a fixed order."""
    questions = questions or load()
    _check_request(split, MIX)
    return [
        make_task(questions, split, family, path, passage_id, _hash(f"{path}{passage_id}"), instruction=instruction)
        for family, paths in questions.subjects[split].items()
        for path, countries in paths.items()
        for passage_ids in countries.values()
        for passage_id in passage_ids
    ]


def make_task(
    questions: Questions,
    split: str,
    family: str,
    path: Sequence[str],
    passage_id: str,
    phrasing: int,
    *,
    instruction: str = "",
) -> Task:
    """One task; `data["chain"]` lists the passages that prove the answer, in the order in which they must be read.

    Each link has title, passage_id, relation, value and the 0-based page on which the value stands.
    """
    phrasing %= PHRASINGS
    chain = _chain(questions.facts, passage_id, path)
    links = [
        {"title": f.subject, "passage_id": f.passage_id, "relation": f.relation, "value": f.value, "page": f.page}
        for f in chain
    ]
    data = {"answers": [chain[-1].value], "chain": links, "subject": chain[0].subject, "hops": len(chain)}
    task_id = f"search/{split}/{'>'.join(path)}/{passage_id}/{phrasing}"
    prompt = (Message("user", instruction + _phrase(path, chain[0].subject, phrasing)),)
    return Task(task_id, family, split, _hash(task_id), prompt, data, difficulty=float(len(chain)))


class _Pool:
    """Draws (path, passage_id, phrasing) without replacement; a spent path is refilled with its next phrasing."""

    def __init__(self, subjects: Mapping[tuple[str, ...], Mapping[str, Sequence[str]]], rng: np.random.Generator):
        self.subjects, self.rng = subjects, rng
        self.paths = list(subjects)
        self.round = dict.fromkeys(self.paths, 0)
        self.left = {path: self._fill(path) for path in self.paths}

    def _fill(self, path: tuple[str, ...]) -> dict[str, list[str]]:
        return {country: list(passage_ids) for country, passage_ids in self.subjects[path].items()}

    def draw(self) -> tuple[tuple[str, ...], str, int] | None:
        if not self.paths:
            return None
        path = self.paths[self.rng.integers(len(self.paths))]
        left = self.left[path]
        country = list(left)[self.rng.integers(len(left))]
        passage_ids = left[country]
        passage_id = passage_ids.pop(self.rng.integers(len(passage_ids)))
        phrasing = _hash(f"{path}{passage_id}") + self.round[path]
        if not passage_ids:
            del left[country]
        if not left:
            self.round[path] += 1
            self.left[path] = self._fill(path)
            if self.round[path] == PHRASINGS:
                self.paths.remove(path)
        return path, passage_id, phrasing


def _chain(facts: Mapping[tuple[str, str], Fact], passage_id: str, path: Sequence[str]) -> list[Fact]:
    """The facts along `path`; [] where it breaks off."""
    chain = []
    for relation in path:
        fact = facts.get((passage_id, relation))
        if fact is None:
            return []
        chain.append(fact)
        passage_id = fact.target
    return chain


def _is_askable(chain: Sequence[Fact]) -> bool:
    subject, answer = words(chain[0].subject), words(chain[-1].value)
    size = len(answer)
    given_away = any(subject[i : i + size] == answer for i in range(len(subject)))
    # the names on the way are queries that the policy must copy, so they must be plain, too
    return not given_away and all(is_plain(fact.subject) for fact in chain) and _is_plain_value(chain[-1].value)


def _is_plain_value(value: str) -> bool:
    return is_plain(value) or re.fullmatch(r"\d{1,9}|\.[a-z]{2,3}", value) is not None


def _phrase(path: Sequence[str], subject: str, phrasing: int) -> str:
    text = subject
    for depth, relation in enumerate(path[:-1]):
        forms = _DESCRIBE[relation]
        # the outer description of a three-hop question takes its shortest form, to keep it within some 16 words
        text = forms[phrasing if depth == 0 else 0].format(text)
    return _ASK[path[-1]][phrasing].format(text)


def _check_request(split: str, mix: Mapping[str, float]) -> None:
    if split not in splits.SPLITS:
        raise ValueError(f"split: got {split!r}, wanted one of {', '.join(splits.SPLITS)}")
    unknown = [family for family in mix if family not in FAMILIES]
    if unknown or min(mix.values(), default=-1) < 0 or sum(mix.values()) <= 0:
        raise ValueError(f"mix: got {dict(mix)}, wanted shares >= 0 of {', '.join(FAMILIES)}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1  # fits an int32
