"""Law: the list of mutants stays true to the code; that each one turns its law red is what `make mutants` shows."""

import ast
from pathlib import Path

import pytest

from tests.laws.mutants import MUTANTS, Mutant, find

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}:{m.line[:40]}")
def test_the_line_is_there_once_and_the_test_exists(mutant):
    text, at = find(mutant)
    assert mutant.broken != mutant.line
    ast.parse(text[:at] + mutant.broken + text[at + len(mutant.line) :])  # else the law would fail for the wrong reason
    file, _, name = mutant.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name.partition("[")[0] in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (
        f"no test {mutant.test}"
    )


def test_a_stale_line_is_named():
    with pytest.raises(ValueError, match="got 0 times 'not there'"):
        find(Mutant("t", "rl/checkpoint.py", "not there", ""))
