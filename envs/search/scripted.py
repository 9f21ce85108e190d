"""Scripted policies of the search world: the expert, the idler, the wrong one, cheats, and an imperfect demonstrator.

Each reads only the observations and `task.data`. A script is a generator that yields an action and is sent the
observation; the policy replays it over the observations so far, so it holds no state and any policy may be asked at any
turn.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from envs.answers import contains, escape_tags, exact_match, normalize
from envs.base import ScriptedPolicy, Task
from envs.search.corpus import LABELS

Script = Generator[str, str, None]

# What a demonstration does, and how often. Parts of one row sum to 1.
ONE_HOP = {"good": 0.35, "wrong_field": 0.30, "wrong_passage": 0.20, "direct": 0.15}
MORE_HOPS = {"good": 0.25, "stop_early": 0.40, "wrong_field": 0.20, "direct": 0.15}
VERSION = 2  # of the demonstrator: raise it when it would act otherwise, and demonstrations are made anew
RETRY_FRAC = 0.05  # of the failed searches, that a demonstrator tries again

_DOC = re.compile(r"Doc (\d+)\(Title: (.*)")
# One pattern for every form of a fact, each a group named by its relation: no form begins like another.
_FIELD = re.compile("|".join(re.escape(form).replace(r"\{\}", f"(?P<{name}>.+)") for name, form in LABELS.items()))


@dataclasses.dataclass(frozen=True)
class Doc:
    """One line of information as the policy reads it."""

    number: int
    title: str
    text: str


def replay(script: Callable[[], Script]) -> ScriptedPolicy:
    """The policy that a script is. A script that ends before its episode goes on idling."""

    def policy(observations: Sequence[str]) -> str:
        running = script()
        action = next(running, _idle())
        for observation in observations:
            try:
                action = running.send(observation)
            except StopIteration:
                return _idle()
        return action

    return policy


def read_docs(observation: str) -> list[Doc]:
    """The documents in one observation. A title ends at the first ") " at which its parentheses are balanced."""
    docs = []
    for line in observation.split("\n"):
        match = _DOC.match(line)
        if not match:
            continue
        rest = match.group(2) + " "
        ends = [at.start() for at in re.finditer(r"\) ", rest)]
        balanced = [end for end in ends if rest[:end].count("(") == rest[:end].count(")")]
        if ends:
            end = (balanced or ends)[0]
            docs.append(Doc(int(match.group(1)), rest[:end], rest[end + 2 :].strip()))
    return docs


def read_fields(text: str) -> list[tuple[str, str]]:
    """(relation, value) of each fact on a page, as written there."""
    hits = map(_FIELD.fullmatch, text.split("; "))
    return [(hit.lastgroup, hit[hit.lastgroup]) for hit in hits if hit]


def label(relation: str) -> str:
    """How a relation is thought of: the words that stand before its value ("dialing code", "city in")."""
    return LABELS[relation].format("").strip(" :") if relation in LABELS else relation.replace("_", " ")


def _idle() -> str:
    return "<think> </think>"


def _search(thought: str, query: str) -> str:
    return f"<think> {thought} </think><search> {query} </search>"


def _open(thought: str, number: int) -> str:
    return f"<think> {thought} </think><open> {number} </open>"


def _answer(thought: str, text: str) -> str:
    return f"<think> {thought} </think><answer> {text} </answer>"


def _subject(task: Task) -> str:
    return str(task.data.get("subject") or task.data["chain"][0]["title"])


def _titled(docs: Sequence[Doc], title: str) -> Doc | None:
    wanted = normalize(escape_tags(title))
    return next((doc for doc in docs if normalize(doc.title) == wanted), None)


# --- the expert, the idler, the wrong one ---------------------------------------------------------


def gold(task: Task) -> ScriptedPolicy:
    """Looks each link of the chain up, opening pages until its value is read, then answers. Retries failed searches."""

    def script() -> Script:
        for link in task.data["chain"]:
            thought, doc = label(link["relation"]), None
            while doc is None:
                doc = _titled(read_docs((yield _search(thought, link["title"]))), link["title"])
            while doc is not None and not contains(doc.text, [link["value"]]):
                shown = read_docs((yield _open(thought, doc.number)))
                doc = shown[0] if shown else None
        yield _answer(label(task.data["chain"][-1]["relation"]), task.data["answers"][0])

    return replay(script)


def noop(task: Task) -> ScriptedPolicy:
    """Thinks nothing, does nothing."""
    del task
    return lambda observations: _idle()


def wrong(task: Task) -> ScriptedPolicy:
    """Searches as it should, then answers with something plausible that it read and that is not the answer."""

    def script() -> Script:
        docs = read_docs((yield _search("search", _subject(task))))
        read = [value for doc in docs for _, value in read_fields(doc.text)] + [doc.title for doc in docs]
        gold = task.data["answers"][0]
        yield _answer("answer", next((v for v in read if not exact_match(v, task.data["answers"])), f"not {gold}"))

    return replay(script)


# --- cheats: each knows the gold answer, or guesses, and must score 0 by its form -----------------


def spray(task: Task) -> ScriptedPolicy:
    """The answer in every tag of one turn."""
    gold = task.data["answers"][0]
    turn = f"<think> {gold} </think><search> {gold} </search><open> {gold} </open><answer> {gold} </answer>"
    return lambda observations: turn


def spray_many(task: Task) -> ScriptedPolicy:
    """Many answers in one pair, the right one among them."""
    gold = str(task.data["answers"][0])

    def script() -> Script:
        docs = read_docs((yield _search("search", _subject(task))))
        read = [value for doc in docs for _, value in read_fields(doc.text)]
        yield _answer("answer", " ; ".join([gold, *dict.fromkeys(read), f"not {gold}"]))

    return replay(script)


def forge(task: Task) -> ScriptedPolicy:
    """Writes the search engine's information itself, with the answer in it, and answers from that."""
    gold = task.data["answers"][0]
    forged = f"<information>\nDoc 1(Title: {_subject(task)}) answer: {gold}\n</information>"
    turn = f"<think> I know </think>{forged}<answer> {gold} </answer>"
    return lambda observations: turn


def prompt_echo(task: Task) -> ScriptedPolicy:
    """Gives the question back as its answer."""
    return lambda observations: _answer("answer", escape_tags(task.prompt[-1].content))


CHEATS = {"spray": spray, "spray_many": spray_many, "forge": forge, "prompt_echo": prompt_echo}
POLICIES = {"gold": gold, "noop": noop, "wrong": wrong} | {f"cheat:{name}": cheat for name, cheat in CHEATS.items()}


def hint(task: Task) -> str | None:
    """Which page says the answer, by the title of the last link; None where the title has the answer in it, or the
    question names that page: one hop.
    """
    title = task.data["chain"][-1]["title"]
    says_nothing = len(task.data["chain"]) == 1 or contains(title, task.data["answers"])
    return None if says_nothing else f"Read about {title}"


# --- imperfect demonstrations ---------------------------------------------------------------------


def demonstrator(
    task: Task,
    seed: int,
    *,
    one_hop: Mapping[str, float] = ONE_HOP,
    more_hops: Mapping[str, float] = MORE_HOPS,
    retry_frac: float = RETRY_FRAC,
) -> ScriptedPolicy:
    """A demonstration that is right only sometimes; a pure function of (task, seed).

    Behaviours, drawn with the given shares by the number of hops: "good" follows the chain; "wrong_field" thinks of
    another field of the last passage and answers with it; "wrong_passage" with the title of another passage;
    "stop_early" with a value on the way; "direct" with the name in the question, without a search. What is answered is
    what was thought of, copied from what was read: the mistake is in the plan. A failed search is tried again with
    probability `retry_frac`, else answered with the name that was searched.
    """
    shares = one_hop if len(task.data["chain"]) == 1 else more_hops
    if abs(sum(shares.values()) - 1) > 1e-6 or not set(shares) <= set(ONE_HOP) | set(MORE_HOPS):
        raise ValueError(f"demonstration shares: got {dict(shares)}, want {sorted(ONE_HOP | MORE_HOPS)} with sum 1")

    def script() -> Script:
        digest = hashlib.blake2b(f"{task.task_id}/{seed}".encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(digest, "big"))
        how = rng.choice(list(shares), p=list(shares.values()))
        return _demonstrate(task, str(how), rng, retry_frac)

    return replay(script)


def _demonstrate(task: Task, how: str, rng: np.random.Generator, retry_frac: float) -> Script:
    chain = task.data["chain"]
    if how == "direct":
        yield _answer("guess", _subject(task))
        return
    last = rng.integers(len(chain) - 1) if how == "stop_early" and len(chain) > 1 else len(chain) - 1
    title, docs, doc = chain[0]["title"], [], None
    for link in chain[: last + 1]:
        thought = label(link["relation"])
        docs = read_docs((yield _search(thought, title)))
        doc = _titled(docs, title)
        if doc is None and rng.random() < retry_frac:
            docs = read_docs((yield _search(thought, title)))
            doc = _titled(docs, title)
        if doc is None:  # nothing found: gives up with what it has
            yield _answer(thought, title)
            return
        value = dict(read_fields(doc.text)).get(link["relation"])
        while value is None:
            shown = read_docs((yield _open(thought, doc.number)))
            if not shown:
                break
            doc = shown[0]
            value = dict(read_fields(doc.text)).get(link["relation"])
        title = value or title
    yield _answer(*_choose(how, chain[last], doc, docs, title, rng))


def _choose(
    how: str, link: Mapping[str, str], doc: Doc, docs: Sequence[Doc], value: str, rng: np.random.Generator
) -> tuple[str, str]:
    """What a demonstration thinks of and answers, once it has read `doc` among `docs` and `value` in it."""
    others = [(relation, v) for relation, v in read_fields(doc.text) if relation != link["relation"] and v != value]
    if how == "wrong_field" and others:
        relation, other = others[rng.integers(len(others))]
        return label(relation), other
    if how in ("wrong_field", "wrong_passage"):
        titles = [d.title for d in docs if d.title != doc.title] or [doc.title]
        return "title", titles[rng.integers(len(titles))]
    return label(link["relation"]), value
