"""Law: through the real mains, bad input ends in one `error:` line and status 2, before any compute or file.

Most are run in forks of one process that has imported what takes long and started no backend; three are real commands.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import qa_file
from launch.cli import EXIT_BAD_INPUT
from launch.plan import make_plan
from launch.workdir import open_workdir
from models.config import ModelConfig
from models.hf_config import describe

LLAMA = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
ROOT = Path(__file__).resolve().parents[2]

SEARCH = '''
"""The quickstart over a data folder of a few tasks; its argument is the folder."""
from configs import quickstart

def get_config(arg=""):
    c = quickstart.get_config()
    c.world.options.data_dir = arg
    c.world.options.sizes = {"train": 12, "validation": 4, "test": 4}
    c.eval.n = c.eval.final_n = 4
    return c
'''

EXTRA = '''
"""A section with a key that nothing reads."""
from configs import quickstart

def get_config(arg=""):
    c = quickstart.get_config()
    c.mesh.model = 2
    return c
'''


MISSPELT = '''
"""Questions of a file (its argument) with a reward term that no world reports."""
from configs import qa_file

def get_config(arg=""):
    c = qa_file.get_config(f"file={arg}")
    c.reward.terms.exact_macth = 0.1
    c.reward.reach.exact_macth = 1.0
    return c
'''


FORKS = """
import json, os, runpy, signal, sys
from launch import quickstart, runs

for line in sys.stdin:
    main, args, out, err = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(120)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[1:] = args
    try:
        runpy.run_module(f"launch.{main}", run_name="__main__", alter_sys=True)
        sys.exit()
    except SystemExit as end:
        sys.stderr.flush()
        os._exit(end.code or 0)  # half a second less than to take apart all that was imported
"""
# Python itself would write a __pycache__ beside a config file that it imports.
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """fork(main, *args): as `launch`, in a fork of one process."""
    folder = tmp_path_factory.mktemp("forks")
    server = subprocess.Popen([sys.executable, "-c", FORKS], cwd=ROOT, env=ENV, stdin=-1, stdout=-1, text=True)

    def run(main: str, *args: str) -> subprocess.CompletedProcess:
        files = [str(folder / name) for name in ("out", "err")]
        print(json.dumps([main, args, *files]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess([main, *args], status, *(Path(file).read_text() for file in files))

    yield run
    server.communicate()
    assert server.returncode == 0


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder with the config files, a file of questions, a run without a checkpoint, and what is not a run."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "few.py").write_text(SEARCH)
    (folder / "extra.py").write_text(EXTRA)
    (folder / "misspelt.py").write_text(MISSPELT)
    rows = [{"prompt": f"{i} + 1 = ?", "answers": [str(i + 1)]} for i in range(600)]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.txt").write_text("mine")
    (folder / "cut.gguf").write_bytes(b"GGML" + bytes(100))
    (folder / "pickled").mkdir()
    (folder / "pickled" / "config.json").write_text(json.dumps(describe(LLAMA)))
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"never opened")
    (folder / "cut").mkdir()
    (folder / "cut" / "config.json").write_text('{"name": ')
    config = qa_file.get_config(f"file={folder / 'q.jsonl'}")
    config.tokenizer.vocab_size = 300
    with open_workdir(folder / "run", config):
        pass
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Of every file below, its bytes and when it was last written; of every folder, that it is there."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) if p.is_file() else (b"", 0)
        for p in sorted(folder.rglob("*"))
    }


def launch(main: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"launch.{main}", *args],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
    )


def ends_in_one_line(out: subprocess.CompletedProcess, message: str) -> None:
    assert out.returncode == EXIT_BAD_INPUT, out.stderr
    errors = [line for line in out.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in out.stderr and "Traceback" not in out.stderr, out.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --config=configs/quickstart.py --config.batch.rowz=3 --workdir={}/new", 'Did you mean "rows"'),
        ("train --config={}/extra.py --workdir={}/new", "nothing reads; remove or rename:\n  mesh.model"),
        ("train --config=configs/quickstart.py:seed=3 --workdir={}/new", "got unknown name 'seed'"),
        (
            "train --config=configs/quickstart.py --config.seed=3000000000 --workdir={}/new",
            "seed: got 3000000000, wanted",
        ),
        ("train --config=configs/quickstart.py --workdir={}/q.jsonl/new", "Not a directory"),
        ("train --config=configs/quickstart.py --config.rl.group_size=1 --workdir={}/new", "teaches nothing"),
        (
            "sft --config=configs/quickstart.py --config.lora.rank=999 --workdir={}/new",
            "lora.rank: got 999, want at most",
        ),
        ("train --config=configs/quickstart.py --init={}/none --workdir={}/new", "--init: no {}/none/config.json"),
        ("train --config=configs/quickstart.py --init={}/run --workdir={}/new", "--init: no {}/run/ckpt"),
        ("train --config=configs/qa_file.py:file={}/none.jsonl --workdir={}/new", "none.jsonl: no such file"),
        ("train --config=configs/qa_file.py:file={}/q.jsonl --reward=no.such:f --workdir={}/new", "cannot import"),
        (
            "train --config={}/misspelt.py:{}/q.jsonl --workdir={}/new",
            "reward.terms.exact_macth: reads ['exact_macth'], which the world",
        ),
        (
            "train --config=configs/qa_file.py:file={}/q.jsonl --config.eval.n=61 --workdir={}/new",
            "'validation' of the",
        ),
        (
            "train --workdir={}",
            "no run there (no config.json); want one of the runs in it: cut, pickled, run; or start",
        ),
        ("train --config=configs/quickstart.py --workdir={}/notes", "holds 'thesis.txt' but no config.json"),
        ("train --config=configs/quickstart.py --workdir={}/run", "holds a run of another config"),
        ("train --reward=m:f --workdir={}/run", "--reward: a run in --workdir has its own"),
        (
            "train --config=configs/quickstart.py --replay={}/notes --workdir={}/new",
            "--replay: no {}/notes/tokenizer/tokenizer.json; want the folder of a run",
        ),
        ("train --replay={}/notes --workdir={}/run", "--replay: {}/run began without --replay"),
        ("train --config=configs/quickstart.py --reward=m:f --workdir={}/new", "world does not take it"),
        ("train --config={}/few.py:{} --config.model.path={}/cut.gguf --workdir={}/new", "cut.gguf: not a GGUF file"),
        (
            "train --config={}/few.py:{} --config.model.path={}/pickled --workdir={}/new",
            "model.bin: weights as a pickle",
        ),
        (
            "ttrl --config=configs/quickstart.py --workdir={}/new",
            "reward.terms.success: reads ['success'], wanted ['answer'] at most",
        ),
        ("play --config=configs/quickstart.py --ask=Who", "its model.path is empty; want one that names a model"),
        ("export --workdir={}/run --out={}/notes", "want a new folder in one that exists"),
        ("sft --workdir={}/cut", "config.json: unreadable"),
        ("evaluate --workdir={}/run", "tokenizer"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(there, fork, command, message):
    before = contents(there)
    main, *args = command.replace("{}", str(there)).split()
    ends_in_one_line(fork(main, *args), message.replace("{}", str(there)))
    assert contents(there) == before


def test_results_of_another_seed_are_not_shown_as_this_ones(there, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"seed": 3, "minutes": {}, "details": {}}))
    before = contents(tmp_path)
    out = launch("quickstart", f"--config={there / 'few.py'}:{tmp_path.parent / 'data'}", f"--workdir={tmp_path}")
    ends_in_one_line(out, "holds results of another config or seed")
    assert contents(tmp_path) == before


def test_a_run_without_a_checkpoint_cannot_be_evaluated(there, tmp_path):
    from launch import build, policy

    shutil.copytree(there / "run", tmp_path / "run")
    plan = make_plan(json.loads((tmp_path / "run" / "config.json").read_text()))
    policy.build_codec(plan, build.build_world(plan), tmp_path / "run" / "tokenizer")
    before = contents(tmp_path)
    out = launch("evaluate", f"--workdir={tmp_path / 'run'}", "--n=4")
    ends_in_one_line(out, f"{tmp_path / 'run' / 'ckpt'}: no checkpoint there")
    assert contents(tmp_path) == before


def test_a_damaged_task_dataset_ends_the_launch_before_there_is_a_workdir(there, tmp_path):
    from envs import make_world

    data = tmp_path / "data"
    world = make_world("search", data_dir=str(data), sizes={"train": 12, "validation": 4, "test": 4})
    assert [len(world.tasks(split)) for split in ("train", "validation", "test")] == [12, 4, 4]
    (shard,) = data.glob("search_train_*/**/*.array_record*")
    shard.write_bytes(shard.read_bytes()[:-1])
    before = contents(tmp_path)
    out = launch("train", f"--config={there / 'few.py'}:{data}", f"--workdir={tmp_path / 'new'}")
    ends_in_one_line(out, shard.name)
    assert contents(tmp_path) == before
