"""The engine's compiled pieces: prefill some rows, decode a round of tokens. Pure; callers donate the cache.

Shapes are static: the number of lanes, of tokens per round, and `context`, how many cached columns are read at all, so
that short sessions are cheap. A lane's numbers depend on its own row and on these shapes only, never on other lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models.config import ModelConfig
from models.kv_cache import KVCache, NewKeys, append, gather
from models.sampling import Cut, sample
from models.transformer import (
    UNROLLED_LAYERS,
    Params,
    Past,
    Stack,
    apply_cached,
    by_layer,
    final_norm,
    head_logits,
    stack_layers,
)


def prefill(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    rows: Int[Array, "P"],
    tokens: Int[Array, "P t"],
    start: Int[Array, "P"],
    n_new: Int[Array, "P"],
    *,
    context: int,
) -> tuple[KVCache, Float[Array, "P D"]]:
    """Append n_new[p] tokens (right padded) to row rows[p] at positions start[p], ...; the last one's hidden state.

    Only cached columns below `context` are read: want start <= context <= capacity and start + n_new <= capacity. A
    lane that breaks this writes nothing and returns NaN. An unused lane has row index `cache.rows`, any start, n_new 0.
    DONATE `cache`.
    """
    sound = (start <= context) & (start + n_new <= cache.capacity) & (n_new <= tokens.shape[1])
    position = start[:, None] + jnp.arange(tokens.shape[1])
    params = params | {"blocks": by_layer(config, params["blocks"])}
    keys, values, last_key = _near(config, cache, rows, context)
    past = [_cached(keys, values, start, context)] if context else []
    x, new = apply_cached(params, config, tokens, position, past, last_key)
    cache = append(cache, stack_layers(config, new), rows, start, jnp.where(sound, n_new, 0))
    x = jnp.take_along_axis(x, jnp.maximum(n_new - 1, 0)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where(sound[:, None], final_norm(params, config, x), jnp.nan)


class Rules(NamedTuple):
    """What each lane may sample: `Constraint.next_state`, V as the logits', and each lane's state in it."""

    next_state: Int[Array, "Q V"]
    state: Int[Array, "S"]


class Round(NamedTuple):
    """One decode round: lane s sampled tokens[s, :n_done[s]]; the columns after that are 0. `alive`: not at its end.

    Under rules also where they left no choice (there logp is 0: no action), and each lane's state after its tokens.
    """

    tokens: Int[Array, "S n"]
    logp: Float[Array, "S n"]
    n_done: Int[Array, "S"]
    alive: Bool[Array, "S"]
    forced: Bool[Array, "S n"] | None = None
    state: Int[Array, "S"] | None = None


class _State(NamedTuple):
    """What a decode step changes."""

    step: Int[Array, ""]
    last: Int[Array, "S"]
    active: Bool[Array, "S"]
    new: Stack  # of NewKeys: one column per step, the same for all lanes
    last_key: Stack
    out: Round


def decode_round(
    params: Params,
    config: ModelConfig,
    cache: KVCache,
    rows: Int[Array, "S"],
    last: Int[Array, "S"],
    lengths: Int[Array, "S"],
    keys: PRNGKeyArray,
    temperature: Float[Array, "S"],
    greedy: Bool[Array, "S"],
    remaining: Int[Array, "S"],
    *,
    end_ids: tuple[int, ...] | Int[Array, " E"] | Int[Array, "S E"],
    n: int,
    context: int,
    cut: Cut | None = None,
    rules: Rules | None = None,
) -> tuple[KVCache, Round]:
    """Up to n tokens for each of S sessions: feed `last[s]` (position lengths[s], not yet cached), sample, and so on.

    A lane stops after an id of `end_ids` (those of all lanes, or of each its own), after `remaining[s]` tokens, or when
    its ids number `capacity`; the loop stops when all lanes have. Afterwards a session's length is lengths + n_done and
    its last id the last one sampled: the convention holds again. The token at absolute position i is drawn with
    fold_in(keys[s], i), so it depends neither on the round's size nor on other lanes. logp is as `sampling.sample`
    says, of the logits that `rules` allow; `cut` and `rules` None are the program without them.

    Want lengths <= context <= capacity; a lane that breaks this does nothing and has NaN logp. An unused lane has row
    index `cache.rows` and remaining 0. DONATE `cache`.
    """
    sound = lengths <= context
    params = params | {"blocks": by_layer(config, params["blocks"])}
    old_keys, old_values, last_key = _near(config, cache, rows, context)
    old = [_cached(old_keys, old_values, lengths, context)] if context else []
    lanes = rows.shape[0]
    fresh = jnp.zeros((config.n_layers, lanes, config.n_kv_heads, n, config.head_dim), config.dtype)
    out = empty_round(lanes, n)
    begin = _State(
        step=jnp.int32(0),
        last=last.astype(jnp.int32),
        # A lane holds lengths + 1 ids, the one to feed included; there must be place for the sampled one.
        active=sound & (remaining > 0) & (lengths + 2 <= cache.capacity),
        new=by_layer(config, NewKeys(fresh, fresh, fresh if config.key_shift else None)),
        last_key=last_key,
        out=out if rules is None else out._replace(forced=jnp.zeros((lanes, n), bool), state=rules.state),
    )

    def advance(state: _State) -> _State:
        position = lengths + state.step
        logits, added = _feed(params, config, state, position, old, n)
        drawn = jax.vmap(jax.random.fold_in)(keys, position + 1)
        ways = None if rules is None else rules.next_state[state.out.state]
        if ways is not None:
            logits = jnp.where(ways >= 0, logits, -jnp.inf)
        token, logp = sample(logits, drawn, temperature, greedy, cut)
        out = _written(state, token, logp, ways)
        full = position + 2 >= cache.capacity  # the sampled id is at position + 1: it is the last that fits
        ended = jnp.any(token[:, None] == jnp.asarray(end_ids, jnp.int32), -1) | (out.n_done >= remaining) | full
        return _State(
            step=state.step + 1,
            last=token,
            active=state.active & ~ended,
            new=jax.tree.map(lambda whole, part: _put(whole, part, state.step, axis=-2), state.new, added),
            last_key=_last_keys(config, added),
            out=out,
        )

    end = jax.lax.while_loop(lambda state: (state.step < n) & jnp.any(state.active), advance, begin)
    cache = append(cache, stack_layers(config, end.new), rows, lengths, end.out.n_done)
    return cache, end.out._replace(logp=jnp.where(sound[:, None], end.out.logp, jnp.nan), alive=end.active)


def empty_round(lanes: int, n: int) -> Round:
    """A round in which nothing was sampled."""
    none = jnp.zeros((lanes,), jnp.int32)
    return Round(jnp.zeros((lanes, n), jnp.int32), jnp.zeros((lanes, n), jnp.float32), none, jnp.zeros((lanes,), bool))


def _feed(
    params: Params, config: ModelConfig, state: _State, position: Int[Array, "S"], old: list[Past], n: int
) -> tuple[Float[Array, "S V"], Stack]:
    """Logits after each lane's last token. This round's tokens lie apart from the old columns, which stay untouched."""
    new = state.new
    columns = (new.k, new.v) if isinstance(new, NewKeys) else (tuple(x.k for x in new), tuple(x.v for x in new))
    fed = jnp.broadcast_to(jnp.arange(n) < state.step, (position.shape[0], n))
    recent = Past(*columns, fed, (position - state.step)[:, None] + jnp.arange(n))
    past = [*old, recent]
    x, added = apply_cached(params, config, state.last[:, None], position[:, None], past, state.last_key)
    return head_logits(params, final_norm(params, config, x)[:, 0], config.n_ids), added


def _written(state: _State, token: Int[Array, "S"], logp: Float[Array, "S"], ways: Int[Array, "S V"] | None) -> Round:
    """The round with this step's column, in the lanes that are active."""
    forced = None if ways is None else state.active & (jnp.sum(ways >= 0, axis=-1) == 1)
    # Exactly 0 where there was no choice, whatever a fused division and subtraction round to.
    said = state.active if forced is None else state.active & ~forced
    out = Round(
        _put(state.out.tokens, jnp.where(state.active, token, 0)[:, None], state.step, axis=1),
        _put(state.out.logp, jnp.where(said, logp, 0.0)[:, None], state.step, axis=1),
        state.out.n_done + state.active,
        state.out.alive,
    )
    if forced is None:
        return out
    after = jnp.take_along_axis(ways, token[:, None], axis=-1)[:, 0]
    return out._replace(
        forced=_put(state.out.forced, forced[:, None], state.step, axis=1),
        state=jnp.where(state.active, after, state.out.state),
    )


def _cached(keys: Stack, values: Stack, length: Int[Array, "P"], context: int) -> Past:
    """The first `context` columns of some rows, of which each row has filled `length`; column i holds position i."""
    column = jnp.arange(context)
    return Past(keys, values, column < length[:, None], jnp.broadcast_to(column, (length.shape[0], context)))


def _put(whole: Array, part: Array, index: Int[Array, ""], *, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part, index, axis)


def _last_keys(config: ModelConfig, added: Stack) -> Stack:
    if not config.key_shift:
        return None
    # One token per lane was fed, so column 0 of the token axis is the last key.
    return added.raw_key[..., 0, :] if isinstance(added, NewKeys) else tuple(x.raw_key[..., 0, :] for x in added)


def _near(config: ModelConfig, cache: KVCache, rows: Int[Array, "S"], context: int) -> tuple[Stack, Stack, Stack]:
    """`gather`, by layer: keys, values, last keys."""
    if config.n_layers > UNROLLED_LAYERS:
        return tuple(gather(cache, rows, context))
    # Layer by layer: a slice of what was gathered of all would be a second copy.
    layers = [gather(cache, rows, context, layer) for layer in range(config.n_layers)]
    return tuple(None if x[0] is None else tuple(x) for x in zip(*layers, strict=True))
