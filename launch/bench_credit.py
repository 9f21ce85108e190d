"""Which estimator gives credit to the step that earned it? In a world where the right answer is known (envs/credit.py).

A random policy plays; each estimator sees outcomes alone, and its credit of every step of every episode is correlated
with Q - V. A turn is five words, the units that token-level GAE sees; a step's credit is the mean over its words. The
critic is a table over (task, observation, words of the turn so far): the mean outcome of the same episodes.

What to expect where the critic knows nothing beforehand. The outcome is R. Credit that is R - mean at each of T steps
correlates 1/√T, however many samples. GiGPO, whose second term is R - mean at the s steps that are shared by a group
(the first, the deciding one, and, with many samples, some early ones) correlates (1 + ω) / √(T - s + s·(1 + ω)²), for
ω → ∞ and a critic likewise 1/√s: an early state that comes back is noise to whoever compares outcomes in it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from envs import choose_tasks, make_world
from envs.base import Task
from envs.credit import random_policy, true_credit
from envs.play import play
from rl import advantages, critic

TASKS, GROUP, P_RIGHT, THOUGHTS = 20, 8, 0.5, ("hm", "well", "so", "now")
SAMPLES, SEEDS = (1, 4, 16), 3


@dataclasses.dataclass(frozen=True)
class Played:
    """Episodes of N, all of one number of steps, and their words, one after another, of n."""

    task: np.ndarray  # [N]
    outcome: np.ndarray  # [N]
    observations: list[list[str]]  # [N][steps], before each step
    true: np.ndarray  # [N steps]
    episode: np.ndarray  # [n]
    turn: np.ndarray  # [n]
    state: np.ndarray  # [n], the number of what the policy had read and said
    rewards: np.ndarray  # [n]


def lines(seed: int) -> Iterator[dict[str, Any]]:
    """One for each estimator and number of samples: the correlation, its mean over seeds and each."""
    for samples in SAMPLES:
        played = [play_all(seed + i, samples * GROUP) for i in range(SEEDS)]
        for name, estimate in ESTIMATORS.items():
            found = [np.corrcoef(estimate(p).ravel(), p.true.ravel())[0, 1] for p in played]
            yield {
                "estimator": name,
                "samples": samples,
                "episodes_per_task": samples * GROUP,
                "correlation": round(float(np.mean(found)), 3),
                "by_seed": [round(float(x), 3) for x in found],
            }


def play_all(seed: int, per_task: int) -> Played:
    """`per_task` episodes of each of TASKS tasks; task, member and seed say what is drawn."""
    world = make_world("credit")
    env, tasks = world.make_env(), choose_tasks(world, "train", TASKS, seed)
    numbers: dict[tuple, int] = {}
    whose, outcomes, observations, true, words = [], [], [], [], []
    for i, task in enumerate(tasks):
        for member in range(per_task):
            rng = np.random.Generator(np.random.Philox(key=np.array([seed, i * 2**32 + member], np.uint64)))
            policy = random_policy(P_RIGHT, task.data["switches"], rng, THOUGHTS)
            turns, facts = play(env, task, policy)
            seen = [env.reset(task).text, *(text for _, text in turns[:-1])]
            words += _words(i, len(outcomes), seen, [action for action, _ in turns], numbers)
            whose.append(i)
            outcomes.append(float(facts["success"]))
            observations.append(seen)
            true.append(_true(task, facts))
    env.close()
    episode, turn, state = np.array(words, np.int32).T
    last = np.append(episode[1:] != episode[:-1], True)
    outcome = np.array(outcomes, np.float32)
    rewards = np.where(last, outcome[episode], 0)
    return Played(np.array(whose), outcome, observations, np.array(true), episode, turn, state, rewards)


def _words(task: int, episode: int, seen: list[str], said: list[str], numbers: dict[tuple, int]) -> list[tuple]:
    """(episode, turn, state) of every word."""
    out = []
    for turn, (observation, action) in enumerate(zip(seen, said, strict=True)):
        prefix = (task, observation)
        for word in action.split():
            out.append((episode, turn, numbers.setdefault(prefix, len(numbers))))
            prefix = (*prefix, word)
    return out


def _true(task: Task, facts: Mapping[str, Any]) -> np.ndarray:
    return true_credit(task, facts["right"], P_RIGHT)


def broadcast(played: Played) -> np.ndarray:
    """R - mean of the task's episodes, at every step."""
    return _each_step(played, advantages.group_relative(played.outcome, played.task, scale="none"))


def others(played: Played) -> np.ndarray:
    """R - mean of the task's other episodes, at every step."""
    return _each_step(played, advantages.leave_one_out(played.outcome, played.task))


def _each_step(played: Played, credit: np.ndarray) -> np.ndarray:
    return np.repeat(credit[:, None], played.true.shape[1], axis=1)


def by_anchor(weight: float) -> Callable[[Played], np.ndarray]:
    """GiGPO, the state a step was taken in being the observation before it; no discount."""

    def estimate(played: Played) -> np.ndarray:
        steps = np.zeros(played.true.shape)
        steps[:, -1] = played.outcome
        how = {"discount": 1.0, "weight": weight, "scale": "none"}
        return np.stack(advantages.gigpo(played.outcome, played.observations, list(steps), played.task, **how))

    return estimate


def by_critic(estimator: critic.Estimator) -> Callable[[Played], np.ndarray]:
    """An estimator of rl/critic.py with the table for values."""
    compiled = jax.jit(estimator)

    def estimate(played: Played) -> np.ndarray:
        visits = np.bincount(played.state)
        table = np.bincount(played.state, played.outcome[played.episode]) / visits
        values = table[played.state].astype(np.float32)
        every = np.ones(len(values), bool)
        credit = np.asarray(compiled(played.rewards, values, played.turn, every, played.episode)[0])
        place = played.episode * played.true.shape[1] + played.turn
        return (np.bincount(place, credit) / np.bincount(place)).reshape(played.true.shape)

    return estimate


ESTIMATORS: dict[str, Callable[[Played], np.ndarray]] = {
    "group_relative": broadcast,
    "leave_one_out": others,
    "gae": by_critic(critic.token_level(discount=1.0, lambda_=0.95)),
    "turn_level_gae": by_critic(critic.turn_level(discount=1.0, lambda_=0.95)),
    "bi_level_gae": by_critic(critic.bi_level(discount=1.0, lambda_=0.95, turn_discount=1.0)),
    "gigpo": by_anchor(1.0),
    "gigpo_weight_2": by_anchor(2.0),
}
