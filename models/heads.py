"""Heads on the trunk: a value for every token, a yes or no for every episode or for every turn of one.

Each head is a small tree of its own, kept in the parameters under its name (`models.config.HEADS`). `hidden` [B T D] is
what `transformer.apply` returns for packed rows, so hidden[b, t] has seen tokens[b, : t + 1]. Results are float32 and
per token, in the same layout; where they mean nothing they are 0. The trunk learns from a head too, unless the caller
passes `jax.lax.stop_gradient(hidden)`.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models.config import HEADS, ModelConfig
from models.transformer import Params, head_weight

Head = dict[str, Array]

_VALUE = {"weight": ("embed",), "bias": ()}
_ANSWERS = {"weight": ("embed", "answers"), "bias": ("answers",)}  # column 0 is yes, column 1 is no
# Logical axes of every head.
AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = dict(zip(HEADS, (_VALUE, _ANSWERS, _ANSWERS), strict=True))
_APART = 2**31 - 2  # folded into the key: another than that of adapters (models/lora.py)


def add(params: Params, config: ModelConfig, names: Sequence[str], key: PRNGKeyArray) -> Params:
    """`params` with the named heads, fresh; the other leaves are the same arrays.

    A head's numbers depend on the key and on its name alone; the key may be the one that `params` were drawn from.
    Errors (ValueError): a name that is not one of HEADS, or that is there already.
    """
    wrong = [name for name in names if name not in HEADS or name in params]
    if wrong:
        raise ValueError(f"heads: got {wrong} for parameters {sorted(params)}, want of {HEADS} what is not there")
    key = jax.random.fold_in(key, _APART)
    kinds = dict(zip(HEADS, (init_value, init_answers, init_answers), strict=True))
    return params | {name: kinds[name](config, jax.random.fold_in(key, HEADS.index(name))) for name in names}


def init_value(config: ModelConfig, key: PRNGKeyArray) -> Head:
    """A value head of zeros: before it has learnt anything it says 0, and it moves the trunk no sooner."""
    del key  # as the others take one
    return {"weight": jnp.zeros((config.d_model,)), "bias": jnp.zeros(())}


def value(head: Head, hidden: Float[Array, "B T D"], segment: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """V(tokens[:t]) at t, in units of the reward: PPO's critic on the policy's trunk (Schulman et al. 2017, eq. 9).

        V_t = w · h_{t-1} + b

    The state *before* token t, which is what an advantage compares the choice of token t with (`rl.advantages.gae`).
    0 at a segment's first token, before which there is nothing, and on padding.
    """
    before = _affine(hidden[:, :-1], head["weight"], head["bias"])
    follows = (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] > 0)
    return jnp.pad(jnp.where(follows, before, 0.0), ((0, 0), (1, 0)))


def init_answers(config: ModelConfig, key: PRNGKeyArray) -> Head:
    """A yes/no head, W ~ N(0, 1/(D + 1)) and b = 0 (Stiennon et al. 2020, appendix B.1, of a reward head)."""
    std = (config.d_model + 1) ** -0.5
    return {"weight": std * jax.random.normal(key, (config.d_model, 2), jnp.float32), "bias": jnp.zeros((2,))}


def answers_of_tokens(params: Params, yes_id: int, no_id: int) -> Head:
    """The yes/no head that the language model has already: its logits of two tokens (Zhang et al. 2024, GenRM)."""
    weight = head_weight(params)
    weight = weight if "lm_head" in params else weight.T
    return {"weight": jnp.stack([weight[:, yes_id], weight[:, no_id]], axis=1), "bias": jnp.zeros((2,))}


def orm(
    head: Head, hidden: Float[Array, "B T D"], segment: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Outcome: log-odds, in nats, that an episode is a success, at its last token; and where those tokens are.

        z = (w_yes - w_no) · h_T + b_yes - b_no        P(yes) = σ(z) = softmax over the two

    A verifier reads the whole solution before it judges (Cobbe et al. 2021, solution-level verifiers).
    """
    last = segment_ends(segment)
    return jnp.where(last, _log_odds(head, hidden), 0.0), last


def prm(
    head: Head,
    hidden: Float[Array, "B T D"],
    segment: Int[Array, "B T"],
    turn: Int[Array, "B T"],
    action_mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Process: log-odds, in nats, that a turn was good, at the last token sampled in it; and where those tokens are.

        z_k = (w_yes - w_no) · h_{e(k)} + b_yes - b_no        e(k) = last sampled token of turn k

    One prediction after each step, before the world has answered it (Lightman et al. 2023, section 2.6; our step is a
    turn). `turn` as in `rl.types.Row`; a turn in which nothing was sampled is not judged.
    """
    ends = turn_ends(segment, turn, action_mask)
    return jnp.where(ends, _log_odds(head, hidden), 0.0), ends


def log_odds(
    params: Params,
    hidden: Float[Array, "B T D"],
    segment: Int[Array, "B T"],
    turn: Int[Array, "B T"] | None,
    action_mask: Bool[Array, "B T"],
) -> Float[Array, "B T"] | None:
    """What the yes/no head of `params` says, `orm` or `prm`, 0 where it does not judge; None where there is no such
    head.

    Errors (ValueError): both heads are there, or turns are to be judged and `turn` is None.
    """
    names = [name for name in ("orm_head", "prm_head") if name in params]
    if not names:
        return None
    if len(names) > 1 or (names == ["prm_head"] and turn is None):
        got = f"heads {names}, turn={type(turn).__name__}"
        raise ValueError(f"log_odds: got {got}; want one of the two heads, and turns for prm_head")
    (name,) = names
    if name == "orm_head":
        return orm(params[name], hidden, segment)[0]
    return prm(params[name], hidden, segment, turn, action_mask)[0]


def segment_ends(segment: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """The last token of every segment; padding (segment 0) has none."""
    after = jnp.pad(segment[:, 1:], ((0, 0), (0, 1)))
    return (segment > 0) & (after != segment)


def turn_ends(
    segment: Int[Array, "B T"], turn: Int[Array, "B T"], action_mask: Bool[Array, "B T"]
) -> Bool[Array, "B T"]:
    """The last sampled token of every turn, whatever stands between sampled tokens."""
    sampled = action_mask & (segment > 0)
    length = segment.shape[1]
    place = jnp.where(sampled, jnp.arange(length), length)
    # of every token, the next sampled one after it; `length` where there is none, which reads the -1 put there
    after = jnp.pad(jax.lax.cummin(place, axis=1, reverse=True)[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    same = [
        jnp.take_along_axis(jnp.pad(x, ((0, 0), (0, 1)), constant_values=-1), after, axis=1) == x
        for x in (segment, turn)
    ]
    return sampled & ~(same[0] & same[1])


def _log_odds(head: Head, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    weight, bias = head["weight"], head["bias"]
    return _affine(hidden, weight[:, 0] - weight[:, 1], bias[0] - bias[1])


def _affine(hidden: Float[Array, "B T D"], weight: Float[Array, " D"], bias: Float[Array, ""]) -> Float[Array, "B T"]:
    return jnp.matmul(hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST) + bias
