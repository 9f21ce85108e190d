"""Law: our logits equal transformers' on every family, up to and beyond position 8192, packed and through the cache.

The files hold the weights and float32 logits of tiny random models (tests/golden/make.py writes them).
"""

import copy
import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoConfig

from models import hf_config, transformer
from models.config import ModelConfig
from tests.golden.families import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden"
LIMIT = 1e-4
# Ours, within a layer -> theirs. Written out again here: models/hf.py, which has such a table, is not what is tested.
MATRICES = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
BIASES = {"bq": "q_proj", "bk": "k_proj", "bv": "v_proj"}
MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def params_of(file: dict[str, np.ndarray], config: ModelConfig) -> dict:
    """Our parameters from a golden file; every tensor of it is used once."""
    unused = {name for name in file if "." in name}

    def take(name: str) -> np.ndarray:
        unused.remove(name)
        return file[name]

    def layers(suffix: str, turn=lambda x: x) -> jax.Array:
        return jnp.stack([turn(take(f"model.layers.{i}.{suffix}")) for i in range(config.n_layers)])

    heads = {"wq": config.n_heads, "wk": config.n_kv_heads, "wv": config.n_kv_heads}
    heads |= {f"b{name[1]}": n for name, n in heads.items()}
    attention = {
        ours: layers(f"self_attn.{theirs}.weight", partial(_matrix, heads=heads.get(ours), head_dim=config.head_dim))
        for ours, theirs in MATRICES.items()
    }
    if config.attention_bias:
        for ours, theirs in BIASES.items():
            attention[ours] = layers(f"self_attn.{theirs}.bias", lambda x, n=heads[ours]: x.reshape(n, -1))
    if config.qk_norm:
        attention |= {name: layers(f"self_attn.{name}.weight") for name in ("q_norm", "k_norm")}
    params = {
        "embed": jnp.asarray(take("model.embed_tokens.weight")),
        "blocks": {
            "attention_norm": layers("input_layernorm.weight"),
            "attention": attention,
            "mlp_norm": layers("post_attention_layernorm.weight"),
            "mlp": {ours: layers(f"mlp.{theirs}.weight", np.transpose) for ours, theirs in MLP.items()},
        },
        "final_norm": jnp.asarray(take("model.norm.weight")),
    }
    if not config.tie_embeddings:
        params["lm_head"] = jnp.asarray(take("lm_head.weight").T)
    assert not unused, unused
    return params


def _matrix(theirs: np.ndarray, heads: int | None, head_dim: int) -> np.ndarray:
    """[out in] to [in heads head_dim]; without a number of heads it is the output matrix: to [heads head_dim out]."""
    if heads is None:
        return theirs.T.reshape(-1, head_dim, theirs.shape[0])
    return theirs.T.reshape(theirs.shape[1], heads, head_dim)


def read(name: str) -> tuple[ModelConfig, dict, dict[str, np.ndarray]]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = dict(file)
    return FAMILIES[name].ours, params_of(arrays, FAMILIES[name].ours), arrays


def packed_logits(params: dict, config: ModelConfig, tokens: jax.Array, position: jax.Array) -> jax.Array:
    hidden = transformer.apply(params, config, tokens, jnp.ones_like(tokens), position)
    return transformer.unembed(params, config, hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name):
    config, params, file = read(name)
    got = jax.jit(packed_logits, static_argnums=1)(params, config, file["tokens"], file["position"])
    assert file["position"].max() > 8192 and file["logits"].std() > 0.5
    np.testing.assert_allclose(got, file["logits"], rtol=0, atol=LIMIT)


def cached_logits(params: dict, config: ModelConfig, tokens: jax.Array, position: jax.Array, cut: int) -> jax.Array:
    """The tokens before `cut` at once, the others one by one after them, each from the keys of those before it."""
    layered = params | {"blocks": transformer.by_layer(config, params["blocks"])}
    past, out = [], []
    for begin, end in [(0, cut), *((t, t + 1) for t in range(cut, tokens.shape[1]))]:
        at = position[:, begin:end]
        hidden, new = transformer.apply_cached(layered, config, tokens[:, begin:end], at, past)
        keys, values = tuple(layer.k for layer in new), tuple(layer.v for layer in new)
        past.append(transformer.Past(keys, values, jnp.ones_like(at, bool), at))
        out.append(hidden)
    hidden = transformer.final_norm(params, config, jnp.concatenate(out, axis=1))
    return transformer.unembed(params, config, hidden)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_yarn_mscale", "qwen2_window", "mistral_window"])
def test_the_cached_path_computes_the_same_logits(name):
    config, params, file = read(name)
    cut = file["tokens"].shape[1] - 2
    got = jax.jit(cached_logits, static_argnums=(1, 4))(params, config, file["tokens"], file["position"], cut)
    np.testing.assert_allclose(got, file["logits"], rtol=0, atol=LIMIT)


@pytest.mark.parametrize("name", ["llama_yarn", "qwen2", "qwen3"])
def test_bfloat16_is_at_least_as_near_to_float32_as_theirs(name):
    """Same convention (float32 norms, softmax and logits from bfloat16 products), with rope and norm weights kept."""
    config, params, file = read(name)
    config = dataclasses.replace(config, dtype="bfloat16")
    got = jax.jit(packed_logits, static_argnums=1)(params, config, file["tokens"], file["position"])
    ours, theirs = (np.abs(np.asarray(x) - file["logits"]).mean() for x in (got, file["logits_bfloat16"]))
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_our_config_is_what_we_read_from_theirs(name):
    """Else the logits would be those of a config that nobody reads."""
    family = FAMILIES[name]
    theirs = AutoConfig.for_model(family.model_type, **copy.deepcopy(family.theirs)).to_dict()
    if family.model_type == "mistral":
        with pytest.raises(ValueError, match="model_type: got 'mistral'"):
            hf_config.read_config(theirs)
    else:
        assert hf_config.read_config(theirs) == family.ours


def test_every_file_is_a_family():
    assert sorted(path.stem for path in GOLDEN.glob("*.npz")) == sorted(FAMILIES)
