"""Retrievers: anything that turns a query into passages.

A retriever that fails raises `EnvLost` (the world is broken: the episode is not scored). A tool that fails *inside the
story* raises `ToolError`, which the world turns into text that the policy reads.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from envs.base import EnvLost
from envs.search.corpus import Passage
from envs.search.index import SearchIndex
from envs.search.splits import SPLITS


class Retriever(Protocol):
    def search(self, query: str, k: int) -> list[Passage]: ...


class ToolError(Exception):
    """A tool call that failed in a way the policy is told of and can act on."""

    def __init__(self, kind: Literal["error", "timeout"]) -> None:
        super().__init__(kind)
        self.kind = kind


class TantivyRetriever:
    """The local index, restricted to the passages that tasks of `split` may see. Shared by threads."""

    def __init__(self, index: SearchIndex, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split: got {split!r}, want one of {', '.join(SPLITS)}")
        self._index = index
        # Each split sees what those before it see: nothing held out is found while training. None filters nothing.
        self._splits = None if split == SPLITS[-1] else SPLITS[: SPLITS.index(split) + 1]

    def search(self, query: str, k: int = 3) -> list[Passage]:
        return self._index.search(query, k, self._splits)


class HttpRetriever:
    """Client of Search-R1's retrieval server (2503.09516, search_r1/search/retrieval_server.py).

    POST `url` with {"queries": [q], "topk": k, "return_scores": true} answers {"result": [[{"document": {"contents":
    "\\"Title\\"\\ntext"}, "score": s}, ...]]}. A server that is down, slow or answers anything else raises EnvLost
    after `retries` more tries, `pause_s`, 2·`pause_s`, ... apart, and at the latest when `budget_s` is spent.

    Args:
        timeout_s: that the server may be silent in one try.
        budget_s: for all tries and pauses of one search. Keep it below the deadline of a world call (rollout.
            call_deadline_s), past which the call counts as hung and its instance is given up.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 10.0, retries: int = 2, pause_s: float = 0.2, budget_s: float = 20.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"retriever url: got {url!r}, want http://host:port/retrieve")
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._pause_s = pause_s
        self._budget_s = budget_s

    def search(self, query: str, k: int = 3) -> list[Passage]:
        body = json.dumps({"queries": [query], "topk": k, "return_scores": True}).encode()
        end, wrong, tries = time.monotonic() + self._budget_s, "", 0
        while tries <= self._retries and time.monotonic() < end:
            tries += 1
            try:
                return read_reply(self._post(body, end), k)
            except (OSError, ValueError, http.client.HTTPException) as err:  # refused, timed out, cut; not of the form
                wrong = f"{type(err).__name__}: {err}"
                if isinstance(err, urllib.error.HTTPError):
                    err.close()
            if tries <= self._retries:
                time.sleep(max(0.0, min(self._pause_s * 2 ** (tries - 1), end - time.monotonic())))
        raise EnvLost(
            f"retriever {self._url}: no usable answer in {tries} tries (last: {wrong}); "
            'is the server up, and does it speak {"result": [[{"document": {"contents": ...}}]]}?'
        )

    def _post(self, body: bytes, end: float) -> bytes:
        """The reply's body. Raises TimeoutError at `end` (monotonic s), even if the server still sends, bit by bit."""
        request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=min(self._timeout_s, end - time.monotonic())) as reply:
            parts = []
            while part := reply.read1(1 << 16):
                parts.append(part)
                if time.monotonic() > end:
                    raise TimeoutError(f"still sending after the budget of {self._budget_s} s")
            return b"".join(parts)


def read_reply(body: bytes, k: int) -> list[Passage]:
    """Passages of a retrieval server's reply to one query; ValueError when it has another form."""
    try:
        found = json.loads(body)["result"][0]
        return [_from_document(item["document"] if "document" in item else item) for item in found][:k]
    except (KeyError, IndexError, TypeError, AttributeError) as err:
        raise ValueError(f"reply {body[:120]!r} has not the form of Search-R1's retrieval server ({err!r})") from err


def _from_document(document: dict) -> Passage:
    title, _, text = document["contents"].partition("\n")
    title = title.strip().removeprefix('"').removesuffix('"').strip()
    name = str(document.get("id", title))
    return Passage(passage_id=name, title=title, pages=(text.strip(),), entity=title, source="http", split="test")


FAULTS = ("error", "timeout", "empty", "misleading")


def check_faults(rate: float, kinds: Sequence[str]) -> None:
    """Raises ValueError unless `rate` is a share and `kinds` are some of FAULTS."""
    if not 0 <= rate <= 1:
        raise ValueError(f"flaky rate: got {rate}, want a share in [0, 1]")
    if not kinds or not set(kinds) <= set(FAULTS):
        raise ValueError(f"flaky kinds: got {list(kinds)}, want some of {', '.join(FAULTS)}")


class FlakyRetriever:
    """A seeded share `rate` of the calls fails: each of `kinds`, which are some of FAULTS, as likely.

    A "misleading" call moves the titles of what it found on by one: what stands under the title that was asked for is
    another page. Of a single passage it moves none, and nothing has failed.
    Call number n fails or not by (seed, n) alone, never by time; one object belongs to one episode. `calls` can be set,
    to go on from a snapshot. `misled`: the last call moved titles.
    """

    def __init__(
        self, inner: Retriever, rate: float, seed: int | Iterable[int], kinds: Sequence[str] = FAULTS[:3]
    ) -> None:
        check_faults(rate, kinds)
        self._inner = inner
        self._rate = rate
        self._kinds = tuple(kinds)
        self.misled = False
        self._seed = [abs(int(s)) for s in (seed if isinstance(seed, Iterable) else (seed,))]
        self.calls = 0

    def search(self, query: str, k: int = 3) -> list[Passage]:
        fails, which = np.random.default_rng([*self._seed, self.calls]).random(2)
        self.calls += 1
        self.misled = False
        if fails >= self._rate:
            return self._inner.search(query, k)
        kind = self._kinds[int(which * len(self._kinds))]
        if kind in ("error", "timeout"):
            raise ToolError(kind)
        if kind == "empty":
            return []
        found = self._inner.search(query, k)
        titles = [passage.title for passage in found]
        self.misled = len(set(titles)) > 1
        return [replace(passage, title=title) for passage, title in zip(found, titles[1:] + titles[:1], strict=True)]
