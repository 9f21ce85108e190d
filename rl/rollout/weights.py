"""Versioned snapshots of the policy's parameters, adapters merged.

The learner donates its own state at every step, so the arrays it holds now are gone after the next step. Whoever serves
weights serves a copy in buffers of its own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from models.lora import merge


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Parameters that nobody donates, and the learner version they are."""

    params: Any
    version: int


def snapshot(params: Any, version: int) -> Snapshot:
    """Copy `params` into fresh buffers of the same placement, W + s A B in the place of W, A and B.

    Merged once for each publish, an adapter costs nothing at the thousands of decode steps that follow.
    The copy is enqueued before this returns, so a donation of `params` by a later program cannot reach it.
    Does not cover: another dtype or mesh than the learner's.
    """
    return Snapshot(_copy(params), version)


@jax.jit
def _copy(params: Any) -> Any:
    # jnp.copy, because jit may hand an untouched input through as its output: the very buffer that the learner donates
    return merge(jax.tree.map(jnp.copy, params))
