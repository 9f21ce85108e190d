"""For each law a line whose breaking must turn it red. `make mutants` breaks each, in a copy, and demands it.

A law that stays green over its broken line guards nothing. To add one: a `Mutant` below, with the test's node id, the
file, the line as it stands (without its indentation) and the broken line. `python -m tests.laws.mutants WORD` runs
those whose file, test or line contains WORD.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("configs", "envs", "launch", "models", "rl", "tests", "pyproject.toml", "setup.py", "README.md", "Makefile")
TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One broken line: `test` must fail when `line` of `file` reads `broken`."""

    test: str
    file: str
    line: str
    broken: str


MUTANTS: tuple[Mutant, ...] = (
    # -- checkpoint: what is restored is what was saved; whatever stops a save leaves the previous one intact
    Mutant(
        "tests/rl/test_checkpoint.py::test_every_damaged_file_is_named",
        "rl/checkpoint.py",
        "if _crc32(file) != crc:",
        "if False:",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_both_trees_come_back",
        "rl/checkpoint.py",
        "host_bytes = _pack(host)  # now: the host tree goes on changing",
        "host_bytes = _pack(None)",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_keeps_the_newest_and_the_best",
        "rl/checkpoint.py",
        "kept = {*newest, *best}",
        "kept = {*newest}",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_a_failed_save_is_raised_at_the_next_and_at_close",
        "rl/checkpoint.py",
        "self._error = err",
        "pass",
    ),
    Mutant(
        "tests/rl/test_checkpoint.py::test_kill_9_at_any_moment_leaves_a_whole_checkpoint",
        "rl/checkpoint.py",
        'temporary = self.folder / f"tmp-{step:08d}"',
        'temporary = self.folder / f"{step:08d}"',
    ),
    # -- episodes: an ended step can be read whatever comes after
    Mutant(
        "tests/rl/test_episodes.py::test_steps_come_back_in_order_and_exactly",
        "rl/episodes.py",
        "self._writer.close()",
        "self._writer.is_open()",
    ),
    # -- command line and workdir: bad input ends before any compute and touches nothing
    Mutant(
        "tests/launch/test_cli.py::test_an_unread_leaf_is_an_error_with_the_closest_read_key",
        "launch/cli.py",
        "self._read.add(key)\n        return self._leaves[key]",
        "self._read |= set(self._leaves)\n        return self._leaves[key]",
    ),
    Mutant(
        "tests/launch/test_cli.py::test_workdir_is_made_reopened_and_refused",
        "launch/workdir.py",
        "if differing:",
        "if False:",
    ),
    Mutant(
        "tests/launch/test_cli.py::test_the_lock_dies_with_its_process",
        "launch/workdir.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
    ),
    # -- layers
    Mutant(
        "tests/test_layers.py::test_importing_all_of_envs_leaves_jax_alone",
        "envs/base.py",
        "import dataclasses",
        "import dataclasses, jax",
    ),
    Mutant(
        "tests/test_layers.py::test_every_import_points_downward",
        "envs/base.py",
        "import dataclasses",
        "import dataclasses, jax",
    ),
)


def find(mutant: Mutant, root: Path = ROOT) -> tuple[str, int]:
    """The file's text and where the line begins. Errors: the line is not there exactly once."""
    text = (root / mutant.file).read_text()
    count = text.count(mutant.line)
    if count != 1:
        raise ValueError(
            f"{mutant.file}: got {count} times {mutant.line!r}, want once; bring tests/laws/mutants.py up to date"
        )
    return text, text.index(mutant.line)


def survives(mutant: Mutant) -> str | None:
    """Runs the law over the broken line. None if it fails as it must, else what happened instead."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, copy / name)
        text, at = find(mutant, copy)
        (copy / mutant.file).write_text(text[:at] + mutant.broken + text[at + len(mutant.line) :])
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutant.test]
        # Not ours: an editable install must not put the unbroken tree first.
        env = {**os.environ, "PYTHONPATH": str(copy), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax")}
        try:
            done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"ran past {TIMEOUT_S} s"
    # 1 = a test failed; 2..5 = pytest itself could not run it, which proves nothing.
    return (
        None
        if done.returncode == 1
        else f"pytest ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-500:]}"
    )


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(w in f"{m.file} {m.test} {m.line}" for w in words)]
    if not chosen:
        print(f"error: no mutant matches {words}; there are {len(MUTANTS)}", file=sys.stderr)
        return 2
    alive = 0
    for mutant in chosen:
        begun = time.monotonic()
        problem = survives(mutant)
        alive += problem is not None
        verdict = "red, as it must" if problem is None else f"SURVIVED ({problem})"
        print(
            f"{mutant.file}: {mutant.broken.splitlines()[0]!r} -> {mutant.test}: {verdict}"
            f" [{time.monotonic() - begun:.0f} s]",
            flush=True,
        )
    print(f"{len(chosen) - alive} of {len(chosen)} mutants turned their law red")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
