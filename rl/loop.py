"""The loop: draw → roll out → gate → score → batch → agree → observe → step → publish → log. Read it top to bottom.

The unit is a *group*, `group_size` episodes of one task; each group has a *ticket*, and batch v is the next
`groups_per_batch` admitted tickets in ticket order. The place of a group that is not admitted goes to the next ticket:
what a batch holds does not depend on timing. How far sampling runs ahead of learning is the gate's affair: with
max_staleness 0 batch v is sampled by the weights of version v alone, with η > 0 groups are played, and finished ones
wait, while the learner computes, and no token of batch v is older than version v - η (rl/rollout/feeder.py).

Of several processes each plays its own tickets (ticket mod processes) for its own share of the batch, and all make one
step together. By one process alone `hosts` is nothing: the records are a list of one.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from envs.base import Task
from rl.credit import CreditFn
from rl.hosts import ALONE, Hosts, total
from rl.learner import Learner, TrainState, skipped_in_a_row
from rl.metrics.abandonment import abandonment_means
from rl.metrics.episodes import episode_means, term_means
from rl.metrics.majority import majority_means
from rl.quarantine import Quarantine
from rl.replay import Replay
from rl.rewards.compose import RewardTerm, reward, score_group
from rl.rewards.shaping import without_overlong
from rl.rollout.failures import deterministic
from rl.rollout.feeder import Feeder, Judged
from rl.rollout.pool import MIN_SCORED, Group, Pool
from rl.rollout.staleness import StalenessGate
from rl.timeline import Recorder, unrecorded
from rl.types import Mean, Status, Trajectory

ASK_S = 1.0  # how late a process hears that another is to stop, while worlds are waited for


@dataclasses.dataclass
class Progress:
    """Where a run stands: host state, saved with the weights.

    `step` counts optimizer steps (those refused for a gradient that is not finite included), `version` published
    batches. Every ticket below `ticket` is settled, trained on or refused, and so are those `ahead` of it, by a process
    that had to refill more than another did: whoever goes on, and with how many processes, deals out the others. Of
    these the groups in `waiting` had finished when the run was saved, and are not played again.
    """

    step: int = 0
    version: int = 0
    ticket: int = 0
    trained_s: float = 0.0  # the clock survives a restart
    ahead: list[int] = dataclasses.field(default_factory=list)
    waiting: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # Feeder.waiting() of all processes

    def tickets(self, hosts: Hosts) -> Iterator[int]:
        """The tickets of this process that are not settled now, in order, without end."""
        first = self.ticket + (hosts.index - self.ticket) % hosts.count
        settled = frozenset(self.ahead)
        return (ticket for ticket in itertools.count(first, hosts.count) if ticket not in settled)

    def settle(self, tickets: Iterable[int]) -> None:
        """Counts `tickets` as settled; some may be already."""
        ahead = {*self.ahead, *tickets}
        while self.ticket in ahead:
            self.ticket += 1
        self.ahead = sorted(ticket for ticket in ahead if ticket > self.ticket)


def train(
    learner: Learner,
    state: TrainState,
    ref: Any | None,
    pool: Pool | Replay,
    gate: StalenessGate,
    progress: Progress,
    *,
    draw: Callable[[int], Task],
    outcome: Callable[[int, Sequence[Trajectory]], Any],
    observe: Callable[[Sequence[Any], int], None],
    admit: Callable[[Sequence[Trajectory]], bool],
    terms: Sequence[RewardTerm],
    pack: Callable[..., tuple[Any, Mapping[str, float]]],
    publish: Callable[[Any, int], None],
    keep_episodes: Callable[[int, Sequence[Trajectory]], None],
    log: Callable[[int, Mapping[str, Any]], None],
    evaluate: Callable[[], Mapping[str, float]] | None,
    save: Callable[[TrainState, Progress, float | None], None],
    steps: int,
    groups_per_batch: int,
    group_size: int,
    credit: CreditFn,
    drop_equal_groups: bool,
    filter_overlong: bool = False,
    excluded: Collection[Status] = (),
    eval_every: int,
    save_every: int,
    ref_every: int = 0,
    minibatches: int = 1,
    quarantine: Quarantine | None = None,
    stop: Callable[[], bool] = lambda: False,
    hosts: Hosts = ALONE,
    span: Recorder = unrecorded,
) -> TrainState:
    """Train until `progress.step` is `steps`, or until `stop()` in any process, after a step or while a batch is waited
    for (what has finished of it waits in the checkpoint, if there is a step that is not saved yet); updates `progress`
    in place.

    `groups_per_batch` is of all processes together; `gate` counts this one's. `credit` is one of rl/credit.py.
    `outcome(ticket, trajectories)` is what a group, admitted or refused, tells the curriculum; `observe` takes what all
    processes' groups told, before the gate lets in others. `draw` is called in this thread and in the feeder's, in
    which `terms` and `admit`, which may refuse a scored group, are called. With `filter_overlong` what a limit cut is
    compared with and not trained on (`without_overlong`); what ended as one of `excluded` is neither (`judge`). A batch
    is `minibatches` updates of the learner's, and so many steps. After every `ref_every` steps the reference that the
    state keeps is the policy of that moment. `pool` may be stored episodes (rl/replay.py). A task that `quarantine`
    (None: no task is) holds is not played. A failed *episode* is data; whatever a thread, the fault budget or the
    device raises ends the loop, in every process. `span` records the phases of a step (rl/timeline.py): rollout (a
    batch is waited for), batch, agree, learn, publish, eval, keep.
    """
    if (steps - progress.step) % minibatches:
        raise ValueError(f"got steps={steps} after {progress.step}, want a multiple of minibatches={minibatches} more")
    last, skipped = progress.step >= steps, 0
    share = groups_per_batch // hosts.count
    kept = [saved for saved in progress.waiting if saved["ticket"] % hosts.count == hosts.index]
    judging = partial(judge, terms=terms, drop_equal_groups=drop_equal_groups, admit=admit, excluded=excluded)
    committed = progress.step  # what it began from

    def commit(feeder: Feeder, success: float | None) -> None:
        nonlocal committed
        with hosts.telling():
            waiting = feeder.waiting()
        progress.waiting = [saved for everybody in hosts.exchange(waiting) for saved in everybody]
        save(state, progress, success)
        committed = progress.step

    with contextlib.ExitStack() as closing:
        with hosts.telling():
            feeder = closing.enter_context(Feeder(
                pool, gate, draw, judging, progress.tickets(hosts), waiting=kept,
                size=group_size, batch=share, batches=(steps - progress.step) // minibatches,
                passes=lambda task: quarantine is not None and quarantine.holds(task.task_id),
            ))  # fmt: skip
        while not last:
            clock = _Clock(span)
            # Draw, roll out, gate, score: all along, as far ahead as the gate lets in. Here a batch is waited for.
            with hosts.telling():
                feeder.let_in(progress.version)
            if not all_complete(feeder, stop, hosts):
                break
            with hosts.telling():
                groups, refused = feeder.next_batch()
                clock.mark("rollout")

                # Credit: one advantage an episode, or one a turn. What no term could judge is in no batch.
                episodes = [t for group in groups for t in group.trajectories if np.isfinite(reward(t))]
                rewards = [reward(t) for t in episodes]
                place = [(t.ticket, t.member) for t in episodes]
                batch, packing = pack(
                    without_overlong(episodes) if filter_overlong else episodes,
                    credit(episodes, rewards),
                    dict(zip(place, rewards, strict=True)),
                    version=progress.version,
                )
                settled = [*groups, *refused]
                everything = [group for group in settled if group.trajectories]  # the others were passed
                own = {
                    "settled": [group.ticket for group in settled],
                    "outcomes": [outcome(group.ticket, group.trajectories) for group in settled],
                    "played": len(everything),
                    "failures": [each for group in everything if (each := deterministic(group.trajectories))],
                    "rolled": {
                        **group_means(everything, terms),
                        "rollout/passed_frac": Mean(len(settled) - len(everything), len(settled)),
                    },
                    "packed": packing_means(packing),
                }
                clock.mark("batch")

            # Agree: all processes have their rows, and know what the others took and saw. Nobody enters a step before.
            records = hosts.exchange(own)
            progress.settle(ticket for record in records for ticket in record["settled"])
            observe([each for record in records for each in record["outcomes"]], progress.ticket)
            if quarantine is not None:
                failures = [each for record in records for each in record["failures"]]
                quarantine.add(failures, sum(record["played"] for record in records))
            rolled, packed = (total(record[name] for record in records) for name in ("rolled", "packed"))
            clock.mark("agree")

            # One optimizer step, or one for each mini-batch.
            state, learned = learner.train_step(state, learner.prepare(state, ref, batch))
            learned = jax.device_get(learned)  # D2H, once a step; waits for the update
            progress.step += minibatches
            skipped = skipped_in_a_row(learned, skipped)
            if ref_every and progress.step % ref_every == 0:
                state = learner.refresh(state)
            clock.mark("learn")

            # Publish.
            progress.version += 1
            publish(state.params, progress.version)
            clock.mark("publish")

            # Keep, evaluate, log, save (in this order: a record without its checkpoint is dropped at the next start).
            with hosts.telling():
                keep_episodes(progress.step, [t for group in everything for t in group.trajectories])
                record = {**rolled, **learned, **packed}
                if quarantine is not None:
                    quarantine.tell()
                    record["rollout/quarantined"] = Mean(len(quarantine), 1)
                success = None
                if eval_every and (progress.step % eval_every == 0 or progress.step == steps):
                    result = evaluate()
                    success = result["sampled"] if np.isfinite(result["sampled"]) else None  # NaN: every world failed
                    record |= {f"eval/{name}": value for name, value in result.items()}
                    clock.mark("eval")
                progress.trained_s += clock.total_s()
                tokens = packed["batch/tokens"].total
                log(progress.step, {**record, **clock.means(tokens), "time/trained_s": progress.trained_s})
            last = any(hosts.exchange(progress.step >= steps or stop()))
            if last or success is not None or (save_every and progress.step % save_every == 0):
                commit(feeder, success)
            clock.mark("keep")
        if progress.step > committed:  # it was asked to stop, in the middle of a batch
            commit(feeder, None)
    return state


def all_complete(feeder: Feeder, stop: Callable[[], bool], hosts: Hosts) -> bool:
    """Whether the next batch of every process is complete; False where one is to stop before. A world may hang, here or
    with another, and no stop waits for it longer than ASK_S.
    """
    while True:
        with hosts.telling():
            complete = feeder.wait(stop, ASK_S)
        told = hosts.exchange([complete, stop()])
        if all(complete for complete, _ in told):
            return True
        if any(stopping for _, stopping in told):
            return False


def judge(
    group: Group,
    *,
    terms: Sequence[RewardTerm],
    drop_equal_groups: bool = False,
    admit: Callable[[Sequence[Trajectory]], bool] = lambda trajectories: True,
    excluded: Collection[Status] = (),
) -> Judged:
    """The group, scored. Refused: too few members that can be compared (scored, as the pool says, not `excluded`, and
    judged by every term), equal rewards if `drop_equal_groups`, or what `admit` refuses.

    Members that ended as one of `excluded` are shown to no term, nor to `admit`: the others are judged as if there were
    none.
    """
    members = tuple(score_group(terms, group.trajectories, excluded=excluded))
    compared = [t for t in members if t.status not in excluded]
    dropped = group.dropped or sum(bool(np.isfinite(reward(t))) for t in compared) < min(MIN_SCORED, len(members))
    group = dataclasses.replace(group, trajectories=members, dropped=dropped)
    refused = dropped or (drop_equal_groups and is_equal(group)) or not admit(compared)
    return Judged(group, admitted=not refused)


def is_equal(group: Group) -> bool:
    """True where every judged member has the same reward: such a group teaches nothing."""
    rewards = [r for r in map(reward, group.trajectories) if np.isfinite(r)]
    return not rewards or max(rewards) == min(rewards)


def group_means(groups: Sequence[Group], terms: Sequence[RewardTerm]) -> dict[str, Mean]:
    """What the episodes of all groups were like, refused ones included, what each term gave them, and how many groups
    could teach nothing.
    """
    families = {group.task.task_id: group.task.family for group in groups if group.task.family}
    episodes = [t for group in groups for t in group.trajectories]
    voted = majority_means([g.trajectories for g in groups]) if any(term.name == "majority" for term in terms) else {}
    return {
        **episode_means(episodes, families=families),
        **term_means(terms, episodes),
        **voted,
        **abandonment_means([(group.trajectories, group.dropped) for group in groups]),
        "batch/equal_groups_frac": Mean(sum(map(is_equal, groups)), len(groups)),
        "batch/difficulty": Mean(sum(group.task.difficulty for group in groups), len(groups)),
        "batch/hinted_frac": Mean(sum("hint" in group.task.data for group in groups), len(groups)),
        "batch/env_retries": Mean(sum(group.retries for group in groups), len(groups)),
    }


def packing_means(packing: Mapping[str, float]) -> dict[str, Mean]:
    """How the batch was packed: padding of the rows in use, and their sizes."""
    names = ("pad_frac", "rows", "tokens", "action_tokens")
    return {f"batch/{name}": Mean(packing[name], 1) for name in names}


class _Clock:
    """Seconds of each phase of one step, each told to `span`."""

    def __init__(self, span: Recorder):
        self._span = span
        self._last = self._start = time.monotonic()
        self._phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self._phases[phase] = now - self._last
        self._span(phase, self._last, now)
        self._last = now

    def total_s(self) -> float:
        return time.monotonic() - self._start

    def means(self, tokens: float) -> dict[str, float]:
        """time/{phase}_s, and the tokens that were trained per second of the whole step, evaluation apart."""
        working_s = sum(s for phase, s in self._phases.items() if phase != "eval")
        return {f"time/{phase}_s": s for phase, s in self._phases.items()} | {"time/tokens_per_s": tokens / working_s}
