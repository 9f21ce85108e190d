"""Checkpoints: a device tree (Orbax) and a host tree (msgpack) that become visible together, or not at all.

    ckpt/00000012/  manifest.json   step, score, every leaf's name, shape and dtype, every file's size and crc32
                    host.msgpack    counters, clock, the place in the stream of tasks
                    device/         parameters and optimizer state, written by Orbax while training goes on
    ckpt/tmp-00000012/              being written; never read, removed at the next start

The commit is one rename of the whole folder: a name of digits *is* the commit marker, so a process that is killed at
any moment leaves the previous checkpoint as it was. Older ones are pruned only after that rename.

Several processes save and restore together, on a file system that all of them see: each writes and reads its part of
the device tree, and process 0 alone writes the host tree, commits and prunes.
"""

import dataclasses
import json
import logging
import math
import os
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import jax
import msgpack
import orbax.checkpoint as ocp

from rl.hosts import ALONE, Hosts

PyTree = Any
HostTree = Any  # None, bool, int, float, str, bytes, list, dict; a tuple comes back as a list

_BIG_INT = 1  # msgpack extension: NumPy's PCG64 state has 128-bit integers


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read: the message names the path and the remedy."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What one checkpoint held; `device` has the structure and the shardings that were asked for."""

    step: int
    device: PyTree
    host: HostTree
    score: float | None


def abstract(tree: PyTree) -> PyTree:
    """`tree` with each array replaced by its shape, dtype and sharding: what `restore` wants to be told."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def steps(folder: str | os.PathLike) -> list[int]:
    """Committed steps, oldest first; empty where there is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def best_step(folder: str | os.PathLike) -> int | None:
    """The committed step with the highest score (the newest of equals); None where no checkpoint has a score. Errors
    (CheckpointError): one that cannot be read, for it may be the best.
    """
    scored = [(manifest["score"], step) for step, manifest in _manifests(Path(folder)) if manifest["score"] is not None]
    return max(scored)[1] if scored else None


def restore(
    folder: str | os.PathLike,
    target: PyTree,
    *,
    step: int | None = None,
    partial: bool = False,
    hosts: Hosts = ALONE,
) -> Restored:
    """Reads one checkpoint (the latest by default) into the structure, shapes, dtypes and shardings of `target`.

    `partial=True` reads only the leaves that `target` has: `{"params": ...}` of a whole training state.
    Errors: nothing there, a file that is missing, cut or altered, other leaves or shapes: `CheckpointError`.
    """
    with hosts.telling():
        step = hosts.exchange(max(steps(folder), default=None) if step is None else step)[0]
        path, manifest, named = _matching(folder, target, step, partial, read=hosts.index == 0)
    hosts.exchange(None)  # Orbax waits for all
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        flat = reader.restore(
            path / "device",
            args=ocp.args.PyTreeRestore(
                item=named,
                restore_args=ocp.checkpoint_utils.construct_restore_args(named),
                partial_restore=partial,
            ),
        )
    device = jax.tree.unflatten(jax.tree.structure(target), [flat[name] for name in named])
    return Restored(manifest["step"], device, _unpack((path / "host.msgpack").read_bytes()), manifest["score"])


def check(folder: str | os.PathLike, target: PyTree, *, step: int | None = None, partial: bool = False) -> None:
    """Raises what `restore` would, but for altered content: manifest and sizes are looked at, and no array is read."""
    _matching(folder, target, step, partial, read=False)


def restore_host(folder: str | os.PathLike, *, step: int | None = None) -> HostTree:
    """The host tree alone (the latest by default): a resumed run needs it before it can build the device tree."""
    path, _ = _open(Path(folder), step, read=True)
    return _unpack((path / "host.msgpack").read_bytes())


class Checkpoints:
    """The writer of one folder, in each process of one run. One run at a time: the workdir's lock sees to it.

    Keeps the `keep` newest and the `keep_best` with the highest score, and besides them those whose manifest cannot be
    read. Does not cover typed PRNG keys (save their data).
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 2, keep_best: int = 1, hosts: Hosts = ALONE):
        if keep < 1 or keep_best < 0:
            raise ValueError(f"got keep={keep}, keep_best={keep_best}; want keep >= 1 and keep_best >= 0")
        self.folder = Path(folder).absolute()
        self.keep, self.keep_best = keep, keep_best
        self._hosts = hosts
        if hosts.index == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob("tmp-*"):  # of a process that was killed while it wrote or pruned
                shutil.rmtree(leftover)
        self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._unreadable: set[int] = set()  # steps that were told of in the log

    def save(self, step: int, device: PyTree, host: HostTree = None, *, score: float | None = None) -> None:
        """Takes both trees as they are now and writes them in the background; returns before they are durable.

        The caller may donate the device tree at once: Orbax holds its own host copy or reference (there is a test).

        `score`: larger is better, None = not measured. Errors: a failure of the *previous* save is raised here.
        Of several processes each saves, at the same step; the host tree and the score are those of process 0.
        """
        temporary = self.folder / f"tmp-{step:08d}"
        with self._hosts.telling():
            self.wait()
            manifest, host_bytes, named = self._checked(step, device, host, score)
            if self._hosts.index == 0:
                _make(temporary)
        self._hosts.exchange(None)  # Orbax waits for all
        try:
            self._writer.save(temporary / "device", args=ocp.args.PyTreeSave(named))
        except Exception as err:
            raise CheckpointError(_write_failed(temporary, err)) from err
        self._thread = threading.Thread(
            target=self._finish, args=(temporary, manifest, host_bytes), name="checkpoint", daemon=False
        )
        self._thread.start()

    def _checked(self, step: int, device: PyTree, host: HostTree, score: float | None) -> tuple[dict, bytes, dict]:
        """The manifest without its files, the host tree as it is now (it goes on changing), and the leaves by name."""
        if step < 0 or (self._hosts.index == 0 and step in steps(self.folder)):
            raise CheckpointError(f"{self.folder}: got step {step}, want a new step >= 0; saved: {steps(self.folder)}")
        if score is not None and not math.isfinite(score):
            raise CheckpointError(f"{self.folder}: step {step}: got score {score}, want a finite number or None")
        host_bytes = _pack(host)  # now: the host tree goes on changing
        named = _named(device)
        leaves = {name: [list(x.shape), str(x.dtype)] for name, x in named.items()}
        return {"format": 1, "step": step, "score": score, "leaves": leaves}, host_bytes, named

    def wait(self) -> None:
        """Until the last save is durable (its commit is process 0's). Errors: its failure, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, CheckpointError):  # of what follows the commit
                raise error
            raise CheckpointError(_write_failed(self.folder, error)) from error

    def close(self) -> None:
        """`wait`, then ends Orbax's threads, also when the last save failed."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _finish(self, temporary: Path, manifest: dict[str, Any], host_bytes: bytes) -> None:
        """Runs in the thread "checkpoint": durable files, manifest, rename, prune, in this order."""
        try:
            self._writer.wait_until_finished()  # in process 0: until every process has written
            if self._hosts.index:
                return
            (temporary / "host.msgpack").write_bytes(host_bytes)
            files = sorted(p for p in temporary.rglob("*") if p.is_file())
            manifest["files"] = {str(p.relative_to(temporary)): [p.stat().st_size, _crc32(p)] for p in files}
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            folders = sorted(p for p in temporary.rglob("*") if p.is_dir())
            for path in [*files, temporary / "manifest.json", *folders, temporary]:  # a folder has its files' names
                _fsync(path)
            path = self.folder / f"{manifest['step']:08d}"
            os.rename(temporary, path)
            _fsync(self.folder)  # until then the new name may be lost
            self._clean_up(path)
        except BaseException as err:  # kept for the owner thread, which raises it at the next save or at close
            self._error = err

    def _clean_up(self, path: Path) -> None:
        """What follows the commit of `path`. Errors: CheckpointError, which says that the checkpoint is there."""
        try:
            self._prune()
        except Exception as err:
            raise CheckpointError(
                f"{path}: the checkpoint was written, but older ones could not be removed "
                f"({type(err).__name__}: {err}); look at the permissions of this folder and at its disk"
            ) from err

    def _prune(self) -> None:
        found = self._readable()
        scored = sorted((m["score"], step) for step, m in found if m["score"] is not None)
        newest = [step for step, _ in found][-self.keep :]
        best = [step for _, step in scored[max(0, len(scored) - self.keep_best) :]]
        kept = {*newest, *best}
        for step, _ in found:
            if step not in kept:
                # Renamed first: a half-deleted folder must not look like a checkpoint.
                doomed = self.folder / f"tmp-pruned-{step:08d}"
                os.rename(self.folder / f"{step:08d}", doomed)
                shutil.rmtree(doomed)

    def _readable(self) -> list[tuple[int, dict[str, Any]]]:
        """Steps and manifests. An old checkpoint that is damaged is no reason to end the run that writes new ones."""
        found = []
        for step in steps(self.folder):
            try:
                found.append((step, _manifest(self.folder / f"{step:08d}")))
            except CheckpointError as err:
                if step not in self._unreadable:
                    logging.warning("%s; it is left as it is", err)
                self._unreadable.add(step)
        return found


def _named(tree: PyTree) -> dict[str, Any]:
    """Leaves by path, in the tree's own order: Orbax sees a flat dict, so no container of ours is in the format."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise CheckpointError(
            f"got {len(paths)} leaves under {len(named)} names; want unique paths without '/' in keys"
        )
    return named


def _manifests(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(step, _manifest(folder / f"{step:08d}")) for step in steps(folder)]


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["format"] != 1:
            raise CheckpointError(
                f"{path}: got checkpoint format {manifest['format']}, want 1; use the version that wrote it"
            )
        missing = [name for name in ("step", "score", "leaves", "files") if name not in manifest]
        if missing:
            raise CheckpointError(f"{path}: manifest.json has no {missing}; {_REMEDY}")
        return manifest
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as err:
        raise CheckpointError(f"{path}: no readable manifest.json ({type(err).__name__}); {_REMEDY}") from err


def _matching(
    folder: str | os.PathLike, target: PyTree, step: int | None, partial: bool, *, read: bool
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """`_open`, and the leaves of `target` by name, which are those that were saved."""
    path, manifest = _open(Path(folder), step, read=read)
    named = _named(target)
    _check_leaves(path, manifest["leaves"], named, partial)
    return path, manifest, named


_REMEDY = "the checkpoint is damaged: move this folder away to use the one before it"


def _open(folder: Path, step: int | None, *, read: bool) -> tuple[Path, dict[str, Any]]:
    """The folder and the manifest of one checkpoint whose every file is as it was written.

    `read`: the checksums too. Of several processes one does it for all, or each would read what the others need.
    """
    folder = folder.absolute()
    present = steps(folder)
    if not present:
        raise CheckpointError(f"{folder}: no checkpoint there; want a folder that a run saved to (WORKDIR/ckpt)")
    step = present[-1] if step is None else step
    if step not in present:
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; saved: {present}")
    path = folder / f"{step:08d}"
    manifest = _manifest(path)
    for name, (size, crc) in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; {_REMEDY}")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file}: got {file.stat().st_size} bytes, want {size}; {_REMEDY}")
        if read and _crc32(file) != crc:
            raise CheckpointError(f"{file}: content differs from its checksum; {_REMEDY}")
    return path, manifest


def _check_leaves(path: Path, saved: dict[str, Any], named: dict[str, Any], partial: bool) -> None:
    missing = [name for name in named if name not in saved]
    extra = [] if partial else [name for name in saved if name not in named]
    other = [
        f"{name} is {saved[name][1]}{saved[name][0]}, want {x.dtype}{list(x.shape)}"
        for name, x in named.items()
        if name in saved and saved[name] != [list(x.shape), str(x.dtype)]
    ]
    problems = [f"no {n}" for n in missing] + [f"unexpected {n}" for n in extra] + other
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise CheckpointError(f"{path}: {shown}. Use the config of the run that wrote it")


def _pack(host: HostTree) -> bytes:
    def big(value: Any) -> msgpack.ExtType:
        if type(value) is int:
            return msgpack.ExtType(_BIG_INT, str(value).encode())
        raise CheckpointError(
            f"host tree: got a {type(value).__name__}, want None, bool, int, float, str, bytes, list, dict"
        )

    return msgpack.packb(host, default=big, use_bin_type=True)


def _unpack(data: bytes) -> HostTree:
    def ext(code: int, payload: bytes) -> int:
        if code != _BIG_INT:
            raise CheckpointError(
                f"host tree: got msgpack extension {code}, want {_BIG_INT}; use the version that wrote it"
            )
        return int(payload)

    return msgpack.unpackb(data, ext_hook=ext, strict_map_key=False)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as err:
        raise CheckpointError(_write_failed(folder, err)) from err


def _write_failed(path: Path, err: BaseException) -> str:
    what = f"{type(err).__name__}: {err}"
    return f"{path}: the checkpoint was not written ({what}); is the disk full? earlier ones are intact"
