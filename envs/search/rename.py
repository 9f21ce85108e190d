"""The same world under invented names: every title and value that an episode meets is replaced, one for one.

A small policy would rather remember "Peru → Lima" than copy what it reads, and then fails on entities it has never met.
Under invented names there is nothing to remember; what is asked, and how it is found, stays as it was. For training
tasks alone.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from envs.base import Task
from envs.search.corpus import words

_UPPER, _LOWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
_WHOLE = 0.2  # how often a word is a whole real one; else the head of one word and the tail of another
_SECOND_WORD = 0.25


@dataclasses.dataclass(frozen=True)
class Names:
    """What invented names are cut from (words of training titles), and every real title, never to be hit upon."""

    words: tuple[str, ...]
    real: frozenset[tuple[str, ...]]


def names_from(titles: Iterable[str], real: Iterable[str]) -> Names:
    """Raises ValueError where the titles hold no plain word of three letters."""
    plain = dict.fromkeys(word for title in titles for word in title.split() if re.fullmatch(r"[A-Z][a-z]{2,}", word))
    if not plain:
        raise ValueError("rename: got no title with a plain word of three letters, want some to cut names from")
    return Names(tuple(plain), frozenset(map(words, real)))


def invent(texts: Iterable[str], known: dict[str, str], names: Names, seed: int) -> None:
    """Give each of `texts` that is not `known` yet an invention of its own; adds to `known` {real: invented}.

    An invention looks like what it replaces: an internet code, a currency, a number, a symbol, or else a name.
    """
    taken = set(known.values())
    for text in texts:
        if text and text not in known:
            rng = _rng(f"{seed}/{text}")
            while (new := _like(text, names, rng)) in taken or words(new) in names.real:
                pass
            known[text] = new
            taken.add(new)


def swap(text: str, table: Mapping[str, str]) -> str:
    """`text` with each key of `table` that stands by itself replaced by its value, longest keys first, in one pass."""
    return _pattern(tuple(table)).sub(lambda found: table[found[0]], text) if table else text


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


@functools.lru_cache(maxsize=4096)
def _pattern(texts: tuple[str, ...]) -> re.Pattern:
    longest_first = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    return re.compile(rf"(?<![\w.])(?:{longest_first})(?!\w)")


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
