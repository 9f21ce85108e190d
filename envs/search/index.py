"""A full-text index in a folder: built once, atomically, then memory-mapped by any number of processes and threads."""

import dataclasses
import functools
import hashlib
import json
import shutil
import unicodedata
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import tantivy

from envs.search.corpus import Passage

FORMAT = 1  # raise when the fields or the folding change: old folders are rebuilt
_STAMP = "wayfinder-index.json"
_MAX_WORDS = 32  # of a query; a longer one costs time and finds no more
_TITLE_BOOST = 3.0
_CACHED = 4096  # queries whose passages are kept


def fold(text: str) -> list[str]:
    """Words for matching: letters and digits only, no case, no accents ("São-Tomé!" is "sao tome")."""
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in plain if not unicodedata.combining(c)).casefold()
    return "".join(c if c.isalnum() else " " for c in plain).split()


def fingerprint(passages: Sequence[Passage]) -> str:
    """SHA-256 over the format number and every field of every passage, whatever their order."""
    digest = hashlib.sha256(f"format {FORMAT}".encode())
    for record in sorted(_record(p) for p in passages):
        digest.update(record.encode() + b"\n")
    return digest.hexdigest()


def _record(passage: Passage) -> str:
    return json.dumps(dataclasses.asdict(passage), ensure_ascii=False, sort_keys=True)


def _passage(record: str) -> Passage:
    fields = json.loads(record)
    return Passage(**{**fields, "pages": tuple(fields["pages"])})


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("title", index_option="freq")
    builder.add_text_field("body", index_option="freq")
    for name in ("title_key", "split"):
        builder.add_text_field(name, tokenizer_name="raw", index_option="basic")
    builder.add_bytes_field("record", stored=True)
    return builder.build()


def stored_fingerprint(folder: Path) -> str | None:
    """The fingerprint of the index in `folder`; None if there is none or its stamp is damaged (rebuilt then)."""
    try:
        return json.loads((folder / _STAMP).read_text())["fingerprint"]
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError):
        return None


def build_index(passages: Sequence[Passage], folder: Path | str) -> Path:
    """Index `passages` in `folder`, unless it holds exactly these already. Atomic: a reader never sees half an index.

    Ties in a ranking are broken by `passage_id`: documents are written in that order, into one segment. Raises
    ValueError on passage ids that are not unique.
    """
    folder = Path(folder)
    wanted = fingerprint(passages)
    if stored_fingerprint(folder) == wanted:
        return folder
    ordered = sorted(passages, key=lambda p: p.passage_id)
    for left, right in zip(ordered, ordered[1:], strict=False):
        if left.passage_id == right.passage_id:
            raise ValueError(f"passage_id {left.passage_id!r} is given to two passages; ids must be unique")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        _write(ordered, temporary)
        (temporary / _STAMP).write_text(json.dumps({"fingerprint": wanted, "passages": len(ordered)}))
        _put_in_place(temporary, folder, wanted)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already, unless something failed
    return folder


def _write(ordered: Sequence[Passage], folder: Path) -> None:
    index = tantivy.Index(_schema(), path=str(folder))
    writer = index.writer(heap_size=512_000_000, num_threads=1)  # one thread, one flush: one segment in our order
    for passage in ordered:
        title = fold(passage.title)
        document = tantivy.Document(
            title=" ".join(title),
            body=" ".join(fold(" ".join(passage.pages))),
            title_key=" ".join(title),
            split=passage.split,
        )
        document.add_bytes("record", _record(passage).encode())
        writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()


def _put_in_place(temporary: Path, folder: Path, wanted: str) -> None:
    for _ in range(8):
        try:
            temporary.rename(folder)  # replaces nothing but an empty folder
            return
        except OSError:
            if stored_fingerprint(folder) == wanted:
                return  # another process was faster, with the same passages
            old = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
            folder.rename(old)  # whoever has it open keeps its mapped files
            shutil.rmtree(old, ignore_errors=True)
    raise OSError(
        f"could not move the new index to {folder}: another process keeps replacing it; give each corpus its own folder"
    )


class SearchIndex:
    """An open index. One object serves many threads; `close()` lets its files go."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder = Path(folder)
        if stored_fingerprint(folder) is None:
            raise FileNotFoundError(
                f"no index in {folder}; make it with envs.search.index.build_index(passages, folder)"
            )
        try:
            self._index: tantivy.Index | None = tantivy.Index.open(str(folder))
        except (ValueError, OSError) as err:
            raise OSError(
                f"the index in {folder} is damaged ({err}); delete the folder, it is built again on the next run"
            ) from err
        self._index.config_reader("manual", 1)  # the folder never changes under us; no watcher thread
        self._index.reload()
        self._schema = self._index.schema
        self._cached = functools.lru_cache(maxsize=_CACHED)(self._find)  # a group's members ask much the same

    def search(self, query: str, k: int, splits: Iterable[str] | None = None) -> list[Passage]:
        """The k best passages of `splits` (None: all): exact titles first, then BM25, titles boosted; ties by id.

        Punctuation, case and accents of the query do not matter; a query without a letter or digit finds nothing.
        """
        if self._index is None:
            raise RuntimeError("the index is closed; open a new SearchIndex")
        words = tuple(fold(query)[:_MAX_WORDS])
        return list(self._cached(words, k, splits if splits is None else tuple(splits))) if words and k > 0 else []

    def _find(self, words: tuple[str, ...], k: int, splits: tuple[str, ...] | None) -> list[Passage]:
        allowed = [] if splits is None else [self._allowed(sorted(splits))]
        title = tantivy.Query.term_query(self._schema, "title_key", " ".join(words), "basic")
        # Folded words hold no query syntax, and operators are upper case.
        free = self._index.parse_query(" ".join(words), ["title", "body"], field_boosts={"title": _TITLE_BOOST})
        searcher = self._index.searcher()
        addresses: dict[tuple[int, int], tantivy.DocAddress] = {}
        for part in (title, free):
            must = [(tantivy.Occur.Must, q) for q in (part, *allowed)]
            hits = searcher.search(tantivy.Query.boolean_query(must), k, count=False).hits
            ranked = sorted(hits, key=lambda hit: (-hit[0], hit[1].segment_ord, hit[1].doc))
            addresses |= {(a.segment_ord, a.doc): a for _, a in ranked if (a.segment_ord, a.doc) not in addresses}
            if len(addresses) >= k:
                break
        return [_passage(bytes(searcher.doc(a)["record"][0]).decode()) for a in list(addresses.values())[:k]]

    def _allowed(self, splits: Sequence[str]) -> tantivy.Query:
        terms = [(tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "split", s, "basic")) for s in splits]
        return tantivy.Query.const_score_query(tantivy.Query.boolean_query(terms), 0.0)  # filters, adds no score

    def close(self) -> None:
        self._index = None
        self._cached.cache_clear()
