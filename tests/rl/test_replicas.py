"""Several engines are used evenly, and are told the same."""

import threading
import time

import pytest

from rl.rollout.replicas import Replicas
from tests.models.weights import drawn
from tests.rl.engines import CONFIG, GREEDY, PROMPT, in_thread, key, make_engine


@pytest.fixture(scope="module")
def params():
    return drawn(CONFIG)


@pytest.fixture
def engines(params):
    engines = [make_engine(params) for _ in range(3)]
    yield engines
    Replicas(engines).close()


def test_callers_that_come_together_spread_evenly(engines, monkeypatch):
    for engine in engines:

        def slowly(load=engine.admission.load):
            seen = load()
            time.sleep(0.01)
            return seen

        monkeypatch.setattr(engine.admission, "load", slowly)
    replicas, gate = Replicas(engines), threading.Barrier(9)

    def opening(i):
        gate.wait(10)
        return replicas.open(key(i), GREEDY, timeout_s=5)

    calls = [in_thread(lambda i=i: opening(i)) for i in range(9)]
    for thread, _ in calls:
        thread.join(10)
    assert [engine.stats()["sessions"] for engine in engines] == [3, 3, 3]
    calls[0][1][0].close()
    assert not replicas.open(key(9), GREEDY).closed
    assert [engine.stats()["sessions"] for engine in engines] == [3, 3, 3]


def test_a_bad_key_holds_no_place(engines):
    replicas = Replicas(engines)
    with pytest.raises(ValueError, match="want uint32"):
        replicas.open([1, 2, 3], GREEDY)
    assert [engine.admission.load() for engine in engines] == [0, 0, 0]


def test_a_version_is_published_once(engines, params):
    replicas = Replicas(engines)
    replicas.publish(params, 4)
    for version in (3, 4):
        with pytest.raises(ValueError, match=f"got version {version}, want more than 4"):
            replicas.publish(params, version)
    assert replicas.open(key(0), GREEDY).generate(PROMPT, max_tokens=2).version == [4, 4]


def test_how_long_a_publish_took_is_counted_once_for_each(engines, params):
    """Over the replicas too: one sum of seconds, one of publishes."""
    replicas = Replicas(engines)
    sessions = [replicas.open(key(i), GREEDY) for i in range(3)]
    for version in (1, 2):
        replicas.publish(params, version)
    for session in sessions[:2] * 2:
        session.generate(PROMPT, max_tokens=2)
    stats = replicas.stats()
    assert stats["publishes"] == 2 and 0 < stats["publish_to_token_s"] < 60  # the third has sampled nothing yet
    replicas.publish(params, 3)
    for session in sessions:
        session.generate(PROMPT, max_tokens=2)
    assert replicas.stats()["publishes"] == 5
