"""Reinforcement learning on the very tasks of an evaluation, without their labels (TTRL, 2504.16084).

    python -m launch.ttrl --config=configs/ttrl_arith.py --workdir=D --init=SFT_WORKDIR [--per_query]

The reward is agreement with the majority of `rl.group_size` samples, of which the first `train_first` are trained on.
Transductive by design: `ttrl.n` tasks of `ttrl.split` are adapted to and then measured. Their prompts are what is
learnt from; their answers are not read by anything that learns, and what compares with them is for the record alone.
What the policy gained on tasks that it was not adapted to is reported apart: `eval.n` of `eval.split`.

With `--per_query` (`ttrl.per_query`) each of `ttrl.queries` tasks is adapted to alone, for `ttrl.steps` steps of one
group, from the start's weights and a fresh optimizer; it is answered, and the next one starts from the start's weights
again. One learner and one engine serve all of them: nothing is compiled twice. A query whose groups are all refused, or
on which the world always fails, is recorded as failed, with the reason, and is in no mean.

D/result.json: before and after avg@k, pass@k and maj@k for k up to `ttrl.samples`, greedy, and how good the majority is
as a label (rl/metrics/majority.py); seconds, and for a query its sampled tokens. `--workdir=D` alone resumes.
Does not cover: several processes.
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from launch import cli
from launch.plan import Plan, make_plan
from launch.workdir import git_commit, write_json

if TYPE_CHECKING:  # importing them starts jax, which flags precede
    from envs.base import Task, World
    from launch.reinforce import Live, Parts
    from rl.rewards.compose import RewardTerm
    from rl.rollout.pool import Group, Pool
    from rl.types import Trajectory

LABEL_FREE = {"answer"}  # the facts that a reward may read here: the policy's own answer


def run(plan: Plan, workdir: cli.Workdir, init: Path | None) -> dict[str, Any]:
    """All that D/result.json does not record yet; returns what is in it at the end. Raises runs.Stopped on a signal."""
    path = workdir / "result.json"
    with cli.validating():
        result = json.loads(path.read_text()) if path.exists() else _begun(plan)
    if "after" not in result:
        (each_query if plan.ttrl.per_query else whole_set)(plan, workdir, init, result)
    return result


def whole_set(plan: Plan, workdir: cli.Workdir, init: Path | None, result: dict[str, Any]) -> None:
    """Measure, adapt to all tasks together, measure again; `result` is filled, and written after each of them."""
    from launch import reinforce, runs

    parts = reinforce.build_parts(plan, workdir, init, choose=lambda world: adapted_tasks(plan, world))
    progress, steps, seconds = parts.progress, plan.rl.steps, result["seconds"]
    if progress.step and "before" not in result:
        raise cli.ConfigError(f"{workdir / 'result.json'}: gone, and with it what the start was; give a new --workdir")
    tasks = {"adapted": adapted_tasks(plan, parts.world), "held_out": parts.validation}

    def measure_all(live: "Live", when: str) -> None:
        began, played = time.monotonic(), []
        result[when] = {name: measure(plan, live.eval_pool, own, played) for name, own in tasks.items()}
        live.keep_evaluated(progress.step, played)
        seconds[when] = time.monotonic() - began
        write_json(workdir / "result.json", result)

    with reinforce.opened(parts, steps=steps) as live:
        if "before" not in result:
            measure_all(live, "before")
        if not live.stop():
            reinforce.train(parts, live, steps=steps)
            seconds["adapt"] = progress.trained_s  # those of interrupted launches included
        if progress.step >= steps and not live.stop():
            measure_all(live, "after")
    if "after" not in result:
        raise runs.Stopped(f"stopped at step {progress.step} of {steps}; --workdir={workdir} alone goes on from there")


def each_query(plan: Plan, workdir: cli.Workdir, init: Path | None, result: dict[str, Any]) -> None:
    """Adapt to one task after the other, each from the start; `result` is written after each. A query that a signal
    cut is begun anew. In the end engine and learner have the start's weights.
    """
    from launch import reinforce, runs
    from rl.loop import Progress

    rl = dataclasses.replace(plan.rl, steps=plan.ttrl.steps, groups_per_batch=1)
    plan = dataclasses.replace(plan, rl=rl)
    parts = reinforce.build_parts(plan, workdir, init, choose=lambda world: adapted_tasks(plan, world))
    queries, done = adapted_tasks(plan, parts.world), result.setdefault("queries", [])
    start = runs.load_params(workdir / "init", parts.learner) if parts.ref is None else parts.ref
    parts = dataclasses.replace(parts, progress=Progress(step=len(done) * rl.steps))  # what is logged goes on there
    with reinforce.opened(parts, steps=len(queries) * rl.steps) as live:
        parts = dataclasses.replace(parts, state=None)  # each query has its own
        while len(done) < len(queries) and not live.stop():
            i = len(done)
            reinforce.publish(parts, live, start, _version(plan, i))
            own = dataclasses.replace(parts, state=parts.learner.init_state(start))
            record = adapt_to(own, live, queries[i], i)
            if record is not None:
                done.append(record)
                write_json(workdir / "result.json", result)
        reinforce.publish(parts, live, start, _version(plan, len(queries)))
    if len(done) < len(queries):
        raise runs.Stopped(f"stopped after {len(done)} of {len(queries)} queries; --workdir={workdir} alone goes on")
    adapted = [record for record in done if "failed" not in record]
    if not adapted:
        raise RuntimeError(
            f"got no step on any of {len(done)} queries, want one at least that can be adapted to; result.json says "
            f"why; the last: {done[-1]['failed']}"
        )
    result["failed"] = len(done) - len(adapted)
    for when in ("before", "after"):
        result[when] = averaged([record[when] for record in adapted])
    for name in ("adapt_s", "answer_s", "adapt_tokens", "answer_tokens"):
        result[name] = sum(record[name] for record in done)
    write_json(workdir / "result.json", result)


def adapt_to(parts: "Parts", live: "Live", query: "Task", i: int) -> dict[str, Any] | None:
    """Query i by the policy as it is, `ttrl.steps` steps on it alone, and by the policy that came of them; None where a
    signal came first. One that cannot be learnt from has `failed`, the reason, and no `after`; its cost is that of the
    steps it finished. Tickets, versions and steps are functions of i: it is the same query whatever came before.
    """
    from launch import draws, reinforce
    from rl.loop import Progress
    from rl.quarantine import Quarantine, QuarantineError
    from rl.rollout.feeder import MOST_REFUSED, AllRefused

    plan, end, played = parts.plan, (i + 1) * parts.plan.rl.steps, []
    before = measure(plan, live.eval_pool, [query], played, first=i)
    asked, adapt_tokens = len(played), 0

    def keep(step: int, episodes: "Sequence[Trajectory]") -> None:
        nonlocal adapt_tokens
        adapt_tokens += sum(t.n_actions for t in episodes)
        live.keep_episodes(step, episodes)

    curriculum = draws.build_curriculum(plan, [query])
    tasks = {"draw": curriculum.draw, "outcome": curriculum.outcome, "observe": curriculum.observe}
    tasks["quarantine"] = Quarantine(1)
    first = i * plan.rl.steps
    progress = Progress(step=first, version=_version(plan, i), ticket=first * MOST_REFUSED)
    try:
        reinforce.train(
            dataclasses.replace(parts, progress=progress, options={**parts.options, **tasks}),
            dataclasses.replace(live, keep_episodes=keep, save=lambda state, progress, score: None),
            steps=end,
        )
    except (AllRefused, QuarantineError) as error:  # of this query; the pool and the engine are as they were
        answer, began = {"failed": str(error)}, time.monotonic()
    else:
        if progress.step < end:
            return None
        began = time.monotonic()
        answer = {"after": measure(plan, live.eval_pool, [query], played, first=i)}
    answer_s = time.monotonic() - began
    live.keep_evaluated(end, played)
    return {
        "task_id": query.task_id,
        "before": before,
        **answer,
        "adapt_s": progress.trained_s,
        "answer_s": answer_s,
        "adapt_tokens": adapt_tokens,
        "answer_tokens": sum(t.n_actions for t in played[asked:]),
    }


def _version(plan: Plan, i: int) -> int:
    """What the start's weights are called as query i begins: more than every version before."""
    return 1 + i * (plan.rl.steps + 1)


def adapted_tasks(plan: Plan, world: "World") -> "list[Task]":
    """The tasks of `ttrl.split` that are adapted to. Errors (ValueError): there are fewer."""
    from envs import choose_tasks

    t = plan.ttrl
    return choose_tasks(world, t.split, t.queries if t.per_query else t.n, plan.seed)


def check_label_free(plan: Plan, terms: "Sequence[RewardTerm]") -> None:
    """That nothing which knows an answer decides what is learnt: not the reward, nor which tasks are drawn, which
    groups are trained on and which checkpoint is kept; and that the held-out tasks are others. Errors: ConfigError.
    """
    c, votes = plan.curriculum, plan.reward_options.get("majority", {}).get("train_first", 0)
    for term in terms:
        told = sorted({*term.reads} - LABEL_FREE)
        if told:
            raise cli.ConfigError(
                f"reward.terms.{term.name}: reads {told}, wanted {sorted(LABEL_FREE)} at most: here no reward may know "
                "more than what the policy answered; leave it out"
            )
    for wrong, message in (
        (c.name != "uniform", f"curriculum.name={c.name!r}: wanted uniform; the others go by success or difficulty"),
        (
            (c.admit_low, c.admit_high) != (0, 1),
            f"curriculum.admit_low={c.admit_low}, admit_high={c.admit_high}: wanted 0 and 1; they refuse groups by "
            "success (rl.drop_equal_groups goes by the reward)",
        ),
        (plan.hints.prob > 0, f"hints.prob={plan.hints.prob}: wanted 0; a hint may say what the answer is"),
        (
            plan.eval.every != 0,
            f"eval.every={plan.eval.every}: wanted 0; an evaluation in between would choose the checkpoint by the "
            "labels",
        ),
        (
            plan.ttrl.split == "train" and (plan.rollout.abandon.prm_path or {"orm", "prm"} & plan.reward_terms.keys()),
            "ttrl.split='train' with a reward model: it was taught the outcomes of these tasks; leave either out",
        ),
        (
            plan.ttrl.split == plan.eval.split,
            f"ttrl.split={plan.ttrl.split!r}: wanted another split than eval.split, which holds the tasks that are not "
            "adapted to",
        ),
        (
            votes > plan.rl.group_size,
            f"reward.options.majority.train_first={votes}: wanted at most rl.group_size={plan.rl.group_size}, the "
            "votes of which the first are trained on",
        ),
    ):
        if wrong:
            raise cli.ConfigError(message)


# --- what is measured -------------------------------------------------------------------------------------------------


def measure(
    plan: Plan, pool: "Pool", tasks: "Sequence[Task]", played: "list[Trajectory]", *, first: int = 0
) -> dict[str, Any]:
    """`numbers` of `tasks`, by the training temperature and greedily; the episodes are added to `played`. `first` is
    the place of the first task among all that are measured: the same place, the same randomness.
    """
    from launch import build
    from models.sampling import Sampling

    greedily = Sampling(temperature=plan.rl.temperature, greedy=True)
    sampled = build.play_groups(pool, tasks, first=first, samples=plan.ttrl.samples, seed=plan.seed)
    greedy = build.play_groups(pool, tasks, first=first, sampling=greedily)
    played += [t for group in (*sampled, *greedy) for t in group.trajectories]
    return numbers(sampled, greedy)


def numbers(sampled: "Sequence[Group]", greedy: "Sequence[Group]") -> dict[str, Any]:
    """avg_at_k (mean success of a sample, k all of them), pass_at_k and maj_at_k by k, greedy, families (avg@k of
    each), tokens of an episode, and the table of rl/metrics/majority.py, over all samples. None: not to be known.
    """
    from rl.metrics.majority import majority_at_k, majority_means
    from rl.metrics.success import summarise

    found = summarise([(group.task, group.trajectories) for group in sampled])
    means = majority_means([group.trajectories for group in sampled])
    by_k = {"pass_at_k": found["pass_at_k"], "maj_at_k": majority_at_k([group.trajectories for group in sampled])}
    return {
        "avg_at_k": _known(found["success"]),
        **{name: {str(k): value for k, value in values.items()} for name, values in by_k.items()},
        "greedy": _known(summarise([(group.task, group.trajectories) for group in greedy])["success"]),
        "majority": {name.removeprefix("majority/"): _known(mean.value) for name, mean in means.items()},
        "families": {family: own["success"] for family, own in found["families"].items()},
        "tokens": found["tokens"],
    }


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)


def averaged(measures: Sequence[Any]) -> Any:
    """The mean of each number over those `numbers` that have it."""
    if isinstance(measures[0], dict):
        names = dict.fromkeys(name for each in measures for name in each)
        return {name: averaged([each[name] for each in measures if name in each]) for name in names}
    known = [value for value in measures if value is not None]
    return sum(known) / len(known) if known else None


def _begun(plan: Plan) -> dict[str, Any]:
    t, rl = plan.ttrl, plan.rl
    return {
        "name": plan.name,
        "seed": plan.seed,
        "commit": git_commit(),
        "split": t.split,
        "samples": t.samples,
        "votes": rl.group_size,
        **(
            {"n": t.queries, "steps": t.steps}
            if t.per_query
            else {"n": t.n, "steps": rl.steps, "held_out": {"split": plan.eval.split, "n": plan.eval.n}, "seconds": {}}
        ),
    }


def table(result: dict[str, Any]) -> str:
    """The result for the terminal."""
    k = str(max(map(int, _of(result, "before")["maj_at_k"]), default=1))
    lines = [
        f"{result['name']}, seed {result['seed']}, commit {result['commit']}: {result['n']} tasks of {result['split']}"
        + (f", {result['failed']} of them failed" if result.get("failed") else ""),
        f"{'':18}" + "".join(f"{name:>16}" for name in (f"avg@{result['samples']}", f"pass@{k}", f"maj@{k}", "greedy")),
    ]
    for name in ("adapted", "held_out") if "held_out" in result else ("adapted",):
        before, after = (_of(result, when, name) for when in ("before", "after"))
        shown = [(m["avg_at_k"], m["pass_at_k"].get(k), m["maj_at_k"].get(k), m["greedy"]) for m in (before, after)]
        lines.append(
            f"{name:18}" + "".join(f"{_shown(a)} -> {_shown(b)}".rjust(16) for a, b in zip(*shown, strict=True))
        )
        for label in ("label_accuracy", "reward_accuracy", "ratio"):
            a, b = (m["majority"][label] for m in (before, after))
            lines.append(f"  {label:16}{_shown(a)} -> {_shown(b)}")
    spent = result.get("seconds") or {name: result[name] for name in ("adapt_s", "answer_s", "adapt_tokens")}
    return "\n".join([*lines, "  ".join(f"{name} {value:.0f}" for name, value in spent.items())])


def _of(result: dict[str, Any], when: str, name: str = "adapted") -> dict[str, Any]:
    return result[when][name] if "held_out" in result else result[when]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main(_) -> None:
    with cli.validating():
        workdir = cli.want_workdir(flags.FLAGS.workdir)
        if flags.FLAGS.per_query:
            if flags.FLAGS.config is None:
                raise cli.ConfigError("--per_query: a run in --workdir has its own; give --config and a new --workdir")
            cli.override(flags.FLAGS.config, "ttrl.per_query", True)
        config = cli.resolve(flags.FLAGS.config, workdir)
        plan = make_plan(config)
        init = Path(flags.FLAGS.init) if flags.FLAGS.init else None
        cli.check_init(init, workdir)
        from launch import build, runs  # jax starts here, still before the workdir is made

        check_label_free(plan, build.build_terms(plan))
        build.check_data(
            plan, demonstrations=False, kept=(init or Path(workdir)) / "tokenizer", trained=plan.ttrl.split
        )
        adapted_tasks(plan, build.build_world(plan))
        runs.check_start(plan, Path(workdir), init)
    with runs.exits_when_stopped(), cli.open_workdir(workdir, config) as folder:
        print(table(run(plan, folder, init)))


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    flags.DEFINE_string("init", None, "Folder of the run whose weights and tokenizer to start from")
    flags.DEFINE_bool("per_query", False, "Adapt to each task alone, from the start's weights (ttrl.per_query)")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
