"""One device and eight compute the same loss and the same gradients."""

import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import pytest
from jax.sharding import PartitionSpec

from models.config import ModelConfig
from models.sharding import make_mesh, param_shardings

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np
    from models import transformer
    from models.config import ModelConfig
    from models.logprobs import token_logp
    from models.sharding import batch_sharding, make_mesh, param_shardings, replicated

    config = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
                         qk_norm=True, key_shift=True, init="mimetic")
    params = transformer.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (4, 16))
    segment = np.repeat([[1] * 6 + [2] * 8 + [0] * 2], 4, 0)
    position = np.repeat([[*range(6), *range(8), 0, 1]], 4, 0)

    def loss(params, tokens, segment, position):
        hidden = transformer.apply(params, config, tokens, segment, position)
        logp, entropy = token_logp(params, hidden, tokens, chunk=8)
        return jnp.sum(jnp.where(segment > 0, logp - .1 * entropy, 0.0))

    want = jax.jit(jax.value_and_grad(loss))(params, tokens, segment, position)
    assert len(jax.devices()) == 8
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    places, rows = param_shardings(config, mesh), batch_sharding(mesh)
    step = jax.jit(jax.value_and_grad(loss), in_shardings=(places, rows, rows, rows),
                   out_shardings=(replicated(mesh), places))
    got = step(jax.device_put(params, places), *(jax.device_put(x, rows) for x in (tokens, segment, position)))
    embed = got[1]["embed"]
    assert embed.addressable_shards[0].data.size * 4 == embed.size
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
    print("equal")
"""


def test_eight_devices_equal_one():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0 and "equal" in ran.stdout, ran.stderr[-3000:]


def test_parameters_lie_where_the_rules_say():
    config = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
    places = param_shardings(config, make_mesh())
    assert places["embed"].spec == PartitionSpec("tensor", "fsdp")
    assert places["blocks"]["attention"]["wk"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert places["blocks"]["mlp"]["down"].spec == PartitionSpec(None, "tensor", "fsdp")


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=f"got {len(jax.devices())} devices, want 999"):
        make_mesh(data=999)
