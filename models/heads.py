"""Heads on the trunk: a value for every token, a yes or no for every episode or for every turn of one.

Each head is a small tree of its own, kept in the parameters under its name in `AXES`. `hidden` [B T D] is what
`transformer.apply` returns for packed rows, so hidden[b, t] has seen tokens[b, : t + 1]. Results are float32 and per
token, in the same layout; where they mean nothing they are 0. The trunk learns from a head too, unless the caller
passes `jax.lax.stop_gradient(hidden)`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models.config import ModelConfig
from models.transformer import Params, head_weight

Head = dict[str, Array]

_ANSWERS = {"weight": ("embed", "answers"), "bias": ("answers",)}  # column 0 is yes, column 1 is no
# Logical axes of every head, by its name in the parameters (models/lora.py trains these beside the adapters).
AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "value_head": {"weight": ("embed",), "bias": ()},
    "orm_head": _ANSWERS,
    "prm_head": _ANSWERS,
}


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


init_orm = init_answers
init_prm = init_answers


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
