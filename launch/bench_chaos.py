"""The workload of `python -m launch.bench chaos`: what worlds, threads and processes may do to a run, and what is left.

`episodes`: rl/loop.py whole (engine, pool, gate, a tiny policy) over arithmetic of which a fifth of the episodes is
faulted (envs/chaos.py: raise, hang, garbage, slow): what was submitted, how it ended, and what is left afterwards.
`episodes_processes`: once more with worlds in processes, some of which a fault ends.
`kills`: real processes of `launch.train`, each killed by SIGKILL at a random moment and started again, until a run of
`STEPS` steps has ended and there were enough kills; what was trained, beside an uninterrupted run. A share of its tasks
is broken, so that the quarantine is a part of what must survive. `kills_ahead`: where sampling runs ahead, and what was
trained is compared by tickets alone. `kills_processes`: with worlds in processes that end
by themselves too; none may outlive the launch that was killed.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from configs.defaults import defaults
from envs import chaos
from launch import build, policy, reinforce, runs
from launch.plan import Plan, make_plan
from launch.workdir import open_workdir
from rl import checkpoint
from rl.episodes import read_episodes

ROOT = Path(__file__).resolve().parents[1]
STEPS, GROUPS, SIZE = 24, 2, 2  # of a run that is killed
BROKEN_SEED = 0  # of the tasks that always fail
_CONFIG = """
import json, pathlib
from ml_collections import ConfigDict

def get_config(arg=""):
    return ConfigDict(json.loads(pathlib.Path(__file__).with_suffix(".json").read_text()))
"""
_START_S = 600.0  # far beyond what a launch takes


def workload(seed: int, *, kills: int = 20) -> dict[str, Any]:
    """All parts; `kills` of each staleness."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        return {
            "episodes": episodes(seed, 200, broken=0.05),
            "episodes_processes": episodes(seed, 200, broken=0.05, worlds="processes"),
            **{
                name: killed(root, to_kill(root, seed, max_staleness, worlds=worlds), kills=kills)
                for name, max_staleness, worlds, root in (
                    ("kills", 0, "threads", Path(folder) / "0"),
                    ("kills_ahead", 2, "threads", Path(folder) / "2"),
                    ("kills_processes", 0, "processes", Path(folder) / "p"),
                )
            },
        }


def tiny(folder: Path, **options: Any) -> ml_collections.ConfigDict:
    """Arithmetic behind chaos (`options` are its), and a policy of a few thousand weights whose rewards differ."""
    c = defaults()
    c.name, c.world.name = "chaos", "chaos"
    with c.unlocked():
        sizes = {"train": 80, "validation": 8, "test": 8}
        c.world.options = {"options": {"data_dir": str(folder / "data"), "sizes": sizes}, **options}
        c.tokenizer.vocab_size = 300
        c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads = 32, 1, 2, 2
        c.model.head_dim, c.model.d_ff = 16, 32
        c.batch.length, c.batch.rows, c.batch.micro_rows, c.batch.logp_chunk = 128, GROUPS * SIZE, 2, 128
        c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 4, 4, 128, (128,)
        c.rollout.threads, c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 4, 8, 128
        c.rl.steps, c.rl.groups_per_batch, c.rl.group_size, c.rl.save_every = STEPS, GROUPS, SIZE, 1
        c.reward.terms = {"success": 1.0, "repetition": 0.3}
        c.reward.options = {"repetition": {"ngram": 1}}
        c.eval.n, c.eval.every = 4, 0
    return c.lock()


def episodes(seed: int, n: int, *, share: float = 0.2, broken: float = 0.0, worlds: str = "threads") -> dict[str, Any]:
    """At least `n` episodes by the loop, `share` faulted, and `broken` of the tasks; counts, and what is left."""
    groups, size, hang_s = 5, 4, 3.0
    kinds = ["raise", "hang", "garbage", "slow", *(["exit"] if worlds == "processes" else [])]
    before, running = {*threading.enumerate()}, children()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        drawn = {"share": share, "broken": broken, "calls": 2, "seed": seed, "counts": f"{folder}/faults"}
        config, faults = tiny(Path(folder), faults=kinds, hang_s=hang_s, **drawn), chaos.Faults(kinds, **drawn)
        with config.unlocked():
            config.rollout.worlds, config.rollout.processes = worlds, 2
            config.seed, config.rollout.threads, config.rollout.call_deadline_s = seed, 8, 1.0
            config.rl.groups_per_batch, config.rl.group_size, config.batch.rows = groups, size, groups * size
            config.rl.steps, config.rl.save_every = -(-n // (groups * size)), 0
        plan = make_plan(config)
        with contextlib.redirect_stdout(sys.stderr), open_workdir(Path(folder) / "run", config) as workdir:
            parts = reinforce.build_parts(plan, workdir, None)
            with reinforce.opened(parts, steps=plan.rl.steps) as live:
                reinforce.train(parts, live, steps=plan.rl.steps)
        kept = sum(1 for _ in read_episodes(workdir))
        until = time.monotonic() + 2 * hang_s  # a hung call ends by itself here, and its thread with it
        while (left := ours({*threading.enumerate()} - before)) and time.monotonic() < until:
            time.sleep(0.05)
        injected = faults.injected
    stats = live.pool.stats()
    names = "env_errors infrastructure_errors data_errors retries late_attempts lost_threads groups_open members_open"
    return {
        "submitted": stats["members_submitted"],
        **{how: stats[f"members_{how}"] for how in ("scored", "failed", "cancelled")},
        "kept": kept,
        "faults": dict(sorted(injected.items())),
        **{name: count for name, count in stats.items() if name.startswith("fleet_")},
        **{name: stats[name] for name in names.split()},
        "steps": parts.progress.step,
        "quarantined": len(parts.options["quarantine"]),
        "live_threads": len(left),
        "child_processes": len(children() - running),
    }


def ours(threads: Iterable[threading.Thread]) -> list[str]:
    """Names of those that a run starts and must join; a library's own are not among them."""
    names = ("env-", "pool-", "feeder", "engine", "checkpoint", "fleet-")
    return sorted(thread.name for thread in threads if thread.name.startswith(names))


def children(parent: int | None = None) -> set[int]:
    """Processes that `parent` (None: this one) has started and that are there, as /proc says."""
    found, parent = set(), os.getpid() if parent is None else parent
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            _, _, rest = stat.read_text().rpartition(")")
            if int(rest.split()[1]) == parent:
                found.add(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether it has not ended; one that nobody reaps has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def to_kill(
    folder: Path, seed: int, max_staleness: int, steps: int = STEPS, worlds: str = "threads"
) -> ml_collections.ConfigDict:
    """A run of several epochs over few tasks, some of them broken: a task in quarantine comes again. In processes one
    of twenty episodes ends the process, and no member fails for it.
    """
    ends = {"faults": ["exit"], "share": 0.05, "counts": str(folder / "faults")} if worlds == "processes" else {}
    config = tiny(folder, broken=0.15, seed=BROKEN_SEED, **ends)
    with config.unlocked():
        config.rollout.worlds, config.rollout.processes = worlds, 2
        if ends:
            config.rollout.retries, config.rollout.group_retries = 20, 100
        config.world.options.options.sizes.train = 12
        config.seed, config.rl.max_staleness, config.rl.steps = seed, max_staleness, steps
    return config


def killed(
    folder: Path,
    config: ml_collections.ConfigDict,
    *,
    kills: int,
    whole: Path | None = None,
    moments: int | None = None,
    early: float = 0.25,
) -> dict[str, Any]:
    """`kills` times SIGKILL at random moments (seeded by `moments`, None: as the run) of runs of `config`, each resumed
    until it has ended, beside an uninterrupted one, which is `whole` or played first. `early` of the moments are in a
    launch's start, the others within the steps after it; without early ones each launch has committed something.

    Errors (RuntimeError): a launch that ends by anything but its last step or the signal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    plan, rng = make_plan(config), random.Random(config.seed if moments is None else moments)
    began = time.monotonic()
    if whole is None:
        whole = folder / "whole"
        launch(folder, whole).wait_for_end()
    start_s = max(5.0, time.monotonic() - began)  # most of it is the start
    step_s = _step_s(whole)
    done = {"kills": 0, "launches": 0, "runs": 0, "steps_lost_most": 0, "children": 0, "left_children": 0}
    same: list[tuple[bool, bool]] = []
    while done["kills"] < kills:
        workdir = folder / f"run{done['runs']}"
        done["runs"] += 1
        while True:
            launched = launch(folder, workdir)
            done["launches"] += 1
            if done["kills"] >= kills or not launched.kill(rng, start_s, step_s, early):
                launched.wait_for_end()
                break
            done["kills"] += 1
            done["children"] += len(launched.children)
            done["left_children"] += launched.left_children()
            lost = recorded(workdir) - max(checkpoint.steps(workdir / "ckpt"), default=0)
            done["steps_lost_most"] = max(done["steps_lost_most"], lost)
        same.append((trained(workdir) == trained(whole), _equal_states(plan, workdir, whole)))
    return {
        "max_staleness": config.rl.max_staleness,
        **done,
        "trained": sum(trained(whole).values()),
        "quarantined": len((whole / "quarantine.jsonl").read_text().splitlines()),
        "tickets_equal": all(tickets for tickets, _ in same),
        "states_equal": all(states for _, states in same),
    }


def write_config(folder: Path, config: ml_collections.ConfigDict) -> None:
    """The file that `launch` names."""
    (folder / "tiny.json").write_text(json.dumps(config.to_dict()))
    (folder / "tiny.py").write_text(_CONFIG)


def trained(workdir: Path) -> Counter[tuple[int, int]]:
    """(ticket, member) of every episode that was scored, over all steps; what was refused never was."""
    return Counter((t.ticket, t.member) for t in read_episodes(workdir) if t.status.scored)


class Launch:
    """One process of launch.train, with a group of its own."""

    def __init__(self, process: subprocess.Popen, workdir: Path, errors: Path):
        self.process, self._workdir, self._errors = process, workdir, errors
        self._steps = recorded(workdir)
        self.children: set[int] = set()  # that it had when it was killed

    def kill(self, rng: random.Random, start_s: float, step_s: float, early: float) -> bool:
        """SIGKILL at a random moment, as `killed` says. False: it had ended before that."""
        if rng.random() < early:
            until = time.monotonic() + rng.uniform(0, start_s)
            self.wait(lambda: time.monotonic() > until)
        else:
            least = 1 if early else 3  # when a step is recorded, the save of the one before the last is durable
            steps, more_s = self._steps + rng.randint(least, least + 2), rng.uniform(0, 1.5 * step_s)
            if self.wait(lambda: recorded(self._workdir) >= steps):
                time.sleep(more_s)
        if self.process.poll() is not None:
            return False
        self.children = children(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        return self.process.wait() == -signal.SIGKILL

    def left_children(self, within_s: float = 10.0) -> int:
        """How many of its children have outlived it by so much."""
        until = time.monotonic() + within_s
        while (left := sum(map(alive, self.children))) and time.monotonic() < until:
            time.sleep(0.02)
        return left

    def wait_for_end(self) -> None:
        if self.process.wait(_START_S) != 0:
            said = self._errors.read_text()[-2000:]
            raise RuntimeError(f"{self._workdir}: launch.train ended with {self.process.returncode}: {said}")

    def wait(self, what: Callable[[], bool]) -> bool:
        """Until `what()`; False: the process ended first."""
        until = time.monotonic() + _START_S
        while not what():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > until:
                self.process.kill()
                raise RuntimeError(f"{self._workdir}: no progress in {_START_S} s: {self._errors.read_text()[-2000:]}")
            time.sleep(0.002)
        return True


def launch(folder: Path, workdir: Path) -> Launch:
    """The config of `folder`, started there: in it is the compilation cache that all launches share."""
    errors = folder / "errors.txt"
    command = [sys.executable, "-m", "launch.train", f"--config={folder / 'tiny.py'}", f"--workdir={workdir}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    with errors.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=file)
    return Launch(process, workdir, errors)


def _records(workdir: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, but for a last line that is being written."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def recorded(workdir: Path) -> int:
    """The last step of metrics.jsonl."""
    return max((record["step"] for record in _records(workdir)), default=0)


def _step_s(workdir: Path) -> float:
    times = [record["time_s"] for record in _records(workdir)]
    return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def _equal_states(plan: Plan, one: Path, other: Path) -> bool:
    """Whether their last checkpoints have the same step, parameters and optimizer state, bit for bit."""
    model = policy.build_model(plan, policy.load_codec(other).vocab_size, other / "tokenizer")
    learner = build.build_rl_learner(plan, model)
    states = [runs.start_or_resume(workdir, learner, jax.random.key(0)) for workdir in (one, other)]
    (a, first), (b, second) = states
    leaves = zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True)
    return first.step == second.step and all(np.array_equal(x, y) for x, y in leaves)
