"""Credit from rewards on the host: whose merit was an episode's reward? One number an episode, or one for each turn.

Each function takes the episodes of a batch and their rewards and gives {(ticket, member): number or [turns]}, which
`rl.rollout.batcher.pack` writes on the action tokens. Groups are by ticket.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

from rl import advantages
from rl.rewards.compose import RewardTerm
from rl.types import Trajectory

Credit = Mapping[tuple[int, int], float | Float[np.ndarray, " turns"]]
CreditFn = Callable[[Sequence[Trajectory], Sequence[float]], Credit]


def relative(episodes: Sequence[Trajectory], rewards: Sequence[float], *, scale: str) -> Credit:
    """`group_relative`, one number an episode: GRPO, DAPO, GSPO, CISPO ("std"), Dr. GRPO ("none")."""
    return _named(episodes, advantages.group_relative(np.array(rewards), _groups(episodes), scale=scale))


def leave_one_out(episodes: Sequence[Trajectory], rewards: Sequence[float]) -> Credit:
    """`leave_one_out`, one number an episode: RLOO."""
    return _named(episodes, advantages.leave_one_out(np.array(rewards), _groups(episodes)))


def of_critic(episodes: Sequence[Trajectory], rewards: Sequence[float]) -> Credit:
    """Nothing yet: `learner.prepare` fills advantages on the device (rl/critic.py)."""
    return _named(episodes, [0.0] * len(episodes))


def by_anchor(
    episodes: Sequence[Trajectory],
    rewards: Sequence[float],
    *,
    discount: float,
    weight: float,
    scale: str,
    terms: Sequence[RewardTerm] = (),
) -> Credit:
    """`gigpo`, one number a turn. `terms` of scope "turn" are given to their turns, the rest of the reward to the last.

    The state before a turn is what the policy read since its last token (`anchors`): for the first turn the prompt, so
    that all first turns of a group are one anchor group.
    """
    steps = turn_rewards(episodes, rewards, terms)
    how = {"discount": discount, "weight": weight, "scale": scale}
    return _named(
        episodes, advantages.gigpo(np.array(rewards), list(map(anchors, episodes)), steps, _groups(episodes), **how)
    )


def by_process(
    episodes: Sequence[Trajectory], rewards: Sequence[float], *, scale: str, terms: Sequence[RewardTerm]
) -> Credit:
    """`process_relative`, one number a turn, of the rewards that `turn_rewards` gives each."""
    steps = turn_rewards(episodes, rewards, terms)
    return _named(episodes, advantages.process_relative(steps, _groups(episodes), scale=scale))


def turn_rewards(
    episodes: Sequence[Trajectory], rewards: Sequence[float], terms: Sequence[RewardTerm] = ()
) -> list[Float[np.ndarray, " turns"]]:
    """Each episode's reward dealt to its turns: what each term of scope "turn" gave to each, the rest to the last.

    A term may stop at the last turn that it gives anything. Raises ValueError for one that judges more turns than were
    sampled.
    """
    dealt = [np.zeros(t.n_turns) for t in episodes]
    for term in (term for term in terms if term.scope == "turn"):
        for out, given in zip(dealt, term.values(episodes), strict=True):
            own = np.asarray(given, np.float64)
            if own.ndim != 1 or len(own) > len(out):
                raise ValueError(
                    f"reward term {term.name!r}: got {own.shape} scores of {len(out)} turns, want one for each turn"
                )
            out[: len(own)] += term.weight * own
    for out, reward in zip(dealt, rewards, strict=True):
        if len(out):
            out[-1] += reward - out.sum()
    return dealt


def anchors(trajectory: Trajectory) -> list[bytes]:
    """For each turn what the policy read before it: the ids since its last action, glue included; equal bytes, equal
    observations.

    What it read earlier is not in it: two episodes that came to the same observation by different ways stand in the
    same state. But where the template begins a new row, that row's first turn has all of the conversation for its
    prompt, and for its anchor.
    """
    found: dict[int, bytes] = {}
    for row in trajectory.rows:
        for turn in np.unique(row.turn[row.turn >= 0]).tolist():
            start = int(np.argmax(row.turn == turn))
            (acted,) = np.nonzero(row.action_mask[:start])
            found[turn] = row.tokens[acted[-1] + 1 if len(acted) else 0 : start].tobytes()
    return [found[turn] for turn in sorted(found)]


def _groups(episodes: Sequence[Trajectory]) -> np.ndarray:
    return np.array([t.ticket for t in episodes], np.int64)


def _named(episodes: Sequence[Trajectory], numbers: Sequence[float | np.ndarray]) -> Credit:
    return {(t.ticket, t.member): number for t, number in zip(episodes, numbers, strict=True)}
