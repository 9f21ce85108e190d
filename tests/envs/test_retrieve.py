"""Law: a query finds the same passages everywhere and at any time, a policy of a split finds nothing held out, and a
retriever that fails is told apart from a tool that fails."""

import contextlib
import http.server
import inspect
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.defaults import defaults
from envs import make_world
from envs.base import EnvError, Task
from envs.search.corpus import Passage
from envs.search.index import SearchIndex, build_index, fold, stored_fingerprint
from envs.search.retrieve import FlakyRetriever, HttpRetriever, TantivyRetriever, ToolError


def passage(passage_id, title, text, split="train"):
    return Passage(passage_id, title, (text,), passage_id, "test", split)


PASSAGES = [
    passage("c/1", "Peru", "capital: Lima; currency: PEN"),
    passage("c/2", "Chile", "capital: Santiago; longest border: Peru Peru Peru"),
    passage("c/3", "S\u00e3o Tom\u00e9", "currency: STN"),
    passage("c/4", "Norway", "capital: Oslo", "validation"),
    passage("c/5", "Congo (Kinshasa)", "capital: Kinshasa", "test"),
    *(passage(f"t/{i}", f"Town {i}", "city in Peru") for i in range(9)),
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = build_index(PASSAGES[::-1], tmp_path_factory.mktemp("index") / "i")
    index = SearchIndex(folder)
    yield index
    index.close()


def ids(found):
    return [p.passage_id for p in found]


def test_exact_title_first_then_ties_by_id(index):
    # Chile says Peru more often; the nine towns score the same
    found = index.search("peru", 12)
    assert found[0] == PASSAGES[0]
    towns = [i for i in ids(found) if i.startswith("t/")]
    assert towns == [f"t/{i}" for i in range(9)]
    assert ids(index.search("peru", 4)) == ids(found)[:4]  # a cut through the tie is the same order


@pytest.mark.parametrize(
    "query",
    [
        "Congo (Kinshasa)",
        "congo kinshasa",
        "title:Congo AND +kinshasa!",
        '"Congo (Kinshasa',
        "Congo\\ Kinshasa^5",
        " Congo  Kinshasa ~2 ?",
    ],
)
def test_no_query_is_a_syntax_error(index, query):
    assert "c/5" in ids(index.search(query, 3))


def test_accents_and_case(index):
    assert fold("S\u00e3o-Tom\u00e9!") == ["sao", "tome"]
    assert ids(index.search("SAO TOME", 1)) == ids(index.search("s\u00e3o tome\u0301", 1)) == ["c/3"]


@pytest.mark.parametrize("query", ["", "???", "zzz", " \n"])
def test_nothing_is_found(index, query):
    assert index.search(query, 3) == []


def test_very_long_query(index):
    assert ids(index.search("peru " * 100_000, 1)) == ["c/1"]


def test_held_out_passages_are_invisible(index):
    seen = {
        split: {*ids(TantivyRetriever(index, split).search("capital norway congo kinshasa", 50))}
        for split in ("train", "validation", "test")
    }
    assert not seen["train"] & {"c/4", "c/5"}
    assert "c/4" in seen["validation"] and "c/5" not in seen["validation"]
    assert {"c/4", "c/5"} <= seen["test"]
    with pytest.raises(ValueError, match="got 'dev', want one of train, validation, test"):
        TantivyRetriever(index, "dev")


def test_filter_does_not_change_the_order(index):
    train = TantivyRetriever(index, "train").search("peru", 12)
    assert ids(train) == [i for i in ids(index.search("peru", 12)) if i not in ("c/4", "c/5")]


def test_many_threads_read_one_index(index):
    queries = ["peru", "oslo", "Congo (Kinshasa)", "town 3"] * 50
    alone = [ids(index.search(q, 3)) for q in queries]
    fresh = SearchIndex(index.folder)
    with ThreadPoolExecutor(8) as threads:
        assert [ids(found) for found in threads.map(lambda q: fresh.search(q, 3), queries)] == alone
    fresh.close()


def test_build_is_idempotent_rebuilt_when_different_and_leaves_no_litter(tmp_path):
    folder = build_index(PASSAGES, tmp_path / "i")
    stamp, made = stored_fingerprint(folder), (folder / "meta.json").stat().st_mtime_ns
    build_index(list(reversed(PASSAGES)), folder)
    assert (folder / "meta.json").stat().st_mtime_ns == made  # same passages, whatever their order
    old = SearchIndex(folder)
    build_index([*PASSAGES, passage("n/1", "Nauru", "capital: Yaren")], folder)
    assert stored_fingerprint(folder) != stamp
    assert ids(SearchIndex(folder).search("Nauru", 1)) == ["n/1"]
    assert ids(old.search("Peru", 1)) == ["c/1"]  # whoever had it open reads on
    (folder / "wayfinder-index.json").write_text("{")  # cut short: not trusted
    build_index(PASSAGES, folder)
    assert stored_fingerprint(folder) == stamp
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_build_fails_whole(tmp_path):
    with pytest.raises(ValueError, match="'c/1' is given to two passages"):
        build_index([PASSAGES[0], PASSAGES[0]], tmp_path / "i")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="no index in"):
        SearchIndex(tmp_path / "i")


def test_many_builders_at_once(tmp_path):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: build_index(PASSAGES, tmp_path / "i"), range(4)))
    assert ids(SearchIndex(tmp_path / "i").search("Peru", 1)) == ["c/1"]
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_closed_index_says_so(tmp_path):
    index = SearchIndex(build_index(PASSAGES, tmp_path / "i"))
    index.search("peru", 1)
    index.close()
    with pytest.raises(RuntimeError, match="closed"):
        index.search("peru", 1)


# --- Search-R1's server ---------------------------------------------------------------------------


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, self.headers["Content-Type"], json.loads(body)))
        status, reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args): ...


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.requests, server.replies = [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="retriever")
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url(server):
    return f"http://127.0.0.1:{server.server_port}/retrieve"


GOOD = json.dumps(
    {
        "result": [
            [
                {"document": {"id": "7", "contents": '"Peru"\ncapital: Lima\nand more'}, "score": 0.9},
                {"document": {"contents": '"Say "hi""\ntext'}, "score": 0.5},
            ]
        ]
    }
).encode()


def test_http_request_and_reply_are_search_r1s(server):
    server.replies = [(200, GOOD)]
    found = HttpRetriever(url(server)).search("capital of \u201cPeru\u201d?", 2)
    assert server.requests == [
        (
            "/retrieve",
            "application/json",
            {"queries": ["capital of \u201cPeru\u201d?"], "topk": 2, "return_scores": True},
        )
    ]
    assert [(p.passage_id, p.title, p.pages) for p in found] == [
        ("7", "Peru", ("capital: Lima\nand more",)),
        ('Say "hi"', 'Say "hi"', ("text",)),
    ]
    server.replies = [(200, b'{"result": [[]]}')]
    assert HttpRetriever(url(server)).search("x", 2) == []


def test_http_goes_on_after_a_passing_fault(server):
    server.replies = [(503, b""), (200, b"<html>"), (200, GOOD)]
    assert len(HttpRetriever(url(server), pause_s=0.001).search("x", 3)) == 2
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "reply",
    [
        (500, b"boom"),
        (200, b"not json"),
        (200, b"[]"),
        (200, b'{"result": []}'),
        (200, b'{"result": [[{"document": {"text": "x"}}]]}'),
        (200, b'{"result": [["x"]]}'),
        (200, b'{"result": [[{"document": {"contents": 5}}]]}'),
        (200, b"\xff\xfe"),
    ],
)
def test_http_server_that_answers_wrongly_is_an_env_error(server, reply):
    server.replies = [reply]
    with pytest.raises(EnvError, match=r"no usable answer in 2 tries .*is the server up"):
        HttpRetriever(url(server), retries=1, pause_s=0.001).search("x", 3)
    assert len(server.requests) == 2


def test_http_server_that_is_down_is_an_env_error(server):
    gone = http.server.HTTPServer(("127.0.0.1", 0), _Handler)
    address = url(gone)
    gone.server_close()
    with pytest.raises(EnvError, match="ConnectionRefusedError|Connection refused"):
        HttpRetriever(address, retries=0).search("x", 3)
    with pytest.raises(ValueError, match="want http://host:port/retrieve"):
        HttpRetriever("localhost:8000")


def test_http_server_that_hangs_is_an_env_error():
    with http.server.HTTPServer(("127.0.0.1", 0), _Handler) as deaf:  # accepts, never answers
        with pytest.raises(EnvError, match="timed out"):
            HttpRetriever(url(deaf), timeout_s=0.05, retries=0).search("x", 3)


def test_http_tries_share_one_budget(server):
    with http.server.HTTPServer(("127.0.0.1", 0), _Handler) as deaf:
        begun = time.monotonic()
        with pytest.raises(EnvError, match="no usable answer in 2 tries"):
            HttpRetriever(url(deaf), timeout_s=0.2, retries=50, pause_s=0.01, budget_s=0.3).search("x", 3)
        assert time.monotonic() - begun < 2
    server.replies = [(503, b"")]
    with pytest.raises(EnvError, match="in 1 tries"):  # the pause is cut, too
        HttpRetriever(url(server), pause_s=60.0, budget_s=0.2).search("x", 3)


def test_http_server_that_drips_is_cut_at_the_budget():
    with socket.create_server(("127.0.0.1", 0)) as drip:
        stop = threading.Event()

        def serve():
            peer, _ = drip.accept()
            with peer, contextlib.suppress(OSError):
                peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while not stop.wait(0.02):
                    peer.sendall(b" ")

        thread = threading.Thread(target=serve, name="drip")
        thread.start()
        with pytest.raises(EnvError, match="still sending after the budget"):
            address = f"http://127.0.0.1:{drip.getsockname()[1]}/"
            HttpRetriever(address, budget_s=0.3).search("x", 3)
        stop.set()
        thread.join()


def test_default_budget_is_below_the_deadline_of_a_world_call():
    default = inspect.signature(HttpRetriever).parameters["budget_s"].default
    assert default < defaults().rollout.call_deadline_s


def test_a_world_over_a_foreign_index_counts_evidence_by_title(server, tmp_path):
    server.replies = [(200, GOOD)]
    env = make_world("search", url=url(server), k=2, data_dir=str(tmp_path / "none")).make_env()
    chain = [{"title": "Peru", "passage_id": "country/PE", "relation": "capital", "value": "Lima"}]
    env.reset(Task("t", "hop1", "train", 0, (), {"answers": ["Lima"], "chain": chain}))
    step = env.step("<search> Peru </search>")
    assert step.observation.text.startswith("<information>\nDoc 1(Title: Peru) capital: Lima and more\nDoc 2(")
    assert step.facts["evidence_frac"] == 1 and step.facts["gold_retrieved"]
    assert not (tmp_path / "none").exists()  # no index of ours is built for it


# --- flaky tools ----------------------------------------------------------------------------------


def outcomes(retriever, n):
    def one():
        try:
            return "found" if retriever.search("peru", 3) else "nothing"
        except ToolError as err:
            return err.kind

    return [one() for _ in range(n)]


def test_flakiness_is_addressed_by_seed_and_call(index):
    inner = TantivyRetriever(index, "train")
    whole = outcomes(FlakyRetriever(inner, 0.3, (0, 5)), 40)
    assert whole == outcomes(FlakyRetriever(inner, 0.3, (0, 5)), 40)
    assert whole != outcomes(FlakyRetriever(inner, 0.3, (0, 6)), 40)
    resumed = FlakyRetriever(inner, 0.3, (0, 5))
    resumed.calls = 17
    assert outcomes(resumed, 23) == whole[17:]


def test_flaky_share_and_kinds(index):
    inner = TantivyRetriever(index, "train")
    n = 3000
    got = outcomes(FlakyRetriever(inner, 0.3, 1), n)
    # binomial(3000, .1): mean 300, sd 16.4; five sd either way
    assert all(abs(got.count(kind) - 300) < 82 for kind in ("error", "timeout", "nothing"))
    assert set(outcomes(FlakyRetriever(inner, 0.0, 1), 100)) == {"found"}
    assert "found" not in outcomes(FlakyRetriever(inner, 1.0, 1), 100)
    with pytest.raises(ValueError, match="flaky rate"):
        FlakyRetriever(inner, 1.5, 1)
