"""Demonstrations about entities that do not exist: every name and value is replaced by an invented one.

A small policy would rather remember "Peru → Lima" than copy what it reads, and then fails on entities it has never met. Under
invented names there is nothing to remember. What a demonstration *does* is unchanged, right or wrong.
"""

import dataclasses
import re
from collections.abc import Collection, Sequence

import numpy as np

from envs.dataset import Demonstration
from envs.search.scripted import read_docs, read_fields

_UPPER, _LOWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
_MORE = (0.25, 0.35, 0.25, 0.15)  # how often a word has 0, 1, 2, 3 pieces after its first
_SECOND_WORD = 0.25


@dataclasses.dataclass(frozen=True)
class Names:
    """What invented names are made of: pieces that begin a word, pieces that go on, and real names never to hit upon."""

    starts: tuple[str, ...]
    more: tuple[str, ...]
    real: frozenset[str]


def names_from(pieces: Sequence[str], real: Collection[str]) -> Names:
    """Pieces of a tokenizer's vocabulary, so that every token that a name can be made of is met as something to copy."""
    plain = [piece for piece in pieces if piece.strip().isalpha() and piece.isascii()]
    starts = tuple(piece[1:] for piece in plain if piece.startswith(" ") and piece[1:].isalpha())
    more = tuple(piece for piece in plain if piece.isalpha())
    if not starts or not more:
        raise ValueError(
            f"rename: got {len(pieces)} pieces, of which {len(starts)} begin and {len(more)} go on a word; want some of each"
        )
    return Names(starts, more, frozenset(real))


def rename(demo: Demonstration, names: Names, rng: np.random.Generator) -> Demonstration:
    """`demo` with each title and value that it shows replaced, one for one, in prompt, actions, observations and task data."""
    shown = [
        text
        for _, observation in demo.steps
        for doc in read_docs(observation)
        for text in (doc.title, *(value for _, value in read_fields(doc.text)))
    ]
    chain = demo.task.data["chain"]
    shown += [text for link in chain for text in (link["title"], link["value"])]
    invented = {text: _like(text, names, rng) for text in dict.fromkeys(shown) if text}
    longest_first = "|".join(re.escape(text) for text in sorted(invented, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.])(?:{longest_first})(?!\w)")

    def swap(text: str) -> str:
        return pattern.sub(lambda found: invented[found[0]], text)

    data = dict(demo.task.data)
    data["chain"] = [{**link, "title": swap(link["title"]), "value": swap(link["value"])} for link in chain]
    data["answers"] = [swap(answer) for answer in data["answers"]]
    prompt = tuple(dataclasses.replace(message, content=swap(message.content)) for message in demo.task.prompt)
    steps = tuple((swap(action), swap(observation)) for action, observation in demo.steps)
    return dataclasses.replace(demo, task=dataclasses.replace(demo.task, prompt=prompt, data=data), steps=steps)


def _like(text: str, names: Names, rng: np.random.Generator) -> str:
    """An invention that looks like `text`: an internet code, a currency, a number, a symbol, or else a name."""
    if re.fullmatch(r"\.[a-z]{2,3}", text):
        return "." + _letters(_LOWER, len(text) - 1, rng)
    if re.fullmatch(r"[A-Z]{3}", text):
        return _letters(_UPPER, 3, rng)
    if re.fullmatch(r"\+?[\d-]+", text):
        return re.sub(r"\d", lambda _: str(rng.integers(10)), text)
    if re.fullmatch(r"[A-Z][a-z]?", text):
        return _letters(_UPPER, 1, rng) + _letters(_LOWER, len(text) - 1, rng)
    while (name := _name(names, rng)) in names.real:
        pass
    return name


def _name(names: Names, rng: np.random.Generator) -> str:
    n = rng.choice(len(_MORE), p=_MORE)
    word = _pick(names.starts, rng) + "".join(_pick(names.more, rng) for _ in range(n))
    return f"{word} {_pick(names.starts, rng)}" if rng.random() < _SECOND_WORD else word


def _pick(pieces: Sequence[str], rng: np.random.Generator) -> str:
    return pieces[int(rng.integers(len(pieces)))]


def _letters(alphabet: str, n: int, rng: np.random.Generator) -> str:
    return "".join(_pick(alphabet, rng) for _ in range(n))
