"""The search world: think, search, read, open, answer (the protocol of Search-R1, 2503.09516, plus <open>)."""

import dataclasses
import functools
import hashlib
import json
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from envs import dataset
from envs.answers import contains, escape_tags, exact_match, f1, normalize
from envs.base import EnvSpec, Observation, ScriptedPolicy, Step, Task, World
from envs.search import questions, rename, scripted
from envs.search.actions import PROTOCOLS, Malformed, as_calls, document_number
from envs.search.corpus import Passage
from envs.search.index import SearchIndex, build_index, fingerprint
from envs.search.retrieve import (
    FAULTS,
    FlakyRetriever,
    HttpRetriever,
    Retriever,
    TantivyRetriever,
    ToolError,
    check_faults,
)
from envs.search.scripted import read_fields
from envs.search.splits import SPLITS, visible

_MILESTONES = ("found", "gold", "evidence")
_FAILED = {"error": "The search engine failed. Try again.", "timeout": "The search timed out. Try again."}


@dataclasses.dataclass
class _Episode:
    """All that an episode is, in JSON's own types: a snapshot is exactly this."""

    task: dict[str, Any]
    docs: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )  # {id, title, pages, at}: `at` is the page shown last
    queries: list[str] = dataclasses.field(default_factory=list)  # normalised, in order
    evidence: list[int] = dataclasses.field(default_factory=list)  # chain links whose passage was shown
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)  # real name -> invented; empty in the real world
    well_formed: list[bool] = dataclasses.field(default_factory=list)  # of each turn
    milestones: dict[str, int | None] = dataclasses.field(default_factory=lambda: dict.fromkeys(_MILESTONES))
    calls: int = 0  # of the retriever: they address its flakiness
    failed_before: bool = False  # the last search met a fork
    done: bool = False
    gold_retrieved: bool = False
    exact_match: bool = False
    f1: float = 0.0
    answer: str | None = None
    searches: int = 0
    opens: int = 0
    malformed: int = 0
    empty_results: int = 0
    tool_errors: int = 0
    timeouts: int = 0
    misled: int = 0
    recovered: int = 0
    repeated: int = 0


_COUNTED = (
    *("searches", "opens", "malformed", "empty_results", "tool_errors", "timeouts", "misled", "recovered", "repeated"),
)


class SearchEnv:
    """One episode at a time over retrievers that many instances may share.

    Facts, at every step: success, exact_match, gold_retrieved (bool); f1, evidence_frac in [0, 1] (NaN: the task names
    no evidence), unsupported (1: the answer is in nothing that was shown; NaN without one); searches, opens, malformed,
    empty_results, tool_errors (of which timeouts), misled, recovered, repeated (counts); calls (how often each tool was
    called); answer (str or None); well_formed (a bool for each turn: one think block, one action, white space alone
    around them); milestones ({name: the turn from 0 that reached it, or None}: a search "found" something, a "gold"
    answer was shown, all the "evidence" was). A search that failed, found nothing or misled by its titles is a fork:
    `forks` counts them, `recovered` the searches that found something right after one, and success_after_fork is
    success as 0 or 1 where the episode met a fork, else NaN. The world ends only with an answer; the rollout worker
    enforces `spec.max_turns`.

    Args:
        retrievers: by split of the task.
        k: passages per search.
        max_words: of passage text in one observation; each passage has an equal share, a longer page is shown in parts.
        names: what invented names are made of, for tasks that are asked under them.
        protocol: how a policy acts: "tags" (<search> ... </search>), or "json" (tool calls, see envs/tool_calls.py).
        flaky_rate, flaky_seed, flaky_kinds: see FlakyRetriever; faults are addressed by (flaky_seed, task.seed, number
            of the call).
    """

    def __init__(
        self,
        retrievers: Mapping[str, Retriever],
        *,
        k: int = 3,
        max_turns: int = 6,
        max_words: int = 120,
        flaky_rate: float = 0.0,
        flaky_seed: int = 0,
        flaky_kinds: Sequence[str] = FAULTS[:3],
        names: rename.Names | None = None,
        protocol: str = "tags",
    ) -> None:
        if k < 1 or max_turns < 1 or max_words < k:
            raise ValueError(
                f"got k={k}, max_turns={max_turns}, max_words={max_words}; want k, max_turns >= 1, max_words >= k"
            )
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol: got {protocol!r}, want one of {', '.join(PROTOCOLS)}")
        self._protocol = PROTOCOLS[protocol]
        self.spec = EnvSpec("search", self._protocol.stop, max_turns, self._protocol.tools)
        self._retrievers: Mapping[str, Retriever] = retrievers
        self._k = k
        self._page_words = max_words // k
        self._names = names
        self._flaky = (flaky_rate, flaky_seed, flaky_kinds)
        self._episode: _Episode | None = None
        self._retriever: Retriever | None = None

    def reset(self, task: Task) -> Observation:
        """Begin `task`. The observation is empty: the prompt is the task's own."""
        self._begin(_Episode(task=_task_record(task), renamed=dict(task.data.get("renamed", {}))))
        exact_match(None, task.data["answers"])  # a task with a blank answer fails here, not at its end
        return Observation("")

    def _begin(self, episode: _Episode) -> None:
        split, seed = episode.task["split"], episode.task["seed"]
        if split not in self._retrievers:
            raise ValueError(f"task split: got {split!r}, want one of {sorted(self._retrievers)}")
        self._episode, self._retriever = episode, self._retrievers[split]
        rate, flaky_seed, kinds = self._flaky
        if rate:
            self._retriever = FlakyRetriever(self._retriever, rate, (flaky_seed, seed), kinds)
            self._retriever.calls = episode.calls

    def step(self, action: str) -> Step:
        """Do the one action in `action`; anything malformed costs the turn and is answered with what was wrong."""
        episode = self._running()
        if episode.done:
            raise RuntimeError("the episode is over; call reset(task) before the next step")
        try:
            parsed = self._protocol.parse(action)
        except Malformed as wrong:
            episode.malformed += 1
            episode.well_formed.append(False)
            return self._report(f"Malformed: {wrong}. Write {self._protocol.forms}.")
        episode.well_formed.append(self._protocol.in_order(action))
        if parsed.kind == "answer":
            golds = episode.task["data"]["answers"]
            episode.answer, episode.done = parsed.argument, True
            episode.exact_match, episode.f1 = exact_match(parsed.argument, golds), f1(parsed.argument, golds)
            return self._report("")
        text = self._search(parsed.argument) if parsed.kind == "search" else self._open(parsed.argument)
        return self._report(f"<information>\n{text}\n</information>")

    def _search(self, query: str) -> str:
        episode = self._running()
        episode.searches += 1
        key = normalize(query)
        episode.repeated += key in episode.queries
        episode.queries.append(key)
        episode.calls += 1
        failed_before, episode.failed_before = episode.failed_before, True
        try:
            found = self._retriever.search(self._real(query), self._k)
        except ToolError as err:
            episode.tool_errors += 1
            episode.timeouts += err.kind == "timeout"
            return _FAILED[err.kind]
        if not found:
            episode.empty_results += 1
            return "No results. Try other words."
        episode.failed_before = isinstance(self._retriever, FlakyRetriever) and self._retriever.misled
        episode.misled += episode.failed_before
        episode.recovered += failed_before and not episode.failed_before
        first = len(episode.docs)
        episode.docs += [self._document(passage) for passage in found]
        return "\n".join(self._show(j, 0) for j in range(first, len(episode.docs)))

    def _document(self, passage: Passage) -> dict[str, Any]:
        title, pages = _disarmed(self._invented(passage), self._page_words)
        key = passage.title if passage.source == "http" else passage.passage_id  # a foreign index has ids of its own
        field = "title" if passage.source == "http" else "passage_id"
        chain = self._running().task["data"].get("chain", ())
        links = [i for i, link in enumerate(chain) if link[field] == key]
        return {"title": title, "pages": list(pages), "at": 0, "links": links}

    def _invented(self, passage: Passage) -> Passage:
        """`passage` under this episode's names; as it is in an episode of the real world."""
        table = self._running().renamed
        if not table:
            return passage
        rename.invent((passage.title, *_values(passage)), table, self._names, self._running().task["seed"])
        pages = tuple(rename.swap(page, table) for page in passage.pages)
        return dataclasses.replace(passage, title=table[passage.title], pages=pages)

    def _real(self, query: str) -> str:
        return rename.swap(query, {invented: real for real, invented in self._running().renamed.items()})

    def _open(self, argument: str) -> str:
        docs = self._running().docs
        self._running().opens += 1
        number = document_number(argument)
        if not docs:
            return "No document to open. Search first."
        if number is None or not 1 <= number <= len(docs):
            return f"No such document. Open a number from 1 to {len(docs)}."
        doc = docs[number - 1]
        if doc["at"] + 1 >= len(doc["pages"]):
            return f"Doc {number} has no more pages."
        return self._show(number - 1, doc["at"] + 1)

    def _show(self, index: int, page: int) -> str:
        """One line of information: page `page` of document `index`; counts as read from here on."""
        episode = self._running()
        doc = episode.docs[index]
        doc["at"] = page
        text = doc["pages"][page]
        golds = episode.task["data"]["answers"]
        episode.gold_retrieved = episode.gold_retrieved or contains(text, golds) or contains(doc["title"], golds)
        episode.evidence += [link for link in doc["links"] if link not in episode.evidence]
        return f"Doc {index + 1}(Title: {doc['title']}) {text}"

    def _report(self, text: str) -> Step:
        episode = self._running()
        chain = episode.task["data"].get("chain", ())
        whole = 0 < len(chain) == len(episode.evidence)
        forks = episode.empty_results + episode.tool_errors + episode.misled
        for name, reached in zip(_MILESTONES, (episode.docs, episode.gold_retrieved, whole), strict=True):
            if reached and episode.milestones[name] is None:
                episode.milestones[name] = len(episode.well_formed) - 1
        facts = {
            "success": episode.exact_match,
            "exact_match": episode.exact_match,
            "f1": episode.f1,
            "gold_retrieved": episode.gold_retrieved,
            "evidence_frac": len(episode.evidence) / len(chain) if chain else float("nan"),
            "answer": episode.answer,
            "unsupported": self._unsupported(),
            "calls": self._calls(),
            "well_formed": list(episode.well_formed),
            "milestones": dict(episode.milestones),
            "forks": forks,
            "success_after_fork": float(episode.exact_match) if forks else float("nan"),
            **{name: getattr(episode, name) for name in _COUNTED},
        }
        return Step(Observation(text), episode.done, facts)

    def _unsupported(self) -> float:
        """1 if the answer is in nothing that this episode has shown, else 0; NaN without an answer."""
        episode = self._running()
        if episode.answer is None or not normalize(episode.answer):
            return float("nan")
        shown = (text for doc in episode.docs for text in (doc["title"], *doc["pages"][: doc["at"] + 1]))
        return float(not any(contains(text, [episode.answer]) for text in shown))

    def _calls(self) -> dict[str, int]:
        """How often each tool was called; a malformed turn called none."""
        episode = self._running()
        calls = {"search": episode.searches, "open": episode.opens, "answer": int(episode.answer is not None)}
        return calls | {"malformed": episode.malformed}

    def _running(self) -> _Episode:
        if self._episode is None:
            raise RuntimeError("no episode; call reset(task) first")
        return self._episode

    def snapshot(self) -> bytes:
        """The complete state as UTF-8 JSON; `restore` it in any instance over the same corpus."""
        return json.dumps(dataclasses.asdict(self._running()), ensure_ascii=False).encode()

    def restore(self, snapshot: bytes) -> None:
        self._begin(_Episode(**json.loads(snapshot)))

    def close(self) -> None:
        """Let everything go; the shared retrievers stay open for the other instances."""
        self._episode, self._retriever, self._retrievers = None, None, {}


@functools.lru_cache(maxsize=8192)  # the same few passages answer the same few questions
def _disarmed(passage: Passage, size: int) -> tuple[str, tuple[str, ...]]:
    """Title and pages with nothing that could be read as a tag or a line of its own; pages in parts of `size` words."""
    title = " ".join(escape_tags(passage.title).split())
    pages = [escape_tags(page).split() for page in passage.pages]
    parts = [" ".join(words[at : at + size]) for words in pages for at in range(0, len(words), size)]
    return title, tuple(parts) or ("",)


@functools.lru_cache(maxsize=8192)
def _values(passage: Passage) -> tuple[str, ...]:
    return tuple(value for page in passage.pages for _, value in read_fields(page))


def _task_record(task: Task) -> dict[str, Any]:
    """What judging needs of a task; the JSON round trip makes a restored episode equal to a running one."""
    return json.loads(json.dumps({"split": task.split, "seed": task.seed, "data": dict(task.data)}))


SIZES: Mapping[str, int] = MappingProxyType({"train": 12_000, "validation": 600, "test": 1_200})


def make_world(
    *,
    data_dir: str = "data/search",
    k: int = 3,
    max_turns: int = 6,
    max_words: int = 120,
    url: str | None = None,
    flaky_rate: float = 0.0,
    flaky_seed: int = 0,
    flaky_kinds: Sequence[str] = FAULTS[:3],
    instruction: str = "",
    sizes: Mapping[str, int | None] = SIZES,
    mix: Mapping[str, float] = questions.MIX,
    seed: int = 0,
    demonstrations: Mapping[str, Any] = MappingProxyType({}),
    renamed_frac: float = 0.0,
    protocol: str = "tags",
) -> World:
    """The search world over the shipped corpus. Cheap: index and tasks are built in `data_dir` on first use.

    Args:
        url: of a server that speaks Search-R1's retriever protocol; None searches the local index.
        instruction: put before each question as it stands.
        sizes: tasks drawn for each split; None takes every question that can be asked, once, and writes no dataset.
        mix, seed: see `questions.draw_tasks`.
        demonstrations: keyword arguments of `scripted.demonstrator`.
        renamed_frac: share of the training tasks that are asked under invented names (see rename.py).
        The others: see `SearchEnv`.
    """
    unknown = sorted(set(sizes) - set(SPLITS))
    if unknown:
        raise ValueError(f"sizes: got splits {unknown}, want some of {', '.join(SPLITS)}")
    folder = pathlib.Path(data_dir)
    lock = threading.Lock()  # many environment threads may be first
    opened: dict[str, Any] = {}

    def retrievers() -> Mapping[str, Retriever]:
        with lock:
            if "retrievers" not in opened:
                opened["retrievers"] = dict.fromkeys(SPLITS, HttpRetriever(url)) if url else _open_index(folder)
            return opened["retrievers"]

    def make_env() -> SearchEnv:
        flaky = {"flaky_rate": flaky_rate, "flaky_seed": flaky_seed, "flaky_kinds": flaky_kinds}
        names = _names() if renamed_frac else None
        return SearchEnv(
            retrievers(), k=k, max_turns=max_turns, max_words=max_words, names=names, protocol=protocol, **flaky
        )

    def tasks(split: str) -> Sequence[Task]:
        if split not in sizes:
            raise ValueError(f"split: got {split!r}, want one of {', '.join(sizes)}")
        with lock:
            if split not in opened:
                how = {"instruction": instruction, "mix": dict(mix), "seed": seed}
                opened[split] = _open_tasks(folder, split, sizes, how)
                if split == "train" and renamed_frac:
                    opened[split] = rename.RenamedTasks(opened[split], renamed_frac, _names())
            return opened[split]

    if not 0 <= renamed_frac <= 1 or (renamed_frac and url):
        raise ValueError(
            f"renamed_frac: got {renamed_frac} with url={url!r}, want a share in [0, 1], and the local index"
        )
    SearchEnv(
        {}, k=k, max_turns=max_turns, max_words=max_words, protocol=protocol
    )  # bad options end here, not in a worker thread
    check_faults(flaky_rate, flaky_kinds)
    if url:
        HttpRetriever(url)
    demonstrate = functools.partial(scripted.demonstrator, **demonstrations)
    by = {
        "version": scripted.VERSION,
        "names": rename.VERSION,
        **(scripted.demonstrator.__kwdefaults__ or {}),
        **demonstrations,
    }
    if protocol == "tags":
        return World("search", make_env, tasks, scripted.POLICIES, _texts, demonstrate, by, hint=scripted.hint)
    policies = {name: _in_calls(policy) for name, policy in scripted.POLICIES.items()}
    by = {**by, "protocol": protocol}
    return World("search", make_env, tasks, policies, _texts, _in_calls(demonstrate), by, hint=scripted.hint)


def variants(options: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Sequence[str]]]:
    """(options, splits): every question there is, once; then those of the training split, under invented names.

    Whoever sets `sizes` has those instead of every question; whoever sets `renamed_frac`, or the `url` of an index that
    holds real names alone, has just that one form.
    """
    every = {"sizes": dict.fromkeys(SPLITS), **options}
    plain = [(every, [split for split in SPLITS if split in every["sizes"]])]
    if "renamed_frac" in options or options.get("url") or "train" not in every["sizes"]:
        return plain
    return [*plain, ({**every, "renamed_frac": 1.0}, ["train"])]


def _texts() -> Iterator[str]:
    """What training can show, of the training split alone: first pages as a search shows them, and many questions."""
    for passage in visible(questions.load().corpus.passages, "train"):
        yield f"<information>\nDoc 1(Title: {passage.title}) {passage.pages[0]}\n</information>"
    for task in questions.draw_tasks("train", 3000, 0, questions.MIX):
        yield task.prompt[-1].content


def _in_calls(policy: Callable[..., ScriptedPolicy]) -> Callable[..., ScriptedPolicy]:
    """The scripted policy that does the same in JSON tool calls."""

    def made(*task: Any) -> ScriptedPolicy:
        act = policy(*task)
        return lambda observations: as_calls(act(observations))

    return made


@functools.cache
def _names() -> rename.Names:
    corpus = questions.load().corpus
    titles = (passage.title for passage in visible(corpus.passages, "train"))
    held_out = (name for later in SPLITS[1:] for name in corpus.names[later])
    return rename.names_from(titles, corpus.names["train"], held_out)


def _open_index(folder: pathlib.Path) -> dict[str, Retriever]:
    index = SearchIndex(build_index(questions.load().corpus.passages, folder / "index"))
    return {split: TantivyRetriever(index, split) for split in SPLITS}


def _open_tasks(
    folder: pathlib.Path, split: str, sizes: Mapping[str, int | None], how: Mapping[str, Any]
) -> Sequence[Task]:
    n = sizes[split]
    if n is None:
        return questions.all_tasks(split, instruction=how["instruction"])
    made_by = {**how, "split": split, "n": n, "corpus": fingerprint(questions.load().corpus.passages)}
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:12]
    name = f"search_{split}_{digest}"  # other options, another dataset: none is overwritten
    if not dataset.is_built(folder, name):
        drawn = questions.draw_tasks(split, n, how["seed"], how["mix"], instruction=how["instruction"])
        dataset.build_tasks({split: drawn}, folder, name=name, options=made_by)
    return dataset.read_tasks(folder, split, name=name, options=made_by)
