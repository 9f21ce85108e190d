"""Suites in the sandbox: what a run shows, reports and keeps, whatever the code under test does."""

import json

import pytest

from envs.code.packages import Package
from envs.code.suite import Suites, _told
from tests.envs import calc_repo

PACKAGE = Package("calc", "1", "", ("calc/",), ("tests/",))
CALC, TEST = "calc/__init__.py", "tests/test_calc.py"
TREE = {CALC: calc_repo.CALC.encode(), TEST: calc_repo.TESTS.encode()}


@pytest.fixture(scope="module")
def suites():
    made = Suites(1, accept_rlimits=True)
    made.add("calc", TREE)
    yield made
    made.close()


def run(suites, code="", **more):
    """A report of the suite with the bug in `add`, and `code` after it."""
    buggy = calc_repo.CALC.replace("a + b", "a - b")
    return suites.tests("calc", PACKAGE, {CALC: f"{buggy}\n\n{code}"}, **more)


def test_what_failed_is_shown(suites):
    shown = run(suites, show=True)
    assert shown.outcomes[f"{TEST}::test_add"] == "failed"
    assert "assert -1 == 5" in shown.output and "1 failed, 3 passed" in shown.output, shown.output


def test_a_call_has_its_time_of_the_processor_after_the_import(suites):
    code = "import time\n\ntime.sleep(0.7)\n\n\ndef slow(s):\n    time.sleep(s)\n    return s\n"
    code += "\n\ndef spins():\n    while True:\n        pass\n"
    calls = [["calc", "add", "(2, 3)"], ["calc", "slow", "(0.7,)"], ["calc", "spins", "()"], ["calc", "none", "()"]]
    got = suites.calls("calc", PACKAGE, {CALC: calc_repo.CALC + code}, calls)
    assert got == ["= 5", "= 0.7", "! time", "! AttributeError"]


def told(*lines):
    """What is made of lines [id, when, outcome], in their order, and an end."""
    said = [dict(zip(("id", "when", "outcome"), line, strict=True)) for line in lines] + [{"broken": [], "events": []}]
    return "".join(json.dumps({"nonce": "x", "n": n, **line}) + "\n" for n, line in enumerate(said)).encode()


def test_the_worst_that_was_said_of_a_test_counts():
    outcomes, _, broken, _ = _told(told(["a", "call", "passed"], ["a", "teardown", "error"]), "x")
    assert outcomes == {"a": "error"} and not broken
    for lines in (["failed", "passed"], ["passed", "failed"]):
        outcomes, _, broken, _ = _told(told(*(["a", "call", outcome] for outcome in lines)), "x")
        assert outcomes == {"a": "failed"} and broken == ["a was reported twice"]
    assert _told(told(["a", "part", "passed"], ["a", "part", "passed"]), "x")[2] == []  # of a subtest


def test_a_report_that_is_not_whole_is_none():
    whole = told(["a", "call", "passed"])
    lines = whole.splitlines(True)
    assert _told(whole, "x") is not None
    for broken in (b"", lines[0], whole + lines[0], whole + b"x", whole.replace(b'"x"', b'"y"')):
        assert _told(broken, "x") is None
    assert _told(lines[0] + whole, "x")[2][0] == "the order of the report"
