"""How tasks are preferred: samplers as three pure functions over a state that is saved. Host only.

| sampler | prefers |
|---|---|
| `easy_to_hard` | tasks whose difficulty is within a quantile that rises to 1 |
| `success_band` | tasks whose expected success lies in a band |
| `learnability` | tasks in proportion to p(1 - p) |
| `adarft` | tasks whose difficulty is next to a target that follows the reward |
| `plr` | tasks whose last group was the furthest apart, and those not played for long |

Tasks are numbered 0..n-1, and tickets 0, 1, ... are those that the sampler chooses for: beside it rl/curriculum.py
gives every task its turn, so a sampler never has to.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

State = Mapping[str, Any]  # numbers, and f64 arrays [n]; never changed in place
Choose = Callable[[int, float], int]  # (ticket, its random number in [0, 1)) -> task


class Outcome(NamedTuple):
    """What one group says of its task: plain data, which the processes of a run exchange."""

    ticket: int
    index: int  # of the task
    judged: int  # members that were
    success: float  # their success rate in [0, 1]
    reward: float  # their mean reward
    spread: float  # mean |reward - mean reward|: the mean absolute advantage, unscaled


@dataclasses.dataclass(frozen=True)
class Sampler:
    """`start()` is the state before anything was observed; `update(state, outcomes, next_ticket, undrawn)` the one
    after a batch, its outcomes in ticket order; `choose(state)` what may be asked for any ticket from `next_ticket` on.
    From the ticket `undrawn` on none was chosen for by then: with groups under way it is beyond `next_ticket`.
    """

    start: Callable[[], State]
    update: Callable[[State, Sequence[Outcome], int, int], State]
    choose: Callable[[State], Choose]


# --- by difficulty ------------------------------------------------------------------------------------------------


def easy_to_hard(difficulty: Float[np.ndarray, " n"], *, start_frac: float, tickets: int) -> Sampler:
    """Uniform over the easiest m = ceil(q·n) tasks, q = start_frac + (1 - start_frac)·min(1, ticket / tickets).

    Equal difficulties in the order of the tasks. Source: Kimi k1.5, section 2.3.4 (easy to hard by label).
    Raises ValueError for a share outside (0, 1] or for less than one ticket.
    """
    if not 0 < start_frac <= 1 or tickets < 1:
        raise ValueError(f"easy_to_hard: got {start_frac=} {tickets=}, want a share in (0, 1] and at least one ticket")
    order = np.argsort(difficulty, kind="stable")

    def choose(ticket: int, u: float) -> int:
        quantile = start_frac + (1 - start_frac) * min(1.0, ticket / tickets)
        return int(order[int(u * np.ceil(quantile * len(order) - 1e-9))])  # .07 of 100 is 7, and 7.000000000000001

    return Sampler(dict, lambda state, outcomes, next_ticket, undrawn: state, lambda state: choose)


def adarft_target(
    target: float, reward: float, *, step: float, sensitivity: float, wanted: float, low: float = 0, high: float = 100
) -> float:
    """T ← clip(T + η·tanh(α(R̄ - β)), low, high); `step` η, `sensitivity` α, `wanted` β. AdaRFT (2504.05520)."""
    return float(np.clip(target + step * np.tanh(sensitivity * (reward - wanted)), low, high))


def adarft(
    difficulty: Float[np.ndarray, " n"],
    *,
    target: float,
    step: float,
    sensitivity: float,
    wanted: float,
    seed: int,
) -> Sampler:
    """The tasks next to a target difficulty T: the k-th ticket drawn after an update plays the k-th smallest |d - T|.

    Difficulties are put on [0, 100] between the easiest and the hardest task, the scale of the paper's numbers (η 50,
    α 2, β 0.5). Equal distances are ordered anew after each update. R̄ is the mean success rate of a batch's groups.
    Source: AdaRFT (2504.05520). Raises ValueError where all tasks are equally difficult.
    """
    low, high = float(np.min(difficulty)), float(np.max(difficulty))
    if low == high:
        raise ValueError(f"adarft: got {len(difficulty)} tasks, all of difficulty {low:g}; want several")
    scaled = 100 * (np.asarray(difficulty, float) - low) / (high - low)

    def update(state: State, outcomes: Sequence[Outcome], next_ticket: int, undrawn: int) -> State:
        moved = state["target"]
        if outcomes:
            mean = float(np.mean([outcome.success for outcome in outcomes]))
            moved = adarft_target(moved, mean, step=step, sensitivity=sensitivity, wanted=wanted)
        return {"target": moved, "first": undrawn, "updates": state["updates"] + 1}

    def choose(state: State) -> Choose:
        key = np.array([seed, state["updates"]], np.uint64)
        ties = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, 3], np.uint64)))
        order = np.lexsort((ties.permutation(len(scaled)), np.abs(scaled - state["target"])))
        return lambda ticket, u: int(order[max(0, ticket - state["first"]) % len(order)])

    return Sampler(lambda: {"target": float(target), "first": 0, "updates": 0}, update, choose)


# --- by what was observed -----------------------------------------------------------------------------------------


def beta_update(counts: tuple[float, float], successes: float, failures: float, *, decay: float) -> tuple[float, float]:
    """(a, b) ← (decay·a + successes, decay·b + failures): what was seen long ago, of another policy, fades."""
    return decay * counts[0] + successes, decay * counts[1] + failures


def expected_success(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Mean of Beta(1 + a, 1 + b), (1 + a) / (2 + a + b): 1/2 for a task that was never played."""
    return (1 + a) / (2 + a + b)


def success_band(n: int, *, low: float, high: float, decay: float) -> Sampler:
    """Uniform over the tasks whose expected success lies in [low, high]; over all, where there is none.

    Source: the bands of public systems, e.g. PRIME's [0.2, 0.8] (2502.01456), on decayed counts of each task.
    """

    def weights(p: np.ndarray) -> np.ndarray:
        inside = (low <= p) & (p <= high)
        return inside.astype(float) if inside.any() else np.ones(n)

    return _by_success(n, weights, decay)


def learnability(n: int, *, decay: float) -> Sampler:
    """In proportion to p(1 - p), p the expected success: the variance of the outcome, and so what a group can teach.

    Source: the score of SFL (2408.15099); in proportion to it, not the best K alone.
    """
    return _by_success(n, lambda p: p * (1 - p), decay)


def _by_success(n: int, weights: Callable[[np.ndarray], np.ndarray], decay: float) -> Sampler:
    if not 0 < decay <= 1:
        raise ValueError(f"counts of success: got decay {decay}, want more than 0, at most 1")

    def update(state: State, outcomes: Sequence[Outcome], next_ticket: int, undrawn: int) -> State:
        a, b = state["successes"].copy(), state["failures"].copy()
        for one in outcomes:
            solved, failed = one.judged * one.success, one.judged * (1 - one.success)
            a[one.index], b[one.index] = beta_update((a[one.index], b[one.index]), solved, failed, decay=decay)
        return {"successes": a, "failures": b}

    def choose(state: State) -> Choose:
        pick = _by_weight(weights(expected_success(state["successes"], state["failures"])))
        return lambda ticket, u: pick(u)

    return Sampler(lambda: {"successes": np.zeros(n), "failures": np.zeros(n)}, update, choose)


def plr_probabilities(
    scores: Float[np.ndarray, " m"], unplayed: Float[np.ndarray, " m"], *, temperature: float, staleness: float
) -> Float[np.ndarray, " m"]:
    """P = (1 - ρ)·P_S + ρ·P_C: P_S ∝ (1 / rank)^(1/τ), rank 1 the highest score; P_C ∝ how long not played.

    `temperature` τ, `staleness` ρ. Equal scores share the chances of their ranks; where all were just played P_C is
    uniform.
    Source: Prioritized Level Replay (2010.03934), sections 3.1 and 3.2.
    """
    rank = np.empty(len(scores))
    rank[np.argsort(-np.asarray(scores), kind="stable")] = np.arange(1, len(scores) + 1)
    _, same = np.unique(scores, return_inverse=True)
    by_score = (np.bincount(same, rank ** (-1 / temperature)) / np.bincount(same))[same]
    total = float(np.sum(unplayed))
    by_age = np.asarray(unplayed) / total if total > 0 else np.full(len(scores), 1 / len(scores))
    return (1 - staleness) * by_score / by_score.sum() + staleness * by_age


def plr(n: int, *, temperature: float, staleness: float, replay: float) -> Sampler:
    """Prioritized Level Replay: with probability `replay` a task that was played, else one that was not, uniformly.

    A task's score is the spread of its last group, the critic-free form of the mean |GAE|; age counts tickets. The
    chance of a replay is fixed from the first observation on, and 1 when every task was played. Source: 2010.03934.
    Raises ValueError for shares outside [0, 1], or a temperature that is not positive.
    """
    if temperature <= 0 or not 0 <= staleness <= 1 or not 0 < replay <= 1:
        raise ValueError(
            f"plr: got {temperature=} {staleness=} {replay=}; want temperature > 0, staleness in [0, 1], replay in "
            "(0, 1]"
        )

    def update(state: State, outcomes: Sequence[Outcome], next_ticket: int, undrawn: int) -> State:
        scores, played = state["scores"].copy(), state["played"].copy()
        for one in outcomes:
            scores[one.index], played[one.index] = one.spread, one.ticket
        return {"scores": scores, "played": played, "now": max(next_ticket, state["now"])}

    def choose(state: State) -> Choose:
        seen, unseen = (np.flatnonzero(place) for place in (state["played"] >= 0, state["played"] < 0))
        share = 0.0 if not len(seen) else 1.0 if not len(unseen) else replay
        if len(seen):
            age = np.maximum(state["now"] - state["played"][seen], 0)
            chances = plr_probabilities(state["scores"][seen], age, temperature=temperature, staleness=staleness)
            pick = _by_weight(chances)

        def chosen(ticket: int, u: float) -> int:
            if u < share:
                return int(seen[pick(u / share)])
            return int(unseen[int((u - share) / (1 - share) * len(unseen))])

        return chosen

    return Sampler(lambda: {"scores": np.zeros(n), "played": np.full(n, -1.0), "now": 0}, update, choose)


def _by_weight(weights: Float[np.ndarray, " n"]) -> Callable[[float], int]:
    """u in [0, 1) -> task: the inverse of the cumulated weights; a task of weight 0 is never chosen."""
    total = np.cumsum(weights)
    return functools.partial(_place, total)


def _place(total: np.ndarray, u: float) -> int:
    return int(np.searchsorted(total, min(u * total[-1], np.nextafter(total[-1], 0)), side="right"))
