"""Law: on a mesh of several devices, and in two processes, a run is the run of one device: the same ids, masks and
statuses by ticket, the same metrics and parameters within 1e-6. It stops for a signal to one process at the same step
in both, also while a world of one hangs, and one process goes on from their checkpoint.

The processes are real: `python -m launch.sft`, and `launch.train` that starts from it, with --coordinator, over gloo.
What they play is arithmetic that nobody can do; the judge gives any two answers different scores, but for one task
whose groups are equal: that ticket is refused, so that one process refills and the other does not.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.defaults import defaults
from envs import make_world
from launch import build, cli, policy, runs, sft, train
from launch.plan import make_plan
from launch.workdir import open_workdir
from rl import checkpoint
from rl.curriculum import TaskStream
from rl.episodes import read_episodes

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240  # far beyond what it takes: a busy machine is slow
STEPS, GROUPS, SIZE = 4, 4, 2
REFUSED, GATE = 2, 9  # tickets: one that is refused, and one of step 3 that hangs until the test lets it go

JUDGE = """
import pathlib, time, zlib

HERE = pathlib.Path(__file__).parent

def score(answer, answers):
    refused, gate = (HERE / "special").read_text().split()
    if answers[0] == gate:
        (HERE / "asked").touch()
    while answers[0] == gate and not (HERE / "go").exists():
        time.sleep(0.05)
    return 0.25 if answers[0] == refused else zlib.crc32(answer.encode()) % 9973 / 9973
"""


CONFIG = """
import json, pathlib
from ml_collections import ConfigDict

def get_config(arg=""):
    return ConfigDict(json.loads(pathlib.Path(__file__).with_suffix(".json").read_text()))
"""


def tiny(folder: Path):
    """A policy of a few thousand weights, answering as many questions as there are tickets."""
    c = defaults()
    c.world.name = "qa"
    with c.unlocked():
        c.world.options = {"file": str(folder / "q.jsonl"), "tag": None, "reward": "judge_of_processes:score"}
        c.world.options.question_key = "prompt"
        c.tokenizer.vocab_size = 300
        c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads = 32, 2, 2, 2
        c.model.head_dim, c.model.d_ff = 16, 32
        c.mesh.data = 2
        c.batch.length, c.batch.rows, c.batch.micro_rows, c.batch.logp_chunk = 96, 8, 2, 96
        c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 4, 4, 96, (96,)
        c.rollout.threads, c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 4, 6, 96
        c.rollout.call_deadline_s = float(WAIT_S)
        c.rl.steps, c.rl.groups_per_batch, c.rl.group_size, c.rl.save_every = STEPS, GROUPS, SIZE, 2
        c.rl.learning_rate = 3e-5  # Adam makes a whole step of a gradient that is zero but for rounding
        c.rl.drop_equal_groups = True
        c.reward.terms = {"success": 1.0, "score": 0.3}
        c.eval.n, c.eval.every = 4, 2
    return c.lock()


def warm_start(folder: Path):
    """Two steps on demonstrations of the search world, by the same policy."""
    c = tiny(folder).copy_and_resolve_references()
    with c.unlocked():
        c.world.name = "search"
        c.world.options = {"data_dir": str(folder / "data"), "sizes": {"train": 40, "validation": 8, "test": 8}}
        c.reward.terms = {"success": 1.0}
        c.demos.n, c.sft.steps, c.sft.rows, c.sft.micro_rows, c.sft.length = 20, 2, 4, 2, 256
        c.sft.learning_rate, c.sft.warmup_steps = 1e-4, 0
    return c.lock()


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """The folder, the config, a warm start by two processes, and the run of one device that starts from it."""
    folder = tmp_path_factory.mktemp("processes")
    rows = [{"prompt": f"{i} + 1 = ?", "answers": [str(i + 1)]} for i in range(80)]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "judge_of_processes.py").write_text(JUDGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        config = tiny(folder)
        plan = make_plan(config)
        stream = TaskStream(make_world("qa", **plan.world_options).tasks("train"), plan.seed)
        (folder / "special").write_text(" ".join(stream.draw(t).data["answers"][0] for t in (REFUSED, GATE)))
        (folder / "go").touch()
        processes = start(folder, warm_start(folder), folder / "sft", "sft")
        try:
            codes = [process.wait(timeout=WAIT_S) for process in processes]
        finally:
            [process.kill() for process in processes]
        assert codes == [0, 0], [(folder / f"err{i}").read_text()[-3000:] for i in range(2)]
        play(config, folder / "alone", folder / "sft", mesh=(1, 1, 1))
        yield folder, config


def play(config, workdir: Path, init: Path | None, *, mesh) -> None:
    with open_workdir(workdir, config) as folder:
        train.run(dataclasses.replace(make_plan(config), mesh=mesh), folder, init)


def story(workdir: Path, last: int = STEPS) -> dict:
    return {
        (t.ticket, t.member): (t.task_id, t.status, [(r.tokens.tolist(), r.action_mask.tolist()) for r in t.rows])
        for t in read_episodes(workdir, last=last)
    }


def evaluated(workdir: Path, last: int = STEPS) -> list:
    """Sampled and greedy, under one ticket."""
    played = read_episodes(workdir, folder="episodes_eval", last=last)
    return sorted((t.ticket, t.task_id, t.status.value, t.rows[0].tokens.tolist()) for t in played)


def records(workdir: Path) -> dict[int, dict]:
    return {r["step"]: r for r in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())}


def assert_equal_runs(config, cut: Path, whole: Path) -> None:
    assert story(cut) == story(whole) and len(story(whole)) == (STEPS * GROUPS + 1) * SIZE
    assert len(list(read_episodes(cut))) == len(story(cut))
    assert evaluated(cut) == evaluated(whole) and len(evaluated(whole)) == 2 * 2 * 4
    ours, theirs = records(cut), records(whole)
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    for step, record in theirs.items():
        for name, value in record.items():
            if name.startswith(("episode/", "status/", "reward", "eval/", "loss", "policy/", "optim/")):
                assert ours[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)
    assert all(record["optim/grad_norm"] > 1e-3 for record in ours.values())
    assert all(record["policy/engine_gap_max"] <= 1e-4 for record in ours.values())
    plan = dataclasses.replace(make_plan(config), mesh=(1, 1, 1))
    learner = build.build_rl_learner(
        plan, policy.build_model(plan, policy.load_codec(whole).vocab_size, whole / "tokenizer")
    )
    states = [runs.start_or_resume(workdir, learner, jax.random.key(0)) for workdir in (cut, whole)]
    for a, b in zip(*(jax.tree.leaves(state.params) for state, _ in states), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    first, second = (dataclasses.replace(progress, trained_s=0.0) for _, progress in states)
    assert first == second and first.ticket == STEPS * GROUPS + 1


def test_a_mesh_of_eight_devices_makes_the_same_run(there):
    folder, config = there
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.batch.micro_rows = 4
    play(config, folder / "mesh", folder / "sft", mesh=(2, 2, 2))
    assert_equal_runs(config, folder / "mesh", folder / "alone")


def test_two_processes_make_the_same_warm_start(there):
    folder, _ = there
    config = warm_start(folder)
    plan = dataclasses.replace(make_plan(config), mesh=(1, 1, 1))
    with open_workdir(folder / "sft_alone", config) as workdir:
        sft.run(plan, workdir)
    ours, theirs = records(folder / "sft"), records(folder / "sft_alone")
    assert list(ours) == list(theirs) == [1, 2] and ours[2]["loss"] == pytest.approx(theirs[2]["loss"], rel=1e-5)
    learner = build.build_sft_learner(
        plan, policy.build_model(plan, policy.load_codec(folder / "sft").vocab_size, folder / "sft" / "tokenizer")
    )
    two, one = (jax.tree.leaves(runs.load_params(folder / run / "ckpt", learner)) for run in ("sft", "sft_alone"))
    begun = jax.tree.leaves(learner.init_params(jax.random.fold_in(jax.random.key(plan.seed), 0)))
    assert any(np.abs(a - b).max() > 5e-5 for a, b in zip(begun, two, strict=True))  # it was trained
    for a, b in zip(two, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def start(folder: Path, config, workdir: Path, stage: str, *args: str) -> list[subprocess.Popen]:
    """Two processes of one run, each with one device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "tiny.json").write_text(json.dumps(config.to_dict()))
    (folder / "tiny.py").write_text(CONFIG)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1"),
    }
    command = [sys.executable, "-m", f"launch.{stage}", f"--config={folder / 'tiny.py'}", f"--workdir={workdir}"]
    command += [*args, f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [
        subprocess.Popen(
            [*command, f"--process_id={i}"], cwd=ROOT, env=env, stdout=-1, stderr=(folder / f"err{i}").open("w")
        )
        for i in range(2)
    ]


def wait_for(what, processes: list[subprocess.Popen], folder: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not what():
        dead = [p for p in processes if p.poll() is not None]
        assert not dead and time.monotonic() < until, [(folder / f"err{i}").read_text()[-3000:] for i in range(2)]
        time.sleep(0.05)


def test_two_processes_make_the_same_run_and_one_goes_on_from_it(there):
    folder, config = there
    workdir = folder / "two"
    (folder / "go").unlink()  # ticket 9, a task of process 1, holds step 3 up
    (folder / "asked").unlink()
    processes = start(folder, config, workdir, "train", f"--init={folder / 'sft'}")
    try:
        wait_for((folder / "asked").exists, processes, folder)  # process 1 is in step 3, and its world hangs
        processes[0].send_signal(signal.SIGTERM)  # the other: it does not wait for a world that is not its own
        out = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    finally:
        (folder / "go").touch()
        [process.kill() for process in processes]
    errors = [(folder / f"err{i}").read_text() for i in range(2)]
    assert [p.returncode for p in processes] == [cli.EXIT_STOPPED] * 2, errors
    assert all(f"stopped at step 2 of {STEPS}" in error for error in errors)
    assert b"step     2" in out[0] and b"step" not in out[1]  # process 0 prints

    assert checkpoint.steps(workdir / "ckpt")[-1] == 2
    assert story(workdir, 2) == story(folder / "alone", 2)
    assert evaluated(workdir, 2) == evaluated(folder / "alone", 2)  # each plays half of the tasks
    own = [{t.ticket for t in read_episodes(workdir) if t.ticket % 2 == i} for i in range(2)]
    assert own == [{0, 2, 4, 6, 8}, {1, 3, 5, 7}]  # a refill on one side: ticket 4 for 2
    parts = sorted(path.name for path in (workdir / "episodes").iterdir())
    assert parts == [f"{step:08d}{part}.array_record" for step in (1, 2) for part in (".1", "")]

    play(config, workdir, None, mesh=(2, 1, 1))  # one process, on the same mesh
    assert_equal_runs(config, workdir, folder / "alone")
