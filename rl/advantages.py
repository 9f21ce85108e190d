"""From rewards to advantages. Over a group on the host (NumPy), over time on the device (jax)."""

import math
from collections.abc import Callable, Hashable, Sequence, Sized

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128  # tokens that gae goes through one after another


def group_relative(
    rewards: Float[np.ndarray, " N"],
    groups: Int[np.ndarray, " N"],
    valid: Bool[np.ndarray, " N"] | None = None,
    *,
    scale: str,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[np.ndarray, " N"]:
    """A_i = (R_i - mean_g) / (std_g + eps) with scale "std" (2402.03300 §4.1.2), R_i - mean_g with "none" (2503.20783).

    Mean and std over the valid members of i's group, by its number in `groups`, whatever the order. Invalid members
    (ENV_ERROR, CANCELLED, not judged) are absent from the group and get 0. Exactly 0 for equal rewards or a group of
    one. Raises ValueError for a valid reward that is not finite.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale: got {scale!r}, want 'std' or 'none'")

    def one_group(r):
        mean = math.fsum(r) / len(r)
        centred = r - mean
        if scale == "none":
            return centred
        return centred / (math.sqrt(math.fsum(centred**2) / (len(r) - ddof)) + eps)

    return _by_group(rewards, groups, valid, one_group)


def leave_one_out(
    rewards: Float[np.ndarray, " N"], groups: Int[np.ndarray, " N"], valid: Bool[np.ndarray, " N"] | None = None
) -> Float[np.ndarray, " N"]:
    """A_i = R_i - mean of the *other* valid members of i's group (RLOO, 2402.14740). Otherwise as `group_relative`."""
    return _by_group(rewards, groups, valid, lambda r: (r - math.fsum(r) / len(r)) * len(r) / (len(r) - 1))


def _by_group(rewards, groups, valid, one_group: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    rewards, groups = np.asarray(rewards, np.float64), np.asarray(groups)
    valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid, bool)
    if rewards.ndim != 1 or groups.shape != rewards.shape or valid.shape != rewards.shape:
        raise ValueError(
            f"got rewards {rewards.shape}, groups {groups.shape}, valid {valid.shape}; want one length each"
        )
    bad = valid & ~np.isfinite(rewards)
    if bad.any():
        where = np.flatnonzero(bad).tolist()
        raise ValueError(
            f"rewards at {where}: got {rewards[bad].tolist()}, want finite; mark what was not judged invalid"
        )
    out = np.zeros_like(rewards)
    places = np.flatnonzero(valid)
    places = places[np.argsort(groups[places], kind="stable")]
    borders = np.flatnonzero(groups[places[1:]] != groups[places[:-1]]) + 1
    for members in np.split(places, borders) if len(places) else []:
        r = rewards[members]
        # By comparison, not by eps: the mean of equal floats is off by an ulp, and an ulp over a std of an ulp is O(1).
        if r.max() > r.min():
            out[members] = one_group(r)
    return out


def process_relative(
    step_rewards: Sequence[Float[np.ndarray, " steps"]], groups: Int[np.ndarray, " N"], *, scale: str
) -> list[Float[np.ndarray, " steps"]]:
    """A_it = Σ_{k ≥ t} r̃_ik: what is still to come of rewards that were given step by step (2402.03300 §4.1.3).

    r̃ is a step's reward relative to all steps of all members of its group, by `group_relative`. One array an episode.
    """
    rewards, owner = _steps(step_rewards, groups)
    relative = group_relative(rewards, np.asarray(groups)[owner], scale=scale)
    return [np.cumsum(own[::-1])[::-1] for own in _by_episode(relative, step_rewards)]


def gigpo(
    outcomes: Float[np.ndarray, " N"],
    anchors: Sequence[Sequence[Hashable]],
    step_rewards: Sequence[Float[np.ndarray, " steps"]],
    groups: Int[np.ndarray, " N"],
    *,
    discount: float,
    weight: float,
    scale: str,
) -> list[Float[np.ndarray, " steps"]]:
    """A_it = A^E_i + weight · A^S_it (GiGPO, 2505.10978): the episode in its group, and the step among its likes.

    A^E = group_relative(outcomes). A^S is group_relative of the return from the step on, Σ_{k ≥ t} discount^{k-t} r_ik,
    over all steps of the group's episodes that were taken in the same state: `anchors[i][t]` is equal where the states
    before the steps are. A state seen once has A^S 0; where no state comes back, this is GRPO. `step_rewards` hold the
    outcome too, at the last step, if it is to count among them. One array an episode.
    """
    if len(anchors) != len(step_rewards) or any(map(lambda a, r: len(a) != len(r), anchors, step_rewards)):
        got = [len(a) for a in anchors], [len(r) for r in step_rewards]
        raise ValueError(f"gigpo: got anchors and rewards of {got[0]} and {got[1]} steps, want one of each for a step")
    _, owner = _steps(step_rewards, groups)
    episode = group_relative(outcomes, groups, scale=scale)
    returns = [_discounted(np.asarray(r, np.float64), discount) for r in step_rewards]
    numbers: dict[tuple, int] = {}
    states = zip(np.asarray(groups)[owner].tolist(), (a for own in anchors for a in own), strict=True)
    alike = np.array([numbers.setdefault(state, len(numbers)) for state in states], np.int64)
    step = group_relative(np.concatenate([*returns, np.zeros(0)]), alike, scale=scale)
    return _by_episode(episode[owner] + weight * step, step_rewards)


def _steps(step_rewards, groups) -> tuple[Float[np.ndarray, " steps"], Int[np.ndarray, " steps"]]:
    """All steps one after another, and whose each is."""
    if len(step_rewards) != len(groups):
        raise ValueError(f"got steps of {len(step_rewards)} episodes and groups of {len(groups)}, want one each")
    lengths = [len(own) for own in step_rewards]
    return np.concatenate([*step_rewards, np.zeros(0)]), np.repeat(np.arange(len(lengths)), lengths)


def _by_episode(steps: Float[np.ndarray, " steps"], like: Sequence[Sized]) -> list[Float[np.ndarray, " steps"]]:
    return np.split(steps, np.cumsum([len(own) for own in like])[:-1]) if len(like) else []


def _discounted(rewards: Float[np.ndarray, " steps"], discount: float) -> Float[np.ndarray, " steps"]:
    out, after = np.zeros_like(rewards), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        out[t] = after = rewards[t] + discount * after
    return out


# --- over time, with a critic ----------------------------------------------------------------------------------------


def gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    mask: Bool[Array, " T"],
    *,
    discount: float,
    lambda_: float,
    episode: Int[Array, " T"] | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """A_t = δ_t + γλ A_{t'}, δ_t = r_t + γ V_{t'} - V_t, t' the next *masked* token (0 after the last); returns A + V.

    GAE (1506.02438 eq. 16) over the policy's own tokens: those with mask 0 take no part, so that neither discount nor
    critic sees an observation; both outputs are 0 there. A reward belongs on a masked token: off the mask it is not
    read. One episode, or several one after another: a change of `episode` from one masked token to the next ends one.
    vmap for more.
    """
    mask = mask.astype(bool)
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    places = jnp.arange(mask.shape[0])
    order = jnp.argsort(jnp.where(mask, -places, 1))  # the masked tokens, the last one first, then the others
    own, r, v = mask[order], rewards[order], values[order]
    goes_on = own & (places > 0)
    if episode is not None:
        goes_on &= episode[order] == jnp.roll(episode[order], 1)
    delta = jnp.where(own, r + discount * jnp.where(goes_on, jnp.roll(v, 1), 0.0) - v, 0.0)
    decay = jnp.where(goes_on, discount * lambda_, jnp.zeros_like(delta))

    backward = _accumulate(decay, delta)[: mask.shape[0]]
    advantages = jnp.zeros_like(delta).at[order].set(jnp.where(own, backward, 0.0))
    return advantages, advantages + values


def _accumulate(decay: Float[Array, " T"], delta: Float[Array, " T"]) -> Float[Array, " T"]:
    """x_i = decay_i · x_{i-1} + delta_i from x_{-1} = 0, over blocks at once and then from block to block: of a long
    batch a device takes BLOCK + T / BLOCK steps, not T.
    """
    blocks = -(-len(delta) // BLOCK)
    decay, delta = (jnp.pad(x, (0, blocks * BLOCK - len(x))).reshape(blocks, BLOCK).T for x in (decay, delta))

    def within(carry, now):
        product, x = carry
        carry = now[0] * product, now[0] * x + now[1]
        return carry, carry

    start = jnp.ones_like(delta[0]), jnp.zeros_like(delta[0])
    _, (product, x) = jax.lax.scan(within, start, (decay, delta))
    zero, ends = jnp.zeros((), x.dtype), (product[-1], x[-1])
    _, before = jax.lax.scan(lambda x, end: (end[0] * x + end[1], x), zero, ends)
    return (product * before + x).T.ravel()


def turn_level_gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    turn: Int[Array, " T"],
    mask: Bool[Array, " T"],
    *,
    discount: float,
    lambda_: float,
    episode: Int[Array, " T"] | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """GAE whose steps are turns (Turn-PPO, 2512.17008): every masked token of turn k gets A_k, and A_k + V_k as return.

        A_k = δ_k + γλ A_{k+1},   δ_k = r_k + γ V_{k+1} - V_k

    V_k is the value at the turn's first masked token, r_k the sum of the turn's rewards. `discount` and `lambda_` are a
    turn's, however long it is. A turn without a masked token is none. The return of a turn is that of the states within
    it too, so the critic may learn from each. `turn` and `episode` as in `gae`.
    """
    mask = mask.astype(bool)
    run, starts, _ = _turns(turn, mask, episode)
    total = _sum_by_run(jnp.where(mask, rewards, 0.0), run)
    how = {"discount": discount, "lambda_": lambda_, "episode": episode}
    both = gae(jnp.where(starts, total, 0.0), values, starts, **how)
    return tuple(jnp.where(mask, _sum_by_run(x, run), 0.0) for x in both)


def bi_level_gae(
    rewards: Float[Array, " T"],
    values: Float[Array, " T"],
    turn: Int[Array, " T"],
    mask: Bool[Array, " T"],
    *,
    discount: float,
    lambda_: float,
    turn_discount: float,
    episode: Int[Array, " T"] | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """GAE over turns, then within each turn towards what the first found (VAGEN's and RAGEN's bi-level GAE).

        A^H_k = δ_k + γ_H λ A^H_{k+1},   δ_k = r_k + γ_H V(p_{k+1}) - V(p_k)
        within turn k: GAE(γ, λ) with the reward A^H_k + V(p_k) at p_k and nothing after it

    p_k is the last masked token of turn k; r_k the sum of the turn's rewards; γ_H is `turn_discount`. A turn ends where
    `turn` says so: by its reward, as in those authors' code, one that earned nothing would run on into the next.
    """
    mask = mask.astype(bool)
    run, _, ends = _turns(turn, mask, episode)
    total = _sum_by_run(jnp.where(mask, rewards, 0.0), run)
    high, _ = gae(jnp.where(ends, total, 0.0), values, ends, discount=turn_discount, lambda_=lambda_, episode=episode)
    goal = jnp.where(ends, high + jnp.where(ends, values, 0.0), 0.0)
    return gae(goal, values, mask, discount=discount, lambda_=lambda_, episode=run)


def relative_on_device(
    rewards: Float[Array, " T"],
    mask: Bool[Array, " T"],
    episode: Int[Array, " T"],
    group: Int[Array, " T"],
    *,
    baseline: str,
    eps: float = 1e-6,
) -> Float[Array, " T"]:
    """An episode's sum of rewards against its group's, on each of its masked tokens; 0 elsewhere.

    `baseline` "std" and "none" as the scales of `group_relative`, "others" as `leave_one_out`: for rewards of which the
    host does not know all. The masked tokens of an episode stand together, and so do the episodes of a group. An
    episode without any is in no group.
    """
    if baseline not in ("std", "none", "others"):
        raise ValueError(f"baseline: got {baseline!r}, want 'std', 'none' or 'others'")
    mask = mask.astype(bool)
    own, first, _ = _turns(episode, mask, None)
    of_group, _, _ = _turns(group, mask, None)
    score = _sum_by_run(jnp.where(mask, rewards, 0.0), own)

    def over_group(x):
        return _sum_by_run(jnp.where(first, x, 0.0), of_group)

    n = over_group(jnp.ones_like(score))
    centred = score - over_group(score) / jnp.maximum(n, 1)
    out = {
        "std": lambda: centred / (jnp.sqrt(over_group(centred**2) / jnp.maximum(n - 1, 1)) + eps),
        "none": lambda: centred,
        "others": lambda: centred * n / jnp.maximum(n - 1, 1),
    }[baseline]()
    # By comparison, as in `group_relative`: what rounding leaves of equal scores is no difference.
    most, least = (
        jax.ops.segment_max(jnp.where(first, x, -jnp.inf), of_group, num_segments=len(x))[of_group]
        for x in (score, -score)
    )
    return jnp.where(mask & (most != -least), out, 0.0)


def _turns(turn, mask, episode) -> tuple[Int[Array, " T"], Bool[Array, " T"], Bool[Array, " T"]]:
    """The number of each masked token's turn, in order over all episodes; where its first and last masked token is."""
    places = jnp.arange(mask.shape[0])
    last_seen = jax.lax.cummax(jnp.where(mask, places, -1))
    before = jnp.pad(last_seen[:-1], (1, 0), constant_values=-1)  # the masked token before each one
    changes = turn != turn[before]
    if episode is not None:
        changes |= episode != episode[before]
    starts = mask & ((before < 0) | changes)
    run = jnp.maximum(jnp.cumsum(starts) - 1, 0)
    last = jax.ops.segment_max(jnp.where(mask, places, -1), run, num_segments=mask.shape[0])
    return run, starts, mask & (last[run] == places)


def _sum_by_run(x: Float[Array, " T"], run: Int[Array, " T"]) -> Float[Array, " T"]:
    return jax.ops.segment_sum(x, run, num_segments=x.shape[0], indices_are_sorted=True)[run]
