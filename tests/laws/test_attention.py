"""Law: whatever kernel computes attention, a packed row computes what its segments compute alone, gradients included.

Plain XLA, JAX's splash kernel (interpreted on a CPU) and the call that cuDNN serves on a GPU (here by JAX's own
implementation of the same call), each without and with a sliding window, on one device and divided over a mesh.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import transformer
from models.attention import _attend_cudnn, _on_each_device, attend, kernel_for
from models.config import LayerSpec, ModelConfig
from models.logprobs import token_logp
from models.sharding import batch_sharding, heads_sharding, make_mesh
from tests.models.weights import drawn

PATHS = {
    "xla": partial(attend, kernel="xla"),
    "splash": partial(attend, kernel="splash"),
    "cudnn": lambda q, k, v, segment, window=None: _attend_cudnn(q, k, v, segment, window, implementation="xla"),
}
LENGTHS, TOTAL = (5, 1, 9), 19  # three segments, four tokens of padding
TINY = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)


def segments() -> tuple[np.ndarray, np.ndarray]:
    """(segment, position) of one packed row."""
    segment = np.repeat([1, 2, 3, 0], [*LENGTHS, TOTAL - sum(LENGTHS)])
    position = np.concatenate([np.arange(n) for n in (*LENGTHS, TOTAL - sum(LENGTHS))])
    return segment[None], position[None]


def alone(q, k, v, window) -> jax.Array:
    """Every segment by the plain formula, in an array of its own length: nothing there to be seen by mistake."""
    out, begin, groups = [], 0, q.shape[2] // k.shape[2]
    for n in LENGTHS:
        part = slice(begin, begin + n)
        keys, values = (jnp.repeat(x[:, part], groups, axis=2) for x in (k, v))
        back = jnp.arange(n)[:, None] - jnp.arange(n)[None, :]
        seen = (back >= 0) & (back < (n if window is None else window))
        score = jnp.einsum("btnh,bsnh->bnts", q[:, part], keys) / q.shape[-1] ** 0.5
        weight = jax.nn.softmax(jnp.where(seen, score, -jnp.inf), axis=-1)
        out.append(jnp.einsum("bnts,bsnh->btnh", weight, values))
        begin += n
    return jnp.concatenate(out, axis=1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("path", PATHS)
def test_three_segments_a_row_equal_three_rows(path, window):
    keys = jax.random.split(jax.random.key(3), 4)
    q, weight = (jax.random.normal(key, (2, TOTAL, 4, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, TOTAL, 2, 8)) for key in keys[2:])
    segment, count = np.tile(segments()[0], (2, 1)), sum(LENGTHS)

    def packed(q, k, v):
        out = PATHS[path](q, k, v, segment, window=window)
        return jnp.sum((weight * out)[:, :count]), out[:, :count]

    def split(q, k, v):
        out = alone(q, k, v, window)
        return jnp.sum(weight[:, :count] * out), out

    got = jax.jit(jax.value_and_grad(packed, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    want = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(("path", "window"), [("splash", 3), ("cudnn", None), ("cudnn", 3)])
def test_over_a_mesh_each_device_computes_its_own_rows_and_heads(path, window):
    """Rows over data and fsdp, heads over tensor. A window of the cuDNN call is a number that a scan hands it."""
    mesh = make_mesh(2, 2, 2)
    own, rows = heads_sharding(mesh), batch_sharding(mesh)
    keys = jax.random.split(jax.random.key(3), 4)
    q, weight = (jax.random.normal(key, (4, TOTAL, 4, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (4, TOTAL, 2, 8)) for key in keys[2:])
    segment = np.tile(segments()[0], (4, 1))

    def divided(q, k, v, segment, window):
        if path == "splash":
            return attend(q, k, v, segment, window=window, kernel="splash", sharding=own)
        return _on_each_device(partial(_attend_cudnn, window=window, implementation="xla"), own)(q, k, v, segment)

    def loss(attended, window, q, k, v, segment):
        out = attended(q, k, v, segment, window)
        return jnp.sum((weight * out)[:, : sum(LENGTHS)]), out

    def layer(window, *x):
        return jax.value_and_grad(partial(loss, divided, window), argnums=(0, 1, 2), has_aux=True)(*x)

    def scanned(*x):  # as `transformer.apply` hands over a window
        return jax.tree.map(lambda y: y[0], jax.lax.scan(lambda _, w: (None, layer(w, *x)), None, jnp.array([3]))[1])

    compute = scanned if window and path == "cudnn" else partial(layer, window)
    got = jax.jit(compute, in_shardings=(own, own, own, rows))(q, k, v, segment)
    plain = partial(loss, lambda *x: attend(*x[:4], window=x[4]), window)
    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2), has_aux=True))(q, k, v, segment)
    assert got[0][1].sharding.is_equivalent_to(own, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def loss_and_grad(config: ModelConfig, params: dict, tokens: np.ndarray):
    segment, position = segments()

    def loss(params):
        logp, entropy = token_logp(params, transformer.apply(params, config, tokens, segment, position), tokens)
        return jnp.sum(jnp.where(jnp.asarray(position) > 0, logp + 0.1 * entropy, 0.0)[:, : sum(LENGTHS)])

    return jax.jit(jax.value_and_grad(loss))(params)


def test_a_decoder_with_mixed_windows_is_the_same_by_splash():
    """Scanned layers: the window is a number among the scanned ones, this kernel has one branch for each."""
    specs = tuple(LayerSpec(window) for window in (4, None, 4, None, 2))
    config = dataclasses.replace(TINY, n_layers=5, layers=specs, remat="full")
    params = drawn(config)
    tokens = np.random.default_rng(0).integers(0, 40, (1, TOTAL))
    want = loss_and_grad(config, params, tokens)
    got = loss_and_grad(dataclasses.replace(config, attention="splash"), params, tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("window", [None, 65])
def test_splash_over_several_blocks_equals_plain_xla(window):
    length = 300  # padded to three blocks
    keys = jax.random.split(jax.random.key(5), 3)
    q, k, v = (jax.random.normal(key, (1, length, heads, 8)) for key, heads in zip(keys, (2, 1, 1), strict=True))
    segment = np.repeat([1, 2, 3], [length - 140, 130, 10])[None]
    got = jax.jit(partial(attend, window=window, kernel="splash"))(q, k, v, segment)
    want = jax.jit(partial(attend, window=window))(q, k, v, segment)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def chosen(attention: str, platform: str, dtype: str = "bfloat16", head_dim: int = 64) -> str:
    return kernel_for(attention, dtype=dtype, head_dim=head_dim, platform=platform)


def test_the_kernel_is_resolved_by_platform():
    assert [chosen("auto", platform) for platform in ("cpu", "gpu", "tpu")] == ["xla", "xla", "splash"]
    assert chosen("auto", "tpu", dtype="float32") == "xla"  # the splash kernel would multiply in bfloat16 passes
    assert [chosen("xla", platform) for platform in ("cpu", "gpu", "tpu")] == ["xla"] * 3
    assert chosen("cudnn", "gpu") == "cudnn" and chosen("splash", "cpu") == "splash"


@pytest.mark.parametrize(
    "asked", [dict(platform="cpu"), dict(platform="gpu", dtype="float32"), dict(platform="gpu", head_dim=12)]
)
def test_cudnn_is_refused_where_it_cannot_be(asked):
    with pytest.raises(ValueError, match="attention='cudnn': got .*; want bfloat16 on a gpu .* or set attention="):
        chosen("cudnn", **asked)


def test_a_decoder_refuses_cudnn_on_a_cpu():
    config = dataclasses.replace(TINY, attention="cudnn")
    params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    row = jax.ShapeDtypeStruct((1, TOTAL), jnp.int32)
    with pytest.raises(ValueError, match="attention='cudnn'"):
        jax.eval_shape(lambda *x: transformer.apply(x[0], config, *x[1:]), params, row, row, row)
