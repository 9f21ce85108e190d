"""Attention over packed rows and over cached keys.

`attend` hides the kernel: plain XLA everywhere, cuDNN's on a GPU, JAX's splash kernel on a TPU. All keep the segments
of a row apart and know sliding windows. The compiler divides plain XLA over a mesh; the other two run on each device's
own rows and heads (`shard_map`). Cached keys are attended by plain XLA (`attend_parts`).

Scores and softmax are float32. Masked scores are a large finite number, never -inf: with -inf a row that sees nothing
gives NaN in dV even if its output is thrown away. A padded token (segment 0) sees the padding before it, itself
included, so no row is ever empty.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.config import Attend

Kernel = Literal["xla", "cudnn", "splash"]
Window = int | Int[Array, ""]
MASKED = -1e30
# Queries are taken in blocks of this many tokens, each against its own prefix only: the upper triangle is not computed.
CAUSAL_BLOCK = 64
MAX_BLOCKS = 8
SPLASH_LANES = 128  # blocks of tokens, and on a TPU the head dimension, are multiples of this
SPLASH_BLOCKS = (512, 256, 128)
MATVECS = 8  # queries of a decode step's kv head that a CPU takes one by one
CUDNN_HEAD_DIM = 128  # at most; multiples of 8


def exact(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Matrix precision of a compute dtype: float32 means float32, not TF32 or bf16 passes."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def kernel_for(attention: Attend, *, dtype: str, head_dim: int, platform: str) -> Kernel:
    """The kernel over packed rows that a config's `attention` means on a platform ("cpu", "gpu", "tpu").

    "auto" is plain XLA, except for bfloat16 on a TPU, where it is the splash kernel. Errors: ValueError for a kernel
    that cannot compute this here.
    """
    if attention == "auto":
        return "splash" if platform == "tpu" and dtype == "bfloat16" else "xla"
    if attention == "cudnn" and (platform != "gpu" or dtype != "bfloat16" or head_dim % 8 or head_dim > CUDNN_HEAD_DIM):
        raise ValueError(
            f"attention='cudnn': got dtype={dtype!r}, head_dim={head_dim}, platform={platform!r}; want bfloat16 on a "
            f"gpu and head_dim a multiple of 8 up to {CUDNN_HEAD_DIM}; or set attention='auto' or 'xla'"
        )
    return attention


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment: Int[Array, "B T"],
    *,
    window: Window | None = None,
    kernel: Kernel = "xla",
    sharding: NamedSharding | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q kᵀ / √H) v, where a token sees the tokens of its own segment up to itself (packed rows).

    `window`: of those only itself and the window - 1 before it. May be an array, but for the splash kernel, which is
    compiled for its window. `sharding`: of q, k and v on a mesh of several devices, T and H whole.
    """
    if kernel == "xla":
        return _attend_xla(q, k, v, segment, window)
    call = partial(_attend_cudnn if kernel == "cudnn" else _attend_splash, window=window)
    if sharding is not None and sharding.mesh.size > 1:
        call = _on_each_device(call, sharding)
    return call(q, k, v, segment)


def _on_each_device(call: Callable[..., Array], sharding: NamedSharding) -> Callable[..., Array]:
    """`call` on the rows and heads of each device alone: the compiler does not divide the program of a kernel.

    Query heads stand by kv head, so that a device that has an n-th of both has whole groups.
    """
    parts = (*[sharding.spec] * 3, PartitionSpec(sharding.spec[0]))
    return jax.shard_map(call, mesh=sharding.mesh, in_specs=parts, out_specs=sharding.spec, check_vma=False)


def _attend_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment: Int[Array, "B T"],
    window: Window | None,
) -> Float[Array, "B T N H"]:
    rows, length, heads, dim = q.shape
    kv_heads, groups = k.shape[2], heads // k.shape[2]
    q = q.reshape(rows, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4) * dim**-0.5
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    blocks = min(MAX_BLOCKS, -(-length // CAUSAL_BLOCK))
    size = -(-length // blocks)
    out = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        causal = jnp.arange(begin, end)[:, None] >= jnp.arange(end)[None, :]
        seen = causal & (segment[:, begin:end, None] == segment[:, None, :end])
        if window is not None:
            seen = seen & (jnp.arange(begin, end)[:, None] - jnp.arange(end)[None, :] < window)
        # The query heads of one kv head stand one after another, as more queries: every product is one plain matmul.
        queries = q[..., begin:end, :].reshape(rows, kv_heads, groups * (end - begin), dim)
        mixed = _mix(queries, k[:, :, :end], v[:, :, :end], jnp.tile(seen, (1, groups, 1)))
        out.append(mixed.reshape(rows, heads, end - begin, dim))
    mixed = out[0] if len(out) == 1 else jnp.concatenate(out, axis=2)
    return mixed.transpose(0, 2, 1, 3)


def _attend_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment: Int[Array, "B T"],
    window: Window | None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N H"]:
    """cuDNN's flash attention. Its sequence lengths describe one segment a row, so packed rows need the whole mask.

    The mask becomes a bias [B 1 T T] in q's dtype, a small part of the [B N T T] scores that plain XLA writes. The
    gradient of a call with a bias wants an even T: an odd one is padded (segment 0, which no other sees).
    """
    length, odd = q.shape[1], q.shape[1] % 2
    q, k, v = (jnp.pad(x, ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (q, k, v))
    segment, token = jnp.pad(segment, ((0, 0), (0, odd))), jnp.arange(length + odd)
    seen = segment[:, None, :, None] == segment[:, None, None, :]
    if window is not None:
        seen = seen & (token[:, None] - token[None, :] < window)
    mixed = jax.nn.dot_product_attention(q, k, v, mask=seen, is_causal=True, implementation=implementation)
    return mixed[:, :length]


def _attend_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment: Int[Array, "B T"],
    window: int | None,
) -> Float[Array, "B T N H"]:
    """JAX's splash kernel: it skips blocks that no query sees. Off a TPU it is interpreted: exact, and very slow.

    Tokens are padded to whole blocks (as segment 0, which no other sees) and the head dimension with zeros, which add
    nothing to q·k and are cut from the output.
    """
    _, length, heads, dim = q.shape
    more_tokens, more_dims = -length % SPLASH_LANES, -dim % SPLASH_LANES
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, more_tokens), (0, 0), (0, more_dims))).transpose(0, 2, 1, 3)
        for x in (q * dim**-0.5, k, v)
    )
    segment = jnp.pad(segment, ((0, 0), (0, more_tokens))).astype(jnp.int32)
    kernel = _splash_kernel(length + more_tokens, heads, window)
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        mixed = jax.vmap(kernel)(q, k, v, splash.SegmentIds(segment, segment))
    return mixed.transpose(0, 2, 1, 3)[:, :length, :, :dim]


def _splash_kernel(length: int, heads: int, window: int | None) -> Callable[..., Array]:
    shape = (length, length)
    if window is None or window >= length:
        mask = splash.CausalMask(shape)
    else:
        mask = splash.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    block = next(size for size in SPLASH_BLOCKS if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        head_shards=1,
        q_seq_shards=1,
        interpret=jax.default_backend() != "tpu",
    )


Queries = Float[Array, "B K m H"]  # m = query heads of one kv head times their tokens
Keys = Float[Array, "B K s H"]


@jax.custom_vjp
def _mix(q: Queries, k: Keys, v: Keys, seen: Bool[Array, "B m s"]) -> Queries:
    """softmax(q kᵀ) v with a hand-written gradient.

    On a CPU it halves the cost of attention: dS = P ∘ (dP - rowsum(dO ∘ O)) needs one pass over the scores where the
    derivative of a masked softmax needs several (Dao et al. 2022, FlashAttention, appendix B.2).
    """
    return _mix_forward(q, k, v, seen)[0]


def _mix_forward(q: Queries, k: Keys, v: Keys, seen: Bool[Array, "B m s"]) -> tuple[Queries, tuple[Array, ...]]:
    score = jnp.einsum("bkmh,bksh->bkms", q, k, precision=exact(q.dtype), preferred_element_type=jnp.float32)
    score = jnp.where(seen[:, None], score, MASKED)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight.astype(q.dtype)
    mixed = jnp.einsum("bkms,bksh->bkmh", weight, v, precision=exact(q.dtype), preferred_element_type=jnp.float32)
    mixed = (mixed / total).astype(q.dtype)
    return mixed, (q, k, v, weight, total, mixed)


def _mix_backward(saved: tuple[Array, ...], grad: Queries) -> tuple[Queries, Keys, Keys, None]:
    q, k, v, weight, total, mixed = saved
    precision = exact(q.dtype)
    grad32 = grad.astype(jnp.float32) / total
    inner = jnp.sum(grad32 * mixed.astype(jnp.float32), axis=-1, keepdims=True)
    grad = grad32.astype(q.dtype)
    dv = jnp.einsum("bkms,bkmh->bksh", weight, grad, precision=precision)
    dp = jnp.einsum("bkmh,bksh->bkms", grad, v, precision=precision, preferred_element_type=jnp.float32)
    ds = (weight * (dp - inner)).astype(q.dtype)
    dq = jnp.einsum("bkms,bksh->bkmh", ds, k, precision=precision)
    dk = jnp.einsum("bkms,bkmh->bksh", ds, q, precision=precision)
    return dq, dk, dv, None


_mix.defvjp(_mix_forward, _mix_backward)


class Part(NamedTuple):
    """A run of keys that queries may see: columns of the cache, or the tokens being fed."""

    k: Float[Array, "B K s H"]
    v: Float[Array, "B K s H"]
    seen: Bool[Array, "B t s"]


def attend_parts(q: Float[Array, "B t N H"], parts: Sequence[Part]) -> Float[Array, "B t N H"]:
    """softmax(q kᵀ / √H) v over the keys of all parts together, without joining the parts in memory.

    One maximum over all parts; then sums and mixes add up.
    """
    if jax.default_backend() == "cpu" and q.shape[1] > 1:
        # Row after row: the scores of one stay in the processor's cache, where those of all do not.
        return jax.lax.map(lambda row: _attend_parts(row[0][None], _whole(row[1]))[0], (q, tuple(parts)))
    return _attend_parts(q, parts)


def _whole(parts: Sequence[Part]) -> list[Part]:
    return [Part(*(x[None] for x in part)) for part in parts]


def _attend_parts(q: Float[Array, "B t N H"], parts: Sequence[Part]) -> Float[Array, "B t N H"]:
    rows, length, heads, dim = q.shape
    kv_heads = parts[0].k.shape[1]
    groups = heads // kv_heads
    q = q.reshape(rows, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4) * dim**-0.5
    q = q.reshape(rows, kv_heads, groups * length, dim)
    scores = []
    for part in parts:
        score = _product("bkmh,bksh->bkms", q, part.k)
        scores.append(jnp.where(jnp.tile(part.seen, (1, groups, 1))[:, None], score, MASKED))
    top = jnp.max(jnp.stack([jnp.max(score, axis=-1) for score in scores]), axis=0)[..., None]
    total, mixed = 0.0, 0.0
    for score, part in zip(scores, parts, strict=True):
        weight = jnp.exp(score - top)
        total = total + jnp.sum(weight, axis=-1, keepdims=True)
        mixed = mixed + _product("bkms,bksh->bkmh", weight.astype(q.dtype), part.v)
    mixed = (mixed / total).astype(q.dtype)
    return mixed.reshape(rows, heads, length, dim).transpose(0, 2, 1, 3)


def _product(subscripts: str, few: Float[Array, "B K m _"], keys: Keys) -> Float[Array, "B K m _"]:
    """The queries' scores, or the mix of their values, in float32."""

    def product(subscripts: str, few: Array) -> Array:
        return jnp.einsum(subscripts, few, keys, precision=exact(few.dtype), preferred_element_type=jnp.float32)

    if jax.default_backend() == "cpu" and few.shape[2] <= MATVECS:
        # A matrix of a few rows is packed for every product; a vector is not, and the keys are read as they lie.
        one = subscripts.replace("m", "")
        return jnp.stack([product(one, few[:, :, i]) for i in range(few.shape[2])], axis=2)
    return product(subscripts, few)
