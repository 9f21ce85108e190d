"""What the critic expects of an episode between two turns: V of the state that the policy would act in next."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models import transformer
from models.config import ModelConfig
from models.heads import value
from rl.rollout.weights import snapshot


class Critic:
    """V (in units of the reward) by the value head of the weights that were published last; thread-safe.

    `self(states)`: each is the ids that the policy has read and said, those that it would read next included, and V is
    what the learner's critic says of the first token that it would sample. They are judged `rows` at a time under the
    compiled `lengths` (rising), a line each: what is asked together changes nothing. NaN for a state that leaves no
    room for a token in the last length, and for every state before `version` has come to `after`: a head that starts at
    zero expects nothing of anybody until it has been trained. Errors: ValueError for parameters without a value head.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        version: int,
        *,
        after: int,
        lengths: Sequence[int],
        rows: int,
        pad_id: int,
    ):
        if "value_head" not in params:
            raise ValueError(f"Critic: got parameters {sorted(params)}, want a value_head among them")
        self._config, self._rows, self._pad_id = config, rows, pad_id
        self._widths, self._after = np.array(sorted(lengths)), after
        self.publish(params, version)

    def publish(self, params: Any, version: int) -> None:
        """Judge by a copy of `params` from now on, in whole; the caller may donate them afterwards."""
        self._published = snapshot(params, version)

    def __call__(self, states: Sequence[Sequence[int]]) -> list[float]:
        published, out = self._published, [np.nan] * len(states)
        if published.version < self._after:
            return out
        widths = np.searchsorted(self._widths, [len(ids) + 1 for ids in states])
        for i, width in enumerate(self._widths.tolist()):
            (own,) = np.nonzero(widths == i)
            for begin in range(0, len(own), self._rows):
                some = own[begin : begin + self._rows].tolist()
                tokens, length = np.full((self._rows, width), self._pad_id, np.int32), np.zeros(self._rows, np.int32)
                for line, j in enumerate(some):
                    length[line] = len(states[j])
                    tokens[line, : length[line]] = states[j]
                values = jax.device_get(_values(self._config, published.params, tokens, length))
                for line, j in enumerate(some):
                    out[j] = float(values[line])
        return out


@partial(jax.jit, static_argnums=0)
def _values(
    config: ModelConfig, params: Any, tokens: Int[Array, "B T"], length: Int[Array, " B"]
) -> Float[Array, " B"]:
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segment = (place <= length[:, None]).astype(jnp.int32)  # and one place after the ids, whose V is asked for
    hidden = transformer.apply(params, config, tokens, segment, place)
    return value(params["value_head"], hidden, segment)[jnp.arange(len(length)), length]
