"""One decoder for the Llama / Qwen family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The nnx modules only *declare*: each parameter once, with its initialiser and its logical axes. `init` splits them once;
from there on everything is a pure function of (params, arrays). Equal layers are stacked on a leading axis and scanned.
Not covered: experts.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from models.attention import Kernel, Part, attend, attend_parts, exact, kernel_for
from models.config import ModelConfig
from models.kv_cache import NewKeys
from models.lora import delta, has_adapter
from models.rope import rope, rope_angles

Params = dict[str, Any]
# Compiled programs with few layers run them unrolled: a scan copies every layer's residuals in and out of its stack.
UNROLLED_LAYERS = 4
# The logit of what is no id, at any temperature. Not -inf: the entropy's p · z must be 0, and 0 · inf is not a number.
NO_ID = -1e30


# --- declaration ---------------------------------------------------------------------------------------------------


def _param(value: Float[Array, "..."], *axes: str) -> nnx.Param:
    return nnx.Param(value, axes=axes)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> Float[Array, "..."]:
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)


class Attention(nnx.Module):
    """Projections of one layer; per-head norms, biases and key shift where the config has them."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        N, K, H = config.n_heads, config.n_kv_heads, config.head_dim
        wq, wk, wv, wo = (_mimetic_attention if config.init == "mimetic" else _normal_attention)(config, rngs)
        self.wq = _param(wq, "embed", "heads", "head_dim")
        self.wk = _param(wk, "embed", "kv_heads", "head_dim")
        self.wv = _param(wv, "embed", "kv_heads", "head_dim")
        self.wo = _param(wo, "heads", "head_dim", "embed")
        if config.attention_bias:
            self.bq = _param(jnp.zeros((N, H)), "heads", "head_dim")
            self.bk = _param(jnp.zeros((K, H)), "kv_heads", "head_dim")
            self.bv = _param(jnp.zeros((K, H)), "kv_heads", "head_dim")
        if config.qk_norm:
            # Mimetic: logits are 2/√H · q·k, so that a matching key stands out from the start.
            self.q_norm = _param(jnp.full((H,), 2.0 if config.init == "mimetic" else 1.0), "head_dim")
            self.k_norm = _param(jnp.ones((H,)), "head_dim")
        if config.key_shift:
            half = jnp.arange(K) < (K + 1) // 2
            share = jnp.where(half, 0.92, 0.08)[:, None]
            self.key_shift = _param(jnp.broadcast_to(jnp.log(share / (1 - share)), (K, H)), "kv_heads", "head_dim")


class Mlp(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F = config.d_model, config.d_ff
        self.gate = _param(_normal(rngs, (D, F), D**-0.5), "embed", "mlp")
        self.up = _param(_normal(rngs, (D, F), D**-0.5), "embed", "mlp")
        self.down = _param(_normal(rngs, (F, D), (2 * config.n_layers * F) ** -0.5), "mlp", "embed")


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = _param(jnp.ones((config.d_model,)), "embed")
        self.attention = Attention(config, rngs)
        self.mlp_norm = _param(jnp.ones((config.d_model,)), "embed")
        self.mlp = Mlp(config, rngs)


class Decoder(nnx.Module):
    """Embedding, stacked layers (leading axis `layers`), final norm, and a head of its own unless tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        V, D = config.vocab_size, config.d_model
        self.embed = _param(_normal(rngs, (V, D), D**-0.5), "vocab", "embed")
        stack = nnx.split_rngs(splits=config.n_layers)(nnx.vmap(lambda rngs: Block(config, rngs)))
        self.blocks = stack(rngs)
        self.final_norm = _param(jnp.ones((D,)), "embed")
        if not config.tie_embeddings:
            self.lm_head = _param(_normal(rngs, (D, V), D**-0.5), "embed", "vocab")


def _normal_attention(config: ModelConfig, rngs: nnx.Rngs) -> tuple[Float[Array, "..."], ...]:
    D, N, K, H = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    wq, wk, wv = (_normal(rngs, (D, heads, H), D**-0.5) for heads in (N, K, K))
    return wq, wk, wv, _normal(rngs, (N, H, D), (2 * config.n_layers * N * H) ** -0.5)


def _mimetic_attention(config: ModelConfig, rngs: nnx.Rngs) -> tuple[Float[Array, "..."], ...]:
    """Wk = A, Wq = .9 A + .44 noise; Wv = Q with orthonormal columns, Wo = .7 Qᵀ (after Trockman & Kolter 2023).

    A query resembles the keys of equal tokens, and what is attended is written back as it was: induction is near. Query
    heads of one kv head share its A and Q but not the noise, and Wo is divided among them.
    """
    D, N, K, H, G = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim, config.groups
    if K * H > D:
        raise ValueError(f"init='mimetic': got n_kv_heads*head_dim={K * H}, want at most d_model={D}")
    wk = _normal(rngs, (D, K, H), D**-0.5)
    wq = 0.9 * jnp.repeat(wk, G, axis=1) + 0.44 * _normal(rngs, (D, N, H), D**-0.5)
    wv = jnp.linalg.qr(_normal(rngs, (D, K * H), 1.0))[0].reshape(D, K, H)
    wo = 0.7 / G * jnp.repeat(wv, G, axis=1).transpose(1, 2, 0)
    return wq, wk, wv, wo


def init(config: ModelConfig, key: PRNGKeyArray) -> Params:
    """Fresh float32 parameters: a nested dict of arrays, layers stacked on a leading axis. Jittable, config static."""
    return nnx.to_pure_dict(nnx.split(Decoder(config, nnx.Rngs(params=key)))[1])


def logical_axes(config: ModelConfig) -> Params:
    """Names of every parameter's axes, in the structure of `init`; leaves are tuples of str."""
    state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[1]
    named = nnx.map_state(lambda path, p: (("layers",) if path[0] == "blocks" else ()) + p.get_metadata("axes"), state)
    return nnx.to_pure_dict(named)


# --- computation ---------------------------------------------------------------------------------------------------


# Cast to the compute dtype before anything else is done with them; norms, biases and the key shift are read in float32.
_CAST_FIRST = frozenset({"wq", "wk", "wv", "wo", "gate", "up", "down", "embed", "lm_head"})


def as_computed(params: Params, config: ModelConfig) -> Params:
    """`params` (without adapters) with the matrices already in config.dtype: the same numbers, from half the bytes of a
    float32 where that is bfloat16. For whoever only computes with them.
    """
    cast = _CAST_FIRST if config.embed_scale == 1.0 else _CAST_FIRST - {"embed"}  # which is scaled in float32
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(config.dtype) if path[-1].key in cast else x, params
    )


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "... D"]:
    """x / √(mean x² + ε) · weight, computed in float32 (Zhang & Sennrich 2019), returned in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * weight).astype(x.dtype)


# Inside the layers the stream is [M D], M = B·T tokens: on a CPU the gradients of plain matrix products need no
# transposed copies, which cost as much as the products. Only attention unfolds M.


def _matmul(x: Float[Array, "M a"], w: Float[Array, "a b"]) -> Float[Array, "M b"]:
    return jnp.matmul(x, w.astype(x.dtype), precision=exact(x.dtype))


def _linear(p: Params, name: str, x: Float[Array, "M a"]) -> Float[Array, "M b"]:
    """x W; with an adapter beside W, two thin products more: W + s A B is never formed, and has no gradient."""
    y = _matmul(x, p[name].reshape(x.shape[-1], -1))
    return y + delta(p, name, x) if has_adapter(p, name) else y


def _qkv(
    block: Params, config: ModelConfig, x: Float[Array, "M D"], shape: tuple[int, int]
) -> tuple[Float[Array, "B t n H"], ...]:
    """Queries, keys and values of B · t tokens before the key shift and RoPE: biases and per-head norms are in."""
    p, x = block["attention"], rms_norm(x, block["attention_norm"], config.rms_eps)
    q, k, v = (_linear(p, name, x).reshape(*shape, *p[name].shape[1:]) for name in ("wq", "wk", "wv"))
    if config.attention_bias:
        q, k, v = q + p["bq"].astype(q.dtype), k + p["bk"].astype(k.dtype), v + p["bv"].astype(v.dtype)
    if config.qk_norm:
        q, k = rms_norm(q, p["q_norm"], config.rms_eps), rms_norm(k, p["k_norm"], config.rms_eps)
    return q, k, v


def _shift(p: Params, k: Float[Array, "B t K H"], previous: Float[Array, "B t K H"]) -> Float[Array, "B t K H"]:
    """k_t ← (1 - s) k_t + s k_{t-1} with s = σ(param) per (kv head, channel): a head can match what came before."""
    share = jax.nn.sigmoid(p["key_shift"]).astype(k.dtype)
    return k + share * (previous - k)


def _output(p: Params, x: Float[Array, "M D"], mixed: Float[Array, "B t N H"]) -> Float[Array, "M D"]:
    return x + _linear(p, "wo", mixed.reshape(x.shape[0], -1))


def _mlp(block: Params, config: ModelConfig, x: Float[Array, "M D"]) -> Float[Array, "M D"]:
    p, y = block["mlp"], rms_norm(x, block["mlp_norm"], config.rms_eps)
    return x + _linear(p, "down", jax.nn.silu(_linear(p, "gate", y)) * _linear(p, "up", y))


def _embed(params: Params, config: ModelConfig, tokens: Int[Array, "B t"]) -> Float[Array, "M D"]:
    x = params["embed"][tokens.reshape(-1)]
    if config.embed_scale != 1.0:
        x = x * config.embed_scale
    return x.astype(config.dtype)


def _rematerialised(body: Callable, config: ModelConfig) -> Callable:
    if config.remat == "none":
        return body
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else None
    return jax.checkpoint(body, policy=policy, prevent_cse=False)  # `_unroll` keeps it in a loop


def _unroll(config: ModelConfig) -> int:
    """How many layers a step of the scan runs. Rematerialised layers stay in a loop: unrolled, the compiler merges the
    second forward pass with the first, and nothing is saved."""
    return config.n_layers if config.n_layers <= UNROLLED_LAYERS and config.remat == "none" else 1


def _attend(
    config: ModelConfig,
    kernel: Kernel,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment: Int[Array, "B T"],
    window: Int[Array, ""] | None,
    sharding: NamedSharding | None,
) -> Float[Array, "B T N H"]:
    """`attend` for a layer whose window is a number among the scanned ones, or None if no layer has one."""
    if kernel != "splash" or window is None:
        return attend(q, k, v, segment, window=window, kernel=kernel, sharding=sharding)
    # This kernel is compiled for its window: one branch for each that the config has.
    widths = sorted(set(config.windows))
    branches = [partial(attend, window=width, kernel=kernel, sharding=sharding) for width in widths]
    return jax.lax.switch(jnp.searchsorted(jnp.asarray(widths), window), branches, q, k, v, segment)


def apply(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    segment: Int[Array, "B T"],
    position: Int[Array, "B T"],
    *,
    sharding: NamedSharding | None = None,
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, over packed rows.

    A token sees the earlier tokens of its own segment; segment 0 is padding, whose states are finite and meaningless.
    `position` counts from 0 within each segment. hidden[b, t] predicts tokens[b, t + 1]. `sharding`: on
    several devices, that of queries, keys and values (`models.sharding.heads_sharding`).
    """
    kernel = kernel_for(config.attention, dtype=config.dtype, head_dim=config.head_dim, platform=jax.default_backend())
    cos, sin = rope_angles(position, config.head_dim, config.rope_theta, config.rope_scaling)
    follows = jnp.pad(segment[:, 1:] == segment[:, :-1], ((0, 0), (1, 0)))[..., None, None]

    def layer(x: Float[Array, "M D"], xs: tuple) -> tuple[Float[Array, "M D"], None]:
        block, window = xs
        p = block["attention"]
        q, k, v = _qkv(block, config, x, tokens.shape)
        if config.key_shift:
            before = jnp.pad(k[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
            k = _shift(p, k, jnp.where(follows, before, k))
        mixed = _attend(config, kernel, rope(q, cos, sin), rope(k, cos, sin), v, segment, window, sharding)
        x = _output(p, x, mixed)
        return _mlp(block, config, x), None

    x = _embed(params, config, tokens)
    windows = jnp.asarray(config.windows) if config.windows else None
    x, _ = jax.lax.scan(_rematerialised(layer, config), x, (params["blocks"], windows), unroll=_unroll(config))
    return final_norm(params, config, x).reshape(*tokens.shape, -1)


class Past(NamedTuple):
    """A run of cached columns, all layers: `seen[b, s]` says which of them the tokens of row b may look at.

    `position` of each column is read by layers with a sliding window alone.
    """

    k: "Stack"  # by layer, [B K s H]
    v: "Stack"
    seen: Bool[Array, "B s"]
    position: Int[Array, "B s"] | None = None


Stack = Any  # one tree with a leading axis L, or a tuple of L trees: `by_layer` chooses


def by_layer(config: ModelConfig, stacked: Params) -> Stack:
    """Few layers: a tuple of their trees, so that a loop of decode steps never copies a slice. Many: as they are."""
    if config.n_layers > UNROLLED_LAYERS:
        return stacked
    return tuple(jax.tree.map(operator.itemgetter(i), stacked) for i in range(config.n_layers))


def apply_cached(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B t"],
    position: Int[Array, "B t"],
    past: Sequence[Past],
    last_key: Stack = None,
) -> tuple[Float[Array, "B t D"], Stack]:
    """Hidden states (before the final norm) of new tokens that follow cached ones, and their `NewKeys` to store.

    Every token sees what `past` allows and the new tokens up to itself, so right padding is harmless. `last_key` is the
    unshifted key [B K H] of the token before each row's first new one (with a key shift; unread where position is 0).
    params["blocks"], past and last_key come `by_layer`, and so does the result. It writes nothing; `append` does.
    """
    cos, sin = rope_angles(position, config.head_dim, config.rope_theta, config.rope_scaling)
    length = tokens.shape[1]
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (tokens.shape[0], length, length))
    seen = [jnp.broadcast_to(run.seen[:, None], (*tokens.shape, run.seen.shape[1])) for run in past]
    seen.append(causal)
    back = _distances(config, position, past)
    first = (position == 0)[..., None, None]

    def layer(x: Float[Array, "M D"], xs: tuple) -> tuple[Float[Array, "M D"], NewKeys]:
        block, keys, values, last, window = xs
        p = block["attention"]
        q, k, v = _qkv(block, config, x, tokens.shape)
        raw = None
        if config.key_shift:
            raw = k.transpose(0, 2, 1, 3)
            before = jnp.concatenate([last[:, None], k[:, :-1]], axis=1)
            k = _shift(p, k, jnp.where(first, k, before))
        q, k, v = rope(q, cos, sin), rope(k, cos, sin).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        near = seen if window is None else [s & (far < window) for s, far in zip(seen, back, strict=True)]
        parts = [Part(*part) for part in zip([*keys, k], [*values, v], near, strict=True)]
        x = _output(p, x, attend_parts(q, parts))
        return _mlp(block, config, x), NewKeys(k, v, raw)

    x = _embed(params, config, tokens)
    windows = config.windows or None
    stacks = (params["blocks"], [run.k for run in past], [run.v for run in past], last_key)
    if config.n_layers > UNROLLED_LAYERS:
        x, new = jax.lax.scan(layer, x, (*stacks, None if windows is None else jnp.asarray(windows)))
        return x.reshape(*tokens.shape, -1), new
    new = []
    for i in range(config.n_layers):
        blocks, keys, values, last = stacks
        mine = (blocks[i], [k[i] for k in keys], [v[i] for v in values], None if last is None else last[i])
        x, added = layer(x, (*mine, None if windows is None else windows[i]))
        new.append(added)
    return x.reshape(*tokens.shape, -1), tuple(new)


def _distances(config: ModelConfig, position: Int[Array, "B t"], past: Sequence[Past]) -> list[Int[Array, "B t s"]]:
    """How many tokens back every cached column and every new token lies; only layers with a window ask."""
    if not config.windows:
        return []
    if any(run.position is None for run in past):
        raise ValueError("past: got columns without position, want position [B s]: the config has sliding windows")
    return [position[:, :, None] - columns[:, None] for columns in [*(run.position for run in past), position]]


def stack_layers(config: ModelConfig, layers: Stack) -> Params:
    """The inverse of `by_layer`."""
    if config.n_layers > UNROLLED_LAYERS:
        return layers
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def final_norm(params: Params, config: ModelConfig, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The norm before the head."""
    return rms_norm(x, params["final_norm"], config.rms_eps)


def head_weight(params: Params) -> Float[Array, "V D"] | Float[Array, "D V"]:
    """The output matrix: [D V] of its own, or the [V D] embedding table if tied."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def head_logits(params: Params, hidden: Float[Array, "... D"], n_ids: int | None) -> Float[Array, "... V"]:
    """Next-token logits in float32; the product runs in hidden's dtype.

    `n_ids` is the config's: rows from there on are padding of the table, and their probability is exactly 0. Every
    softmax over the vocabulary, the sampler's and the learner's, is over logits from here.
    """
    weight = head_weight(params).astype(hidden.dtype)
    flat = hidden.reshape(-1, hidden.shape[-1])
    axes = ((1,), (0,)) if "lm_head" in params else ((1,), (1,))
    logits = jax.lax.dot_general(
        flat, weight, (axes, ((), ())), precision=exact(hidden.dtype), preferred_element_type=jnp.float32
    )
    if n_ids is not None and n_ids < logits.shape[-1]:
        # A slice of the table would be a copy of it in every program, and would cut across its shards.
        logits = jnp.where(jnp.arange(logits.shape[-1]) < n_ids, logits, NO_ID)
    return logits.reshape(*hidden.shape[:-1], -1)


def unembed(params: Params, config: ModelConfig, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Next-token logits in float32. The whole [B T V]: for decoding and tests; training uses `logprobs.token_logp`."""
    if config.tie_embeddings == ("lm_head" in params):
        raise ValueError(f"got tie_embeddings={config.tie_embeddings} and parameters {sorted(params)}; they disagree")
    return head_logits(params, hidden, config.n_ids)
