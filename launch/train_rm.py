"""A reward model from stored episodes: yes or no, will it succeed.

    python -m launch.train_rm --config=configs/search_orm.py --workdir=D --init=POLICY_RUN --episodes=RUN[,RUN...]

Each RUN is a run's folder, whose RUN/episodes is read, or another folder of episodes in it (RUN/episodes_train, of
`launch.evaluate --split=train`). rm.kind=orm: an episode is judged at its end, the label is its outcome. rm.kind=prm:
each turn is judged at its end; the policy of --init goes on rm.roll_ins times after it, and the label is the share that
succeeds (Math-Shepherd, 2312.08935). The trunk starts as that policy.

What is learnt from is written down first, D/labelled/{train,held_out}.jsonl: ids, where is judged, and labels. All
episodes of a task are on one side. D/result.json says how good the model is on the tasks that it never saw.
`--workdir=D` alone resumes. Does not cover: several processes; a choice among checkpoints (the last one counts).
"""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from launch import cli
from launch.plan import Plan, make_plan
from launch.workdir import config_of, write_json

if TYPE_CHECKING:  # importing them starts jax, which flags precede
    from envs.base import Task, World
    from models.codec import Codec
    from models.config import ModelConfig
    from rl.reward_model import Example
    from rl.types import Trajectory

SIDES = ("held_out", "train")  # in the order in which they are written: with the last one the labelling is done


def run(plan: Plan, workdir: cli.Workdir, init: Path | None, sources: Sequence[Path]) -> None:
    """The whole stage; everything it leaves is in `workdir`. Raises runs.Stopped on a signal."""
    import jax

    from launch import build, policy, reward_models, runs
    from rl import checkpoint, supervised
    from rl.reward_model import make_judge, pack_examples, read_examples, write_examples

    with cli.validating():
        world = build.build_world(plan)
        codec = runs.start_codec(plan, world, workdir, init)
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        build.use_compilation_cache()
        learner = build.build_rm_learner(plan, model)
        start = None
        if not checkpoint.steps(workdir / "ckpt"):
            key = jax.random.fold_in(jax.random.key(plan.seed), 0)
            start = runs.starting_params(plan, model, workdir, init, learner, key)
        episodes = [] if is_labelled(workdir) else read(plan, sources)
        tasks = tasks_of(world, episodes)
    if not is_labelled(workdir):
        examples = label(plan, world, codec, model, policy.sampled(start), episodes, tasks)
        (workdir / "episodes.txt").write_text("".join(f"{source}\n" for source in sources))
        for side in SIDES:
            write_examples(examples[side], labelled(workdir, side))
    sides = {side: fitting(plan, read_examples(labelled(workdir, side)), side) for side in SIDES}
    state, progress = runs.start_or_resume(workdir, learner, start, donate=True)
    del start

    with (
        runs.recording(workdir, progress, plan.rm.steps, console_every=10) as log,
        checkpoint.Checkpoints(workdir / "ckpt") as checkpoints,
        runs.stopping() as stop,
    ):
        state = supervised.train(
            learner,
            state,
            pack_examples(sides["train"], length=plan.sft.length, pad_id=codec.pad_id),
            progress,
            rows_per_step=plan.sft.rows,
            seed=plan.seed,
            steps=plan.rm.steps,
            log=log,
            evaluate=None,
            save=runs.saver(checkpoints),
            eval_every=0,
            save_every=plan.sft.save_every,
            stop=stop,
        )
    runs.want_finished(progress, plan.rm.steps)
    shape = {"lengths": reward_models.widths(plan.sft.length), "rows": plan.sft.rows, "pad_id": codec.pad_id}
    judge = make_judge(model, state.params, **shape)
    result = {"kind": plan.rm.kind, "steps": progress.step}
    result |= {side: measure(judge, examples) for side, examples in sides.items()}
    write_json(workdir / reward_models.RESULT, result)
    print(json.dumps(result))


def labelled(workdir: Path, side: str) -> Path:
    return workdir / "labelled" / f"{side}.jsonl"


def is_labelled(workdir: Path) -> bool:
    return labelled(workdir, SIDES[-1]).exists()


def read(plan: Plan, sources: Sequence[Path]) -> list["Trajectory"]:
    """The scored episodes of all sources, or rm.episodes of them, drawn by the seed. Of one that was given up nobody
    knows how it would have ended. Errors: ValueError for none.
    """
    from rl.curriculum import permutation
    from rl.episodes import read_episodes
    from rl.types import Status

    stored = (t for source in sources for t in read_episodes(source.parent, folder=source.name))
    found = [t for t in stored if t.status.scored and t.status is not Status.ABANDONED and t.rows]
    if not found:
        raise ValueError(f"--episodes: no scored episode in {', '.join(map(str, sources))}; want some of a policy")
    if not 0 < plan.rm.episodes < len(found):
        return found
    return [found[i] for i in sorted(permutation(len(found), plan.seed, 0)[: plan.rm.episodes].tolist())]


def tasks_of(world: "World", episodes: Sequence["Trajectory"]) -> dict[str, "Task"]:
    """The training tasks of `episodes`, by id.

    Errors: ValueError for an episode of another task: a reward that has seen tasks of evaluation would measure itself.
    """
    wanted = {t.task_id for t in episodes}
    found = {task.task_id: task for task in world.tasks("train") if task.task_id in wanted} if wanted else {}
    if strays := sorted(wanted - found.keys()):
        raise ValueError(
            f"--episodes: {len(strays)} of {len(wanted)} tasks are no training tasks of the world {world.name!r} with "
            f"this config's options, e.g. {strays[0]!r}; want episodes of training"
        )
    return found


def label(
    plan: Plan,
    world: "World",
    codec: "Codec",
    model: "ModelConfig",
    params: Any,
    episodes: Sequence["Trajectory"],
    tasks: dict[str, "Task"],
) -> dict[str, list["Example"]]:
    """By side, what is learnt from and what is measured on. For a PRM `params`, the policy, plays.

    Errors: ValueError where a side has not both successes and failures.
    """
    from rl.reward_model import deal, outcome_examples, process_examples

    if plan.rm.kind == "orm":
        found = [outcome_examples(t) for t in episodes]
    else:
        labels = play_on(plan, world, codec, model, params, episodes, tasks)
        found = [process_examples(t, own) for t, own in zip(episodes, labels, strict=True)]
    train, held_out = deal((e for some in found for e in some), held_out=plan.rm.held_out, seed=plan.seed)
    sides = {"train": train, "held_out": held_out}
    for side, examples in sides.items():
        mean = sum(float(e.labels.sum()) for e in examples) / max(1, sum(len(e.labels) for e in examples))
        if not 0 < mean < 1:
            raise ValueError(
                f"--episodes: {len(examples)} rows are for {side}, with labels of mean {mean:g}; want successes and "
                "failures on either side: more episodes, of a policy that sometimes succeeds, or another rm.held_out"
            )
    return sides


def play_on(
    plan: Plan,
    world: "World",
    codec: "Codec",
    model: "ModelConfig",
    params: Any,
    episodes: Sequence["Trajectory"],
    tasks: dict[str, "Task"],
) -> list[list[float]]:
    """A label for each turn of each episode: the share of rm.roll_ins continuations after it that succeed; of the last
    turn, after which nothing comes, the outcome.
    """
    from tqdm import tqdm

    from launch import build
    from launch.worlds import Placed
    from rl.rewards.outcome import success
    from rl.rollout.roll_in import roll_in, starts_of, success_frac

    starts = dict(enumerate((t, n) for t in episodes for n in starts_of(t)))
    on = [tasks[t.task_id] for t, _ in starts.values()]
    with (
        build.serving(plan, model, params, 0, world, codec) as (engine, training),
        contextlib.closing(
            build.build_pool(plan, engine, Placed(training.make_env, training.calls), codec, episode=roll_in(starts))
        ) as pool,
        tqdm(total=len(on), unit="turn", leave=False, disable=None) as bar,
    ):
        groups = pool.run_many(on, samples=plan.rm.roll_ins, on_group=lambda _: bar.update())
    found = [success_frac(group.trajectories) for group in groups]
    if lost := sum(math.isnan(own) for own in found):
        print(f"{lost} of {len(found)} turns could not be gone on from: their worlds answer otherwise now, or fail")
    after = iter(found)
    return [[*(next(after) for _ in starts_of(t)), success(t)] for t in episodes]


def fitting(plan: Plan, examples: Sequence["Example"], side: str) -> list["Example"]:
    """Those that fit a row of sft.length. Errors: ValueError where none does."""
    kept = [e for e in examples if len(e.tokens) <= plan.sft.length]
    if len(kept) < len(examples):
        over = len(examples) - len(kept)
        print(f"{over} of {len(examples)} rows for {side} are over sft.length={plan.sft.length}: left out")
    if not kept:
        raise ValueError(f"no row for {side} fits sft.length={plan.sft.length} tokens; raise it")
    return kept


def measure(judge, examples: Sequence["Example"]) -> dict[str, Any]:
    """`rl.metrics.reward_model.report` of what is judged, and of how many tasks it is."""
    import numpy as np

    from rl.metrics.reward_model import report

    p = np.concatenate(judge([(e.tokens, e.ends) for e in examples]))
    y = np.concatenate([e.labels for e in examples]).astype(np.float64)
    return {"tasks": len({e.task for e in examples}), **report(p, y)}


def sources_of(text: str) -> list[Path]:
    """The folders of episodes that --episodes names. Errors: ConfigError."""
    found = []
    for name in filter(None, text.split(",")):
        path = Path(name)
        path = path / "episodes" if (path / "config.json").exists() else path
        if not path.is_dir() or not (path.parent / "config.json").exists():
            raise cli.ConfigError(f"--episodes: no episodes in {name}; want the folder of a run, or one in it")
        found.append(path)
    return found


def check_sources(plan: Plan, sources: Sequence[Path], tokenizer: Path) -> None:
    """That the episodes are of this world and of these ids. Errors: ConfigError."""
    for source in sources:
        run_of = source.parent
        own, theirs = (folder / "tokenizer.json" for folder in (run_of / "tokenizer", tokenizer))
        if own.exists() and theirs.exists() and own.read_bytes() != theirs.read_bytes():
            raise cli.ConfigError(f"--episodes: the ids of {run_of} are of another tokenizer than that in {tokenizer}")
        world = config_of(run_of)["world"]
        if world["name"] != plan.world:
            raise cli.ConfigError(f"--episodes: {run_of} is of the world {world['name']!r}, want {plan.world!r}")


def main(_) -> None:
    with cli.validating():
        workdir = Path(cli.want_workdir(flags.FLAGS.workdir))
        config = cli.resolve(flags.FLAGS.config, workdir)
        plan = make_plan(config)
        init = Path(flags.FLAGS.init) if flags.FLAGS.init else None
        cli.check_init(init)
        sources = sources_of(flags.FLAGS.episodes)
        if is_labelled(workdir) == bool(sources):
            got = "episodes, and has its own labelled rows" if sources else "no episodes"
            raise cli.ConfigError(f"--episodes: {workdir} got {got}; give them once, and resume with --workdir alone")
        if init is None and not plan.model_path and not (workdir / "init").exists():
            raise cli.ConfigError("--init: got nothing, want the run whose policy the reward model starts as")
        from launch import build, runs  # jax starts here, still before the workdir is made

        kept = (init or workdir) / "tokenizer"
        build.check_data(plan, demonstrations=False, kept=kept)
        runs.check_start(plan, workdir, init)
        check_sources(plan, sources, kept)
    with runs.exits_when_stopped(), cli.open_workdir(str(workdir), config) as folder:
        run(plan, folder, init, sources)


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    flags.DEFINE_string("init", None, "Folder of the run whose policy the model starts as, and who plays on for a PRM")
    flags.DEFINE_string("episodes", "", "RUN[,RUN...]: runs, or folders of episodes in them, to learn from")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
