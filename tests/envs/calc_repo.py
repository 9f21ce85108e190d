"""A small git repository with a bug in each of a few commits, and its tasks in SWE-bench's form."""

import difflib
import json
import os
import subprocess

CALC = '''\
"""Sums."""


def add(a, b):
    return a + b


def clamp(x, low, high):
    if x < low:
        return low
    return min(x, high)


def words(text):
    return [word.lower() for word in text.split() if word]


class Counter:
    def __init__(self):
        self.n = 0

    def up(self, by=1):
        self.n += by
        return self.n
'''
TESTS = """\
import unittest

from calc import Counter, add, clamp, words


def test_add():
    assert add(2, 3) == 5


def test_clamp():
    assert [clamp(x, 0, 2) for x in (-1, 0, 1, 2, 3)] == [0, 0, 1, 2, 2]


class Words(unittest.TestCase):
    def test_words(self):
        self.assertEqual(words("To be"), ["to", "be"])


def test_counter():
    counter = Counter()
    assert counter.up() == 1 and counter.up(2) == 3
"""
BUGS = {  # what stands in place of what, and the test that fails
    "add": ("a + b", "a - b", "tests/test_calc.py::test_add"),
    "clamp": ("return low\n", "return high\n", "tests/test_calc.py::test_clamp"),
    "words": ("word.lower()", "word.upper()", "tests/test_calc.py::Words::test_words"),
    "counter": ("self.n += by", "self.n -= by", "tests/test_calc.py::test_counter"),
}


def git(folder, *arguments):
    who = {f"GIT_{role}_{what}": "t@t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, env={**os.environ, **who})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def diff(path, before, after):
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return "".join(lines)


def make(folder):
    """The options that play it: a git repository under `folder`, and a JSONL file of one task for each bug."""
    place = folder / "checkouts" / "t__calc"
    (place / "calc").mkdir(parents=True)
    (place / "tests").mkdir()
    git(place, "init", "-q")
    old_tests = TESTS.partition("\n\nclass Words")[0]
    every, rows = [test for _, _, test in BUGS.values()], []
    for name, (right, wrong, test) in BUGS.items():
        buggy = CALC.replace(right, wrong)
        (place / "calc" / "__init__.py").write_text(buggy)
        (place / "tests" / "test_calc.py").write_text(old_tests)
        git(place, "add", "-A")
        git(place, "commit", "-qm", name)
        row = {
            "instance_id": f"t__calc-{name}",
            "repo": "t/calc",
            "base_commit": git(place, "rev-parse", "HEAD"),
            "patch": diff("calc/__init__.py", buggy, CALC),
            "test_patch": diff("tests/test_calc.py", old_tests, TESTS),
            "problem_statement": f"{name} gives the wrong result",
            "FAIL_TO_PASS": json.dumps([test]),
            "PASS_TO_PASS": [other for other in every if other != test],
        }
        rows.append(json.dumps(row))
    (folder / "instances.jsonl").write_text("\n".join(rows))
    return {
        "data_dir": str(folder),
        "instances": str(folder / "instances.jsonl"),
        "checkouts": str(folder / "checkouts"),
        "accept_rlimits": True,
        "sandboxes": 2,
    }
