"""What every training launch does around its loop: start or resume, record, save, stop on a signal."""

import contextlib
import dataclasses
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from envs.base import World
from launch import build, policy, recipe
from launch.cli import EXIT_STOPPED
from launch.plan import Plan
from launch.workdir import config_of
from models.codec import Codec
from models.config import HEADS, Lora, ModelConfig
from rl import checkpoint
from rl.curriculum import admits
from rl.hosts import ALONE, Hosts
from rl.learner import Learner, TrainState
from rl.loop import Progress
from rl.metrics.alarms import Limits
from rl.monitor import Monitor
from rl.rewards.compose import RewardTerm
from rl.timeline import Timeline


class Stopped(Exception):
    """A signal ended the run before its last step; what steps it made are saved, and `--workdir` alone goes on."""


def note_init(init: Path, workdir: Path) -> None:
    """Written before anything is copied: a start that breaks off is not taken for a start from nothing."""
    (workdir / "init.txt").write_text(f"{init}\n")


def copy_tokenizer(init: Path, workdir: Path) -> None:
    """The policy that `init` trained reads and writes by its tokenizer; a run keeps a whole copy.

    Errors (ValueError): the workdir has another tokenizer already.
    """
    source, target = init / "tokenizer", workdir / "tokenizer"
    if not target.exists():
        temporary = workdir / "tokenizer.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary)
        temporary.rename(target)
    elif (source / "tokenizer.json").read_bytes() != (target / "tokenizer.json").read_bytes():
        raise ValueError(f"{target}: another tokenizer than that of --init={init}; start in a new --workdir")


def start_codec(plan: Plan, world: World, workdir: Path, init: Path | None) -> Codec:
    """The codec of a run that begins or resumes: what `init` reads and writes by is copied, and noted first."""
    if init is not None:
        note_init(init, workdir)
        copy_tokenizer(init, workdir)
    return policy.build_codec(plan, world, workdir / "tokenizer")


def check_start(plan: Plan, workdir: Path, init: Path | None) -> None:
    """That `init` holds a policy of the plan's shape, or that `workdir` needs none.

    No weight is read. Errors: ValueError.
    """
    if init is not None:
        codec = policy.load_codec(init)
        learner = _init_learner(plan, policy.build_model(plan, codec.vocab_size, init / "tokenizer"), init)
        checkpoint.check(init / "ckpt", **_params_of(init / "ckpt", learner))
    elif (workdir / "init.txt").exists() and not checkpoint.steps(workdir / "init"):
        named = (workdir / "init.txt").read_text().strip()
        raise ValueError(f"{workdir}: its start broke off before --init={named} was copied; give --init again")


def starting_params(
    plan: Plan,
    model: ModelConfig,
    workdir: Path,
    init: Path | None,
    learner: Learner,
    key: jax.Array,
    hosts: Hosts = ALONE,
) -> Any:
    """The parameters at step 0: those kept in `workdir`/init by an earlier launch, else the best of `init`, else those
    of model.path, else new.

    They are kept, so that a resumed run, and its reference policy, need neither `--init` nor the folder that it named.
    What `init` trained as adapters is merged, and this plan's own adapters are fresh. They lie on the learner's
    shardings, and no optimizer's state is made for them.
    """
    kept = workdir / "init"
    if saved(kept, hosts):
        return load_params(kept, learner, hosts=hosts)
    if init is None:
        start = policy.fresh_start(plan, model, key)
    else:
        start = policy.with_adapters(plan, model, load_init(plan, model, init, hosts), key)
    own = [head for head in HEADS if head in learner.state_shardings.params]
    start = policy.with_heads(own, model, start, key)
    params = learner.init_params(start)
    with checkpoint.Checkpoints(kept, hosts=hosts) as checkpoints:
        checkpoints.save(0, {"params": params})
    return params


def open_policy(plan: Plan, workdir: Path | None, *, best: bool = True) -> tuple[Codec, ModelConfig, Any]:
    """Codec, model and parameters of a run's best (or newest) checkpoint; without a run, of the plan's model.path.

    Errors (ValueError, OSError): no policy there, or one that is not whole.
    """
    if workdir is None:
        return *policy.describe(plan), policy.load_weights(plan)
    codec = policy.load_codec(workdir)
    model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
    return codec, model, load_params(workdir / "ckpt", build.build_sft_learner(plan, model), best=best)


def load_init(plan: Plan, model: ModelConfig, init: Path, hosts: Hosts = ALONE) -> Any:
    """The best parameters of the run in `init`, with the adapters that *its* config says they have."""
    return load_params(init / "ckpt", _init_learner(plan, model, init), hosts=hosts)


def _init_learner(plan: Plan, model: ModelConfig, init: Path) -> Learner:
    section = config_of(init).get("lora", {"rank": 0})  # absent: written before there were adapters
    return build.build_sft_learner(dataclasses.replace(plan, lora=Lora(**section) if section["rank"] else None), model)


def load_params(folder: Path, learner: Learner, *, best: bool = True, hosts: Hosts = ALONE) -> Any:
    """Parameters of the best checkpoint in `folder` (the newest, if `best` is False or none has a score)."""
    return checkpoint.restore(folder, **_params_of(folder, learner, best=best), hosts=hosts).device["params"]


def _params_of(folder: Path, learner: Learner, *, best: bool = True) -> dict[str, Any]:
    """What to restore, and of which step, for the parameters alone."""
    target = {"params": _abstract_state(learner).params}
    return {"target": target, "step": checkpoint.best_step(folder) if best else None, "partial": True}


def start_or_resume(
    workdir: Path,
    learner: Learner,
    start: Any,
    *,
    donate: bool = False,
    on_host: Callable[[dict[str, Any]], None] = lambda host: None,
    hosts: Hosts = ALONE,
) -> tuple[TrainState, Progress]:
    """The newest checkpoint of `workdir` (its host tree goes to `on_host`), or step 0 from `start` (key or weights).

    `donate`: the state may take the buffers of `start`, which nobody reads after this.
    What is on the host is dealt again, whatever the processes that saved it: `Progress` says which tickets are drawn.
    """
    if not saved(workdir / "ckpt", hosts):
        return learner.init_state(start, donate=donate), Progress()
    restored = checkpoint.restore(workdir / "ckpt", _abstract_state(learner), hosts=hosts)
    on_host(restored.host)
    return restored.device, Progress(**restored.host["progress"])


def start_rl(
    plan: Plan,
    model: ModelConfig,
    workdir: Path,
    init: Path | None,
    learner: Learner,
    *,
    on_host: Callable[[dict[str, Any]], None] = lambda host: None,
    hosts: Hosts = ALONE,
) -> tuple[TrainState, Progress, Any | None]:
    """`start_or_resume` of a run of RL, and its reference: the parameters at step 0. None: there is no penalty, or the
    state holds the reference, the base of adapters or one that is refreshed.
    """
    start, wants_ref = None, plan.rl.kl_coef > 0 and plan.lora is None and not plan.rl.ref_every
    if wants_ref or not saved(workdir / "ckpt", hosts):
        key = jax.random.fold_in(jax.random.key(plan.seed), 0)
        start = starting_params(plan, model, workdir, init, learner, key, hosts)
    state, progress = start_or_resume(workdir, learner, start, donate=not wants_ref, on_host=on_host, hosts=hosts)
    return state, progress, start if wants_ref else None


def learning_options(plan: Plan, terms: Sequence[RewardTerm]) -> dict[str, Any]:
    """What the plan tells `rl.loop.train` of what is learnt, whoever plays, and for however long."""
    return {
        "terms": terms,
        "admit": partial(admits, low=plan.curriculum.admit_low, high=plan.curriculum.admit_high),
        "excluded": recipe.excluded(plan),
        "groups_per_batch": plan.rl.groups_per_batch,
        "group_size": plan.rl.group_size,
        "credit": recipe.build_credit(plan, terms),
        "drop_equal_groups": plan.rl.drop_equal_groups,
        "filter_overlong": plan.rl.filter_overlong,
        "save_every": plan.rl.save_every,
        "ref_every": plan.rl.ref_every,
        "minibatches": plan.rl.minibatches,
    }


def saved(folder: Path, hosts: Hosts) -> bool:
    """Whether there is a checkpoint, as process 0 sees it: a shared file system may show the others less."""
    return hosts.exchange(bool(checkpoint.steps(folder)))[0]


def _abstract_state(learner: Learner) -> TrainState:
    shapes = jax.eval_shape(learner.init_state, jax.random.key(0))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, learner.state_shardings
    )


def saver(checkpoints: checkpoint.Checkpoints, host: Callable[[Progress], dict[str, Any]] = lambda progress: {}):
    """save(state, progress, score): device and host state in one commit."""

    def save(state: TrainState, progress: Progress, score: float | None) -> None:
        checkpoints.save(
            progress.step, state, {"progress": dataclasses.asdict(progress), **host(progress)}, score=score
        )

    return save


@contextlib.contextmanager
def recording(
    workdir: Path,
    progress: Progress,
    steps: int,
    *,
    console_every: int = 1,
    limits: Limits | None = None,
    hosts: Hosts = ALONE,
) -> Iterator[Callable]:
    """log(step, metrics) to metrics.jsonl, TensorBoard, the console (every so many steps) and a bar on the terminal.

    Process 0 alone records: what it is given is everybody's. Alarms ring by `limits`, if given.
    """
    if hosts.index:
        yield lambda step, metrics: None
        return
    monitor = Monitor(workdir, first_step=progress.step + 1, console_every=console_every, limits=limits)
    try:
        with tqdm(total=steps, initial=progress.step, unit="step", disable=None, dynamic_ncols=True) as bar:

            def log(step: int, metrics: dict[str, Any]) -> None:
                monitor.write(step, metrics)
                bar.update(step - bar.n)

            yield log
    finally:
        monitor.close()


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """True once SIGTERM or SIGINT has come: the loop ends after its step, with a checkpoint. A second signal, of either
    kind, kills.
    """
    asked, numbers = threading.Event(), (signal.SIGTERM, signal.SIGINT)

    def ask(*_) -> None:
        asked.set()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in numbers} if here else {}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def want_finished(progress: Progress, steps: int) -> None:
    """Raises Stopped when the loop ended early."""
    if progress.step < steps:
        saved_what = "the checkpoint is written" if progress.step else "nothing was there to save"
        raise Stopped(f"stopped at step {progress.step} of {steps}; {saved_what}")


@contextlib.contextmanager
def exits_when_stopped(remedy: str = "") -> Iterator[None]:
    """Where the block ends by `Stopped` the program ends: its sentence and the remedy, and status 0."""
    try:
        yield
    except Stopped as early:
        print(f"{early}{remedy}", file=sys.stderr)
        sys.exit(EXIT_STOPPED)


@contextlib.contextmanager
def tracing(timeline: Timeline | None, path: Path) -> Iterator[None]:
    """Writes `timeline`, if there is one, to `path` when the block ends, whichever way."""
    try:
        yield
    finally:
        if timeline is not None:
            timeline.write(path)


@contextlib.contextmanager
def profiling(
    folder: Path, steps: tuple[int, int] | None, done: int, *, stride: int = 1
) -> Iterator[Callable[[int], None]]:
    """Records steps a..b with jax.profiler: call what is yielded with the number of each step that has ended.

    `done`: steps that a resumed run has behind it; `stride`: how many end at once.
    """
    running = False

    def mark(step: int) -> None:
        nonlocal running
        if steps and not running and steps[0] <= step + stride and step < steps[1]:
            jax.profiler.start_trace(str(folder))
            running = True
        elif running and step >= steps[1]:
            jax.profiler.stop_trace()
            running = False

    mark(done)
    try:
        yield mark
    finally:
        if running:
            jax.profiler.stop_trace()
