"""Writes tests/golden/*.npz: weights, inputs and logits of tiny random models as transformers and torch compute them.

Run: make golden

Every array is drawn by NumPy from the family's name, so a file can be made again anywhere; only the logits depend on
torch, to its rounding. The files are read by tests/models/test_golden.py, and made again by tests/golden/parity.py.
"""

import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.golden.families import FAMILIES, Family, inputs

HERE = Path(__file__).parent


def draw(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Weights by tensor name: nothing at 0 or 1, so that a forgotten bias or norm weight shows."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    weights = {}
    for tensor, shape in sorted(shapes.items()):
        noise = rng.standard_normal(shape)
        if tensor.endswith("norm.weight"):
            value = 1.0 + 0.3 * noise
        elif tensor.endswith("bias"):
            value = noise
        elif tensor.endswith(("q_proj.weight", "k_proj.weight")):
            value = 1.5 * shape[-1] ** -0.5 * noise  # attention that chooses, so that positions matter
        elif tensor == "model.embed_tokens.weight":
            value = 0.5 * noise
        else:
            value = shape[-1] ** -0.5 * noise
        weights[tensor] = value.astype(np.float32)
    return weights


def build(name: str, family: Family, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, np.ndarray]]:
    """The transformers model of a family on the CPU, and the weights drawn for it (which it rounds to `dtype`)."""
    config = AutoConfig.for_model(family.model_type, **family.theirs)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    parameters = dict(model.named_parameters())  # a tied head is not listed twice
    weights = draw(name, {tensor: tuple(p.shape) for tensor, p in parameters.items()})
    with torch.no_grad():
        for tensor, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[tensor]))
    if any(parameter.dtype != dtype for parameter in parameters.values()):
        raise ValueError(f"{name}: got parameters that are not {dtype}; transformers has changed")
    if model.model.rotary_emb.inv_freq.dtype != torch.float32:
        raise ValueError(f"{name}: got rounded rope frequencies; want them in float32, as checkpoints are loaded")
    return model, weights


def logits(model: PreTrainedModel, tokens: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Logits [rows tokens V] as float32: every token sees all before it, whatever its position is."""
    with torch.no_grad():
        out = model(
            input_ids=torch.from_numpy(tokens).long(),
            position_ids=torch.from_numpy(position).long(),
            attention_mask=torch.ones(tokens.shape, dtype=torch.long),  # else a jump of positions starts a sequence
            use_cache=False,
        )
    return out.logits.float().numpy()


def golden(name: str) -> dict[str, np.ndarray]:
    """All arrays of one file; weights under their Hugging Face names."""
    family = FAMILIES[name]
    tokens, position = inputs(family)
    exact, weights = build(name, family, torch.float32)
    short, _ = build(name, family, torch.bfloat16)
    return {
        **weights,
        "tokens": tokens,
        "position": position,
        "logits": logits(exact, tokens, position),
        "logits_bfloat16": logits(short, tokens, position),
    }


def main() -> None:
    for name in FAMILIES:
        np.savez_compressed(HERE / f"{name}.npz", **golden(name))
        print(name, (HERE / f"{name}.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
