"""The same world under invented names: every title and value that an episode meets is replaced, one for one.

A small policy would rather remember "Peru → Lima" than copy what it reads, and then fails on entities it has never met.
Under invented names there is nothing to remember; what is asked, and how it is found, stays as it was. For training
tasks alone, and still without a held-out name: no word of an invention is a word of one, so none can stand in an
invention, nor begin or end in one.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from envs.base import Task
from envs.search.corpus import words
from envs.search.splits import Name

VERSION = 2  # of how names are invented: raise it when others would be, and demonstrations are made anew
_UPPER, _LOWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
_WHOLE = 0.2  # how often a word is a whole real one; else the head of one word and the tail of another
_SECOND_WORD = 0.25
_DRAWS = 100  # without success, before an invention becomes longer by a character


@dataclasses.dataclass(frozen=True)
class Names:
    """What invented names are cut from, and what they must never hit upon, folded as `corpus.words` does."""

    words: tuple[str, ...]  # of training titles, as they are written
    real: frozenset[Name]  # names of the training split: an invention may contain one, but not be one
    held_out: frozenset[str]  # every word of a name of a later split: in no invention


def names_from(titles: Iterable[str], real: Iterable[Name], held_out: Iterable[Name]) -> Names:
    """Names cut from `titles` that keep clear of `real` and `held_out` names.

    Raises ValueError where the titles hold no plain word of three letters.
    """
    plain = dict.fromkeys(word for title in titles for word in title.split() if re.fullmatch(r"[A-Z][a-z]{2,}", word))
    if not plain:
        raise ValueError("rename: got no title with a plain word of three letters, want some to cut names from")
    return Names(tuple(plain), frozenset(real), frozenset(word for name in held_out for word in name))


def invent(texts: Iterable[str], known: dict[str, str], names: Names, seed: int) -> None:
    """Give each of `texts` that is not `known` yet an invention of its own; adds to `known` {real: invented}.

    An invention looks like what it replaces: an internet code, a currency, a number, a symbol, or else a name. Where
    nothing is free of its length (there are few numbers of one digit), it becomes longer.
    """
    taken = set(known.values())
    for text in texts:
        if text and text not in known:
            rng = _rng(f"{seed}/{text}")
            pattern, draws = text, 1
            while (new := _like(pattern, names, rng)) in taken or _is_refused(words(new), names):
                pattern, draws = text + text[-1] * (draws // _DRAWS), draws + 1
            known[text] = new
            taken.add(new)


def swap(text: str, table: Mapping[str, str]) -> str:
    """`text` with each key of `table` that stands by itself replaced by its value, in one pass.

    Of keys that overlap, the one that begins first is replaced, and of those that begin together the longest. A key
    stands by itself where no letter, digit, "_" or "." is right before it, and no letter, digit or "_" right after it.
    """
    # No pattern is compiled: the table grows with every search, so that hardly any pattern would serve twice.
    found = sorted((at, -len(key), key) for key in table if key in text for at in _places(key, text))
    pieces, end = [], 0
    for at, _, key in found:
        if at >= end:
            pieces += (text[end:at], table[key])
            end = at + len(key)
    return "".join((*pieces, text[end:]))


class RenamedTasks(Sequence[Task]):
    """Tasks of which a share, chosen by their ids, is asked under invented names; `data["renamed"]` holds the table."""

    def __init__(self, tasks: Sequence[Task], share: float, names: Names) -> None:
        self._tasks, self._share, self._names = tasks, share, names

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        task = self._tasks[index]
        return renamed(task, self._names) if _rng(f"{task.task_id}/renamed").random() < self._share else task


def renamed(task: Task, names: Names) -> Task:
    """`task` under invented names: its prompt, its answers and its chain."""
    table: dict[str, str] = {}
    chain, answers = task.data["chain"], task.data["answers"]
    texts = [text for link in chain for text in (link["title"], link["value"])]
    invent([*texts, *answers], table, names, task.seed)
    prompt = tuple(dataclasses.replace(message, content=swap(message.content, table)) for message in task.prompt)
    data = dict(task.data) | {
        "chain": [{**link, "title": table[link["title"]], "value": table[link["value"]]} for link in chain],
        "answers": [table[answer] for answer in answers],
        "subject": swap(task.data["subject"], table),
        "renamed": table,
    }
    return dataclasses.replace(task, task_id=f"{task.task_id}~", prompt=prompt, data=data)


def _places(key: str, text: str) -> Iterator[int]:
    at = text.find(key)
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(key) : at + len(key) + 1]
        if not (before == "." or _is_of_word(before) or _is_of_word(after)):
            yield at
        at = text.find(key, at + 1)


def _is_of_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _is_refused(new: Name, names: Names) -> bool:
    return new in names.real or not names.held_out.isdisjoint(new)


def _rng(text: str) -> np.random.Generator:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def _like(text: str, names: Names, rng: np.random.Generator) -> str:
    if re.fullmatch(r"\.[a-z]{2,3}", text):
        return "." + _letters(_LOWER, len(text) - 1, rng)
    if re.fullmatch(r"[A-Z]{3}", text):
        return _letters(_UPPER, 3, rng)
    if re.fullmatch(r"\+?\d[\d-]*", text):
        return re.sub(r"\d", lambda _: str(rng.integers(10)), text)
    if re.fullmatch(r"[A-Z][a-z]?", text):
        return _letters(_UPPER, 1, rng) + _letters(_LOWER, len(text) - 1, rng)
    return f"{_word(names, rng)} {_word(names, rng)}" if rng.random() < _SECOND_WORD else _word(names, rng)


def _word(names: Names, rng: np.random.Generator) -> str:
    first, other = (names.words[int(rng.integers(len(names.words)))] for _ in range(2))
    if rng.random() < _WHOLE:
        return first
    return first[: int(rng.integers(2, len(first)))] + other[int(rng.integers(1, len(other) - 1)) :]


def _letters(alphabet: str, n: int, rng: np.random.Generator) -> str:
    return "".join(alphabet[int(i)] for i in rng.integers(len(alphabet), size=n))
