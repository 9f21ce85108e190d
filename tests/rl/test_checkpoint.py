"""Law: what is restored is what was saved, both trees of one step; whatever stops a save leaves the one before."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl import checkpoint
from rl.checkpoint import CheckpointError, Checkpoints

ROOT = Path(__file__).resolve().parents[2]


def small_state(fill: float = 1.0):
    params = {"w": jnp.full((4, 6), fill), "layers": [jnp.full((2,), fill), jnp.arange(3)]}
    return {"params": params, "opt_state": optax.adamw(1e-3).init(params), "step": jnp.int32(7)}


def equal(a, b) -> bool:
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((np.asarray(x) == np.asarray(y)).all()), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(same))


def test_both_trees_come_back(tmp_path):
    host = {"rng": 2**127 + 3, "episodes": [b"\x00\xff", b""], "seen": {"a": 1, 3: None}, "nan": float("nan")}
    with Checkpoints(tmp_path) as saver:
        saver.save(3, small_state(0.1), host, score=0.25)
        host["seen"]["a"] = 99  # the save holds a copy
    got = checkpoint.restore(tmp_path, checkpoint.abstract(small_state()))
    assert equal(got.device, small_state(0.1)) and got.step == 3 and got.score == 0.25
    assert np.isnan(got.host.pop("nan"))
    assert got.host == {"rng": 2**127 + 3, "episodes": [b"\x00\xff", b""], "seen": {"a": 1, 3: None}}
    assert got.host == {k: v for k, v in checkpoint.restore_host(tmp_path).items() if k != "nan"}
    assert not any(t.name == "checkpoint" for t in threading.enumerate())


def test_partial_restore_reads_only_what_is_asked(tmp_path):
    with Checkpoints(tmp_path) as saver:
        saver.save(1, small_state(2.0))
    want = {"params": checkpoint.abstract(small_state()["params"])}
    assert equal(checkpoint.restore(tmp_path, want, partial=True).device["params"], small_state(2.0)["params"])
    with pytest.raises(CheckpointError, match="unexpected opt_state"):
        checkpoint.restore(tmp_path, want)


def test_restores_into_the_shardings_asked_for(tmp_path):
    assert len(jax.devices()) >= 2, "tests/conftest.py asks for eight fake devices"
    with Checkpoints(tmp_path) as saver:
        saver.save(1, {"w": jnp.arange(24.0).reshape(4, 6)})
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("fsdp",)), PartitionSpec("fsdp"))
    got = checkpoint.restore(tmp_path, {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=sharding)}).device["w"]
    assert got.sharding == sharding
    np.testing.assert_array_equal(got, np.arange(24.0).reshape(4, 6))


def test_a_donated_buffer_does_not_change_the_save(tmp_path):
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpoints(tmp_path) as saver:
        x = jnp.zeros((1 << 20,))
        saver.save(1, {"x": x})
        for _ in range(20):
            x = bump(x)
        x.block_until_ready()
    target = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)}
    assert float(jnp.abs(checkpoint.restore(tmp_path, target).device["x"]).max()) == 0


def test_keeps_the_newest_and_the_best(tmp_path):
    # scores .1 .9 .3 - .9 .2: the newest of the two best is 5; the newest two are 5 and 6
    with Checkpoints(tmp_path, keep=2, keep_best=1) as saver:
        for step, score in enumerate([0.1, 0.9, 0.3, None, 0.9, 0.2], start=1):
            saver.save(step, {"x": jnp.float32(step)}, score=score)
            if step == 4:
                saver.wait()
                assert checkpoint.steps(tmp_path) == [2, 3, 4] and checkpoint.best_step(tmp_path) == 2
    assert checkpoint.steps(tmp_path) == [5, 6] and checkpoint.best_step(tmp_path) == 5
    with Checkpoints(tmp_path, keep=1, keep_best=0) as saver:
        saver.save(7, {"x": jnp.float32(7)}, score=0.0)
    assert checkpoint.steps(tmp_path) == [7]
    with Checkpoints(tmp_path) as saver, pytest.raises(CheckpointError, match=r"got step 7, want a new step"):
        saver.save(7, {"x": jnp.float32(7)})
    with Checkpoints(tmp_path) as saver, pytest.raises(CheckpointError, match="finite"):
        saver.save(8, {"x": jnp.float32(7)}, score=float("nan"))


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        checkpoint.restore(tmp_path / "none", {})
    with Checkpoints(tmp_path) as saver:
        saver.save(2, {"x": jnp.float32(1)})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; saved: \[2\]"):
        checkpoint.restore(tmp_path, {}, step=5)
    assert checkpoint.best_step(tmp_path) is None


def test_another_shape_dtype_or_tree_is_refused(tmp_path):
    with Checkpoints(tmp_path) as saver:
        saver.save(1, {"x": jnp.zeros((2, 3)), "y": jnp.int32(1)})
    good = checkpoint.abstract({"x": jnp.zeros((2, 3)), "y": jnp.int32(1)})
    for bad, message in [
        ({**good, "x": checkpoint.abstract(jnp.zeros((3, 2)))}, r"x is float32\[2, 3\], want float32\[3, 2\]"),
        ({**good, "x": checkpoint.abstract(jnp.zeros((2, 3), jnp.bfloat16))}, "want bfloat16"),
        ({**good, "z": good["y"]}, "no z"),
        ({"x": good["x"]}, "unexpected y"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.restore(tmp_path, bad)


def test_every_damaged_file_is_named(tmp_path):
    """Each file in turn cut, altered and removed; what Orbax itself would read without a word is refused too."""
    state = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    with Checkpoints(tmp_path) as saver:
        saver.save(1, state, {"n": 1})
    target = checkpoint.abstract(state)
    folder = tmp_path / "00000001"
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert len(files) > 4
    for file in files:
        whole = file.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
        for damaged in (whole[:middle], flipped, None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="00000001"):
                checkpoint.restore(tmp_path, target)
            file.write_bytes(whole)
    assert equal(checkpoint.restore(tmp_path, target).device, state)


@pytest.mark.parametrize("point", ["rename", "write_bytes", "fsync"])
def test_a_failed_save_is_raised_at_the_next_and_at_close(tmp_path, monkeypatch, point):
    saver = Checkpoints(tmp_path)
    saver.save(1, {"x": jnp.float32(1)})
    saver.wait()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(*{"write_bytes": (Path, "write_bytes")}.get(point, (os, point)), fail)
        saver.save(2, {"x": jnp.float32(2)})
        with pytest.raises(CheckpointError, match="No space left"):
            saver.save(3, {"x": jnp.float32(3)})
        saver = Checkpoints(tmp_path)
        saver.save(4, {"x": jnp.float32(4)})
        with pytest.raises(CheckpointError, match="earlier ones are intact"):
            saver.close()
    assert checkpoint.steps(tmp_path) == [1]
    with Checkpoints(tmp_path) as saver:
        assert list(tmp_path.glob("tmp-*")) == []
        saver.save(2, {"x": jnp.float32(2)})
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_an_old_checkpoint_that_is_damaged_stops_no_save(tmp_path, caplog):
    """It is left as it is, told of once, and counts neither as one of the newest nor as the best."""
    with Checkpoints(tmp_path, keep=2) as saver:
        saver.save(1, {"x": jnp.float32(1)}, score=0.9)
        saver.wait()
        (tmp_path / "00000001" / "manifest.json").write_text("{")
        for step in (2, 3, 4, 5):
            saver.save(step, {"x": jnp.float32(step)}, score=0.1 * step)
    assert checkpoint.steps(tmp_path) == [1, 4, 5]
    told = [record.getMessage() for record in caplog.records if "00000001" in record.getMessage()]
    assert len(told) == 1 and "no readable manifest.json" in told[0] and "left as it is" in told[0]
    assert float(checkpoint.restore(tmp_path, checkpoint.abstract({"x": jnp.float32(0)})).device["x"]) == 5


def test_what_fails_after_the_commit_does_not_say_that_nothing_was_written(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    saver = Checkpoints(tmp_path, keep=1, keep_best=0)
    saver.save(1, {"x": jnp.float32(1)})
    saver.wait()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", fail)
    saver.save(2, {"x": jnp.float32(2)})
    with pytest.raises(
        CheckpointError, match="00000002: the checkpoint was written, but .*Permission denied"
    ) as raised:
        saver.close()
    assert "not written" not in str(raised.value) and checkpoint.steps(tmp_path) == [2]


def test_a_name_that_is_not_durable_is_not_written(tmp_path, monkeypatch):
    def full(path, fsync=checkpoint._fsync):
        if path == tmp_path:
            raise OSError(28, "No space left on device")
        fsync(path)

    monkeypatch.setattr(checkpoint, "_fsync", full)
    saver = Checkpoints(tmp_path)
    saver.save(1, {"x": jnp.float32(1)})
    with pytest.raises(CheckpointError, match="the checkpoint was not written .*No space left"):
        saver.close()


def test_every_folder_is_durable_before_the_name_is(tmp_path, monkeypatch):
    """What is in a folder is there after a crash only if the folder itself was written."""
    did, fsync, rename = [], checkpoint._fsync, os.rename
    monkeypatch.setattr(checkpoint, "_fsync", lambda path: (did.append(path), fsync(path)))
    monkeypatch.setattr(checkpoint.os, "rename", lambda old, new: (rename(old, new), did.append(Path(new))))
    with Checkpoints(tmp_path) as saver:
        saver.save(1, {"x": jnp.float32(1)})
    made = tmp_path / "00000001"
    synced = [path.relative_to(tmp_path).parts[1:] for path in did[: did.index(made)] if tmp_path in path.parents]
    assert {path.relative_to(made).parts for path in made.rglob("*")} | {()} == {*synced}
    assert any(path.is_dir() for path in made.rglob("*")) and did[-1] == tmp_path


def test_only_folders_are_checkpoints_and_a_manifest_is_whole(tmp_path):
    with Checkpoints(tmp_path) as saver:
        saver.save(1, {"x": jnp.float32(1)})
    (tmp_path / "7").write_text("a note")
    target = checkpoint.abstract({"x": jnp.float32(0)})
    assert checkpoint.steps(tmp_path) == [1] and checkpoint.restore(tmp_path, target).step == 1
    manifest = tmp_path / "00000001" / "manifest.json"
    whole = json.loads(manifest.read_text())
    for name in ("step", "score", "leaves", "files"):
        manifest.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        with pytest.raises(CheckpointError, match=f"manifest.json has no \\['{name}'\\]; the checkpoint is damaged"):
            checkpoint.restore(tmp_path, target)


_WRITER = """
import sys, jax.numpy as jnp
from rl.checkpoint import Checkpoints, steps
saver = Checkpoints(sys.argv[1], keep=1, keep_best=0)
first = max(steps(sys.argv[1]), default=0) + 1
for step in range(first, 10**6):
    saver.save(step, {"x": jnp.full((1 << 18,), float(step))}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", [0])
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path, seed):
    rng = np.random.default_rng(seed)
    target = {"x": jax.ShapeDtypeStruct((1 << 18,), jnp.float32, sharding=jnp.zeros(1).sharding)}
    last = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started = [int(child.stdout.readline()) for _ in range(3)]  # a save after the first has committed one before it
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        got = checkpoint.restore(tmp_path, target)
        assert got.step >= started[1] > last, "a committed checkpoint was lost"
        assert got.host == {"step": got.step} and bool((got.device["x"] == got.step).all())
        last = got.step


_FULL_DISK = """
import resource, signal, sys, jax.numpy as jnp, numpy as np
from rl.checkpoint import Checkpoints, CheckpointError, steps
saver = Checkpoints(sys.argv[1])
saver.save(1, {"x": jnp.zeros(3)}); saver.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    saver.save(2, {"x": jnp.asarray(np.random.default_rng(0).normal(size=200_000))})
    saver.close()
except CheckpointError as err:
    print("refused", steps(sys.argv[1]), err)
"""


def test_a_real_write_error_is_raised(tmp_path):
    assert hasattr(resource, "RLIMIT_FSIZE")
    out = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert out.stdout.startswith("refused [1]"), out.stdout + out.stderr
