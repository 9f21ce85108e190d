"""Train, validation and test by *entity*: no held-out name occurs in anything that training can show.

The unit is a country with its cities, its capital and the elements that were discovered there. Countries are tied
together when one's longest border leads to the other, or when a name of one contains a name of the other (Guinea in
Papua New Guinea), because pages and questions of the one would then name the other. What still crosses (a city York
beside a city New York, a sentence on a neighbour) is left out of the corpus.
"""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from envs.search.corpus import Entry, Fact, Passage, render, words

SPLITS = ("train", "validation", "test")  # each sees the passages of those before it, and no others

Name = tuple[str, ...]  # words of a name, folded


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Passages and facts that passed the split; `names[split]` are the folded names of that split's entities."""

    passages: tuple[Passage, ...]
    facts: tuple[Fact, ...]
    split_of: Mapping[str, str]  # entity (country code) -> split
    names: Mapping[str, frozenset[Name]]


def visible(passages: Iterable[Passage], split: str) -> list[Passage]:
    """What a search may return in `split`: train sees train, validation sees train and validation, test sees all."""
    if split not in SPLITS:
        raise ValueError(f"split: got {split!r}, wanted one of {', '.join(SPLITS)}")
    seen = SPLITS[: SPLITS.index(split) + 1]
    return [passage for passage in passages if passage.split in seen]


def find_names(text: str, names: Mapping[str, Sequence[Name]]) -> Iterator[Name]:
    """The names that occur in `text`, word by word and whatever their case; `names` as made by `by_first_word`."""
    folded = words(text)
    for start, word in enumerate(folded):
        for name in names.get(word, ()):
            if folded[start : start + len(name)] == name:
                yield name


def by_first_word(names: Iterable[Name]) -> dict[str, list[Name]]:
    """Names grouped for `find_names`."""
    index: dict[str, list[Name]] = defaultdict(list)
    for name in sorted(names):
        index[name[0]].append(name)
    return dict(index)


def components(entries: Sequence[Entry]) -> list[list[str]]:
    """Entities that must share a split, each list sorted; the largest list first.

    Edges: a fact that leads to another entity's passage; a country name that contains another country's, by words.
    """
    parent = {entry.entity: entry.entity for entry in entries}

    def find(entity: str) -> str:
        while parent[entity] != entity:
            parent[entity] = parent[parent[entity]]
            entity = parent[entity]
        return entity

    owner = {entry.passage_id: entry.entity for entry in entries}
    named = [(name, entry.entity) for entry in entries if _is_root(entry) for name in _names(entry)]
    bearers: dict[Name, list[str]] = defaultdict(list)
    for name, entity in named:
        bearers[name].append(entity)
    edges = [(entry.entity, owner[fact.target]) for entry in entries for fact in entry.facts if fact.target in owner]
    edges += [(entity, other) for name, entity in named for part in _parts(name) for other in bearers.get(part, ())]
    for a, b in edges:
        parent[find(a)] = find(b)
    groups: dict[str, list[str]] = defaultdict(list)
    for entity in sorted(parent):
        groups[find(entity)].append(entity)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0]))


def assign(
    groups: Sequence[Sequence[str]], *, seed: int, fractions: Sequence[float] = (0.64, 0.12, 0.24)
) -> dict[str, str]:
    """Entity -> split: largest groups first, equal sizes in an order hashed from `seed`, to the split that lacks most.

    "Lacks most" is the share still open, (wanted - given) / wanted, so that a small split gets its groups in turn. A
    group fits a split if it makes up at most a quarter of it: else one region would be most of the validation set.
    What fits nowhere goes to the largest split.
    """
    if len(fractions) != len(SPLITS) or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-9:
        raise ValueError(f"fractions: got {tuple(fractions)}, wanted {len(SPLITS)} positive numbers with sum 1")
    total = sum(len(group) for group in groups)
    order = sorted(groups, key=lambda group: (-len(group), hashlib.sha256(f"{seed}/{group[0]}".encode()).digest()))
    wanted = {split: total * fraction for split, fraction in zip(SPLITS, fractions, strict=True)}
    given = dict.fromkeys(SPLITS, 0)
    split_of: dict[str, str] = {}
    for group in order:
        room = {split: wanted[split] - given[split] for split in SPLITS}
        fitting = [split for split in SPLITS if len(group) <= min(room[split] + 1, max(1, wanted[split] / 4))]
        split = max(fitting or [max(SPLITS, key=wanted.__getitem__)], key=lambda split: room[split] / wanted[split])
        given[split] += len(group)
        split_of.update(dict.fromkeys(group, split))
    return split_of


def separate(entries: Sequence[Entry], split_of: Mapping[str, str], *, reserved: Iterable[str] = ()) -> Corpus:
    """Leave out whatever would name an entity of another split, and render the rest.

    Left out: a city or element whose name contains, or is contained in, a name of another split; one whose name
    consists of `reserved` words (those of the question phrasings: a town called Of); a fact whose value, and a sentence
    which, names an entity of a later split. A country always stays.
    """
    reserved = {word for text in reserved for word in words(text)}
    entries = [entry for entry in entries if _is_root(entry) or not reserved.issuperset(words(entry.title))]
    entries = _without_crossing(entries, split_of)
    names: dict[str, set[Name]] = {split: set() for split in SPLITS}
    for entry in entries:
        names[split_of[entry.entity]].update(_names(entry))
    hidden = {
        split: by_first_word(name for later in SPLITS[rank + 1 :] for name in names[later])
        for rank, split in enumerate(SPLITS)
    }
    known = {entry.passage_id for entry in entries}
    passages, facts = [], []
    for entry in entries:
        split = split_of[entry.entity]
        index = hidden[split]
        kept = tuple(fact for fact in entry.facts if not any(find_names(fact.value, index)))
        prose = tuple(sentence for sentence in entry.prose if not any(find_names(sentence, index)))
        passage = render(dataclasses.replace(entry, facts=kept, prose=prose), split=split)
        if any(name for page in passage.pages for name in find_names(page, index)):  # across the join of two sentences
            passage = render(dataclasses.replace(entry, facts=kept, prose=()), split=split)
        passages.append(passage)
        facts += [fact if fact.target in known else dataclasses.replace(fact, target="") for fact in kept]
    frozen = {split: frozenset(group) for split, group in names.items()}
    return Corpus(tuple(passages), tuple(facts), dict(split_of), frozen)


def _without_crossing(entries: Sequence[Entry], split_of: Mapping[str, str]) -> list[Entry]:
    bearers: dict[Name, list[Entry]] = defaultdict(list)
    for entry in entries:
        for name in _names(entry):
            bearers[name].append(entry)
    dropped: set[str] = set()
    for entry in entries:
        for name in _names(entry):
            for part in _parts(name):
                for other in bearers.get(part, ()):
                    if split_of[entry.entity] != split_of[other.entity]:
                        dropped |= {one.passage_id for one in (entry, other) if not _is_root(one)}
    return [entry for entry in entries if entry.passage_id not in dropped]


def _is_root(entry: Entry) -> bool:
    return entry.passage_id == f"country/{entry.entity}"


def _names(entry: Entry) -> list[Name]:
    return [name for name in dict.fromkeys(map(words, (entry.title, *entry.aliases))) if name]


def _parts(name: Name) -> list[Name]:
    return [name[i:j] for i in range(len(name)) for j in range(i + 1, len(name) + 1)]
