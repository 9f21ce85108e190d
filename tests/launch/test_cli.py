"""Law: bad input ends before any compute with one line (got, wanted, remedy) and status 2; no workdir is touched."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import ml_collections
import pytest

from configs.defaults import defaults
from launch import cli
from launch.cli import ConfigError, ReadTracker, assert_all_read, open_workdir, parse_arg
from tests.rl.test_hosts import in_threads

ROOT = Path(__file__).resolve().parents[2]

CONFIG = '''
"""A toy."""
import ml_collections
from configs.arg import parse_arg

def get_config(arg=""):
    a = parse_arg(arg, size=2, fast=False)
    c = ml_collections.ConfigDict()
    c.size, c.fast, c.shapes = a.size, a.fast, (1, 2)
    c.loss = ml_collections.ConfigDict({"clip_low": 0.2, "kind": "grpo"})
    return c
'''

MAIN = '''
"""A toy main."""
import sys
from launch import cli

CONFIG, WORKDIR = cli.define_config(), cli.define_workdir()

def main(argv):
    with cli.validating():
        config = cli.resolve(CONFIG.value, WORKDIR.value)
        read = cli.ReadTracker(config)
        print(read["size"], read["fast"], read["shapes"], read.section("loss"))
        cli.assert_all_read(read)
        if read["loss.kind"] == "bad":
            raise ValueError("loss.kind: got 'bad', want 'grpo'")
    assert "jax" not in sys.modules
    if read["loss.kind"] == "bug":
        raise ValueError("a program error keeps its traceback")

if __name__ == "__main__":
    cli.run(main)
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "c.py").write_text(CONFIG)
    (folder / "main.py").write_text(MAIN)
    return folder


def launch(toy: Path, *args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "main.py", *args], cwd=toy, env=env, capture_output=True, text=True, timeout=60
    )


def test_config_argument_and_overrides_are_typed(toy):
    out = launch(toy, "--config=c.py:size=5,fast=true", "--config.loss.clip_low=0.3")
    assert out.stdout == "5 True (1, 2) {'clip_low': 0.3, 'kind': 'grpo'}\n", out.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config=c.py:sise=5"], "unknown name 'sise'; did you mean size?"),
        (["--config=c.py:size=five"], "size: got 'five', want a int"),
        (["--config=c.py", "--config.loss.clip_lo=1"], 'Did you mean "clip_low"'),
        (["--config=c.py", "--config.size=big"], "invalid literal"),
        (["--config=c.py", "--confg.size=1"], "Unknown command line flag"),
        (["--config=c.py", "stray"], "got arguments ['stray']; want flags only"),
        (["--config=none.py"], "none.py"),
        (["--config=c.py", "--config.loss.kind=bad"], "got 'bad', want 'grpo'"),
        (["--workdir=none"], "no run there"),
        ([], "got neither --config nor --workdir"),
    ],
)
def test_bad_input_is_one_line(toy, args, message):
    out = launch(toy, *args)
    assert out.returncode == cli.EXIT_BAD_INPUT, out.stderr
    assert message in out.stderr and out.stderr.startswith("error: "), out.stderr
    assert "Traceback" not in out.stderr and len(out.stderr.splitlines()) <= 2, out.stderr


def test_a_program_error_keeps_its_traceback(toy):
    out = launch(toy, "--config=c.py", "--config.loss.kind=bug")
    assert out.returncode == 1 and "Traceback" in out.stderr


def test_parse_arg():
    got = parse_arg("steps=3,rate=1e-3,fast=0,name=x", steps=1, rate=0.1, fast=True, name="", other=2)
    assert got.to_dict() == {"steps": 3, "rate": 1e-3, "fast": False, "name": "x", "other": 2}
    assert parse_arg("", a=1).a == parse_arg(None, a=1).a == 1
    for arg, message in [
        ("a", "want name=value"),
        ("a=1,a=2", "given twice"),
        ("b=1", "known: a"),
        ("a=1.5", "want a int"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_arg(arg, a=1)


def tree():
    return ml_collections.ConfigDict({"seed": 0, "loss": {"clip_low": 0.2, "clip_hi": 0.3}, "options": {}})


def test_an_unread_leaf_is_an_error_with_the_closest_read_key():
    read = ReadTracker(tree())
    assert (read["seed"], read["loss.clip_low"], read.section("options")) == (0, 0.2, {})
    with pytest.raises(
        ConfigError, match=r"1 key\(s\) that nothing reads(.|\n)*loss.clip_hi \(did you mean loss.clip_low\?"
    ):
        assert_all_read(read)
    assert read.section("loss") == {"clip_low": 0.2, "clip_hi": 0.3}
    assert_all_read(read)


def test_a_missing_key_is_an_error_with_the_closest_key():
    read = ReadTracker(tree())
    for use, message in [
        (lambda: read["loss.clip_high"], "did you mean loss.clip_hi"),
        (lambda: read["loss"], "got a section"),
        (lambda: read.section("los"), "did you mean loss"),
        (lambda: read.section("seed"), "no section 'seed'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            use()


def test_into_reads_the_fields_and_leaves_the_rest_unread():
    @dataclasses.dataclass(frozen=True)
    class Clip:
        clip_low: float
        extra: int

    read = ReadTracker(tree())
    assert read.into(Clip, "loss", extra=3) == Clip(0.2, 3)
    assert read.unread() == ["loss.clip_hi", "seed"]


def test_workdir_is_made_reopened_and_refused(tmp_path):
    config = defaults()
    config.update({"shape": (1, 2), "loss": {"kind": "grpo"}})
    run = tmp_path / "runs" / "a"
    with open_workdir(run, config) as folder:
        assert folder == run and sorted(p.name for p in run.iterdir()) == [".lock", "config.json", "git.txt"]
        assert (run / "git.txt").read_text().startswith("commit ")
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), open_workdir(run, config):
            pass
    assert cli.resolve(None, str(run)).to_dict() == config.to_dict()
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.iterdir()}
    other = ml_collections.ConfigDict({"seed": 1, "shape": (1, 2), "loss": {"kind": "grpo", "new": 2}})
    with (
        pytest.raises(ConfigError, match=r"loss.new: there \(absent\), here 2\n  seed: there 0, here 1\n"),
        open_workdir(run, other),
    ):
        pass
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.iterdir()}
    with open_workdir(run, cli.resolve(None, str(run))):
        pass  # resumed


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds 'thesis.txt' but no config.json"), open_workdir(tmp_path, {"a": 1}):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="got a file"), open_workdir(tmp_path / "thesis.txt", {"a": 1}):
        pass
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="unreadable"):
        cli.resolve(None, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (("", None, None), ("", 1, 0)),
        (("auto", None, None), ("auto", 1, 0)),
        (("host:9876", 2, 1), ("host:9876", 2, 1)),
        (("", 2, None), "want host:port with them"),
        (("auto", 2, 0), "auto finds both out"),
        (("host", 2, 0), "got 'host', want host:port or auto"),
        (("host:9876", 2, None), "want both"),
        (("host:9876", 2, 2), "0 <= process_id < num_processes"),
    ],
)
def test_processes_of_the_command_line(monkeypatch, given, want):
    names = ("coordinator", "num_processes", "process_id")
    flags = {name: SimpleNamespace(value=value) for name, value in zip(names, given, strict=True)}
    monkeypatch.setattr(cli.flags, "FLAGS", flags)
    if isinstance(want, tuple):
        assert cli.processes() == want
    else:
        with pytest.raises(ConfigError, match=want):
            cli.processes()


def test_a_start_that_died_half_way_can_be_started_again(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "config.json.tmp").write_text("{")
    with open_workdir(tmp_path, {"a": 1}):
        assert (tmp_path / "config.json").exists()


def test_the_lock_dies_with_its_process(tmp_path):
    code = """if True:
        import sys, time
        from launch.cli import open_workdir
        with open_workdir(sys.argv[1], {"a": 1}):
            print(1, flush=True)
            time.sleep(60)"""
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    child.stdout.readline()
    with pytest.raises(ConfigError, match=f"in use by process {child.pid}"), open_workdir(tmp_path, {"a": 1}):
        pass
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    with open_workdir(tmp_path, {"a": 1}):
        pass


def test_help_is_quick_and_imports_no_jax():
    """Every main answers --help without jax; 5 s is the bar on an idle machine."""
    mains = [p for p in (ROOT / "launch").glob("*.py") if "\nif __name__ ==" in p.read_text()]
    code = """if True:
        import atexit, runpy, sys
        atexit.register(lambda: print("jax" in sys.modules))
        sys.argv = ["x", "--help"]
        runpy.run_module(MODULE, run_name="__main__")"""
    for path in mains:
        begun = time.monotonic()
        out = subprocess.run(
            [sys.executable, "-c", code.replace("MODULE", repr(f"launch.{path.stem}"))],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert out.stdout.rstrip().endswith("False"), (
            f"launch.{path.stem} imports jax before its flags are parsed\n{out.stderr}"
        )
        assert time.monotonic() - begun < 5 and "--help" in out.stdout, path


def test_processes_that_were_not_started_alike_are_told_what_differs():
    from launch import distributed

    def work(hosts):
        config = ml_collections.ConfigDict({"seed": 0, "rl": {"steps": 3 + hosts.index}})
        distributed.check_same(hosts, config, init=None)

    for error in in_threads(2, work):
        assert isinstance(error, ConfigError) and "rl.steps: got" in str(error) and "one command line" in str(error)
    assert in_threads(2, lambda hosts: distributed.check_same(hosts, tree(), init="x")) == [None, None]
