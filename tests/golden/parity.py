"""Law: the committed golden files are what transformers and torch compute today, tensor by tensor; and transformers
computes the same from the folders that we write, those of a GGUF file included.

Run: make parity. Not part of `make test`, which needs no torch; without torch this module is an error, not a skip.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models import gguf, hf
from tests.golden.families import FAMILIES
from tests.golden.make import HERE, golden, logits
from tests.models import test_gguf, test_golden

OURS = [name for name, family in FAMILIES.items() if family.model_type != "mistral"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_committed_file_is_what_torch_computes(name):
    with np.load(HERE / f"{name}.npz") as file:
        committed = dict(file)
    fresh = golden(name)
    assert committed.keys() == fresh.keys()
    computed = {"logits", "logits_bfloat16"}
    for tensor in committed.keys() - computed:
        np.testing.assert_array_equal(committed[tensor], fresh[tensor], err_msg=tensor)
    # A tenth of what our own logits are allowed; in bfloat16 other processors may sum in another order.
    np.testing.assert_allclose(committed["logits"], fresh["logits"], rtol=0, atol=1e-5)
    error, again = (np.abs(x["logits_bfloat16"] - committed["logits"]).mean() for x in (committed, fresh))
    np.testing.assert_allclose(again, error, rtol=0.25)


def their_logits(folder, file: dict[str, np.ndarray]) -> np.ndarray:
    """Of a folder, loaded as a user loads it: no tensor of it is left over, missing or drawn anew."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    return logits(model.eval(), file["tokens"], file["position"])


@pytest.mark.parametrize("name", OURS)
def test_transformers_computes_the_same_from_what_we_write(name, tmp_path):
    config, params, file = test_golden.read(name)
    hf.save(params, config, tmp_path, shard_bytes=8_000)
    np.testing.assert_allclose(their_logits(tmp_path, file), file["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["smollm2", "qwen2", "qwen3"])
def test_a_gguf_file_computes_the_same(name, tmp_path):
    """Query and key rows of the Llama architecture change places in such a file; and back, or the logits are others."""
    config, params, file = test_golden.read(name)
    test_gguf.written(tmp_path / "m.gguf", FAMILIES[name].model_type, config=config, params=params)
    again, read = gguf.load_params(gguf.open_file(tmp_path / "m.gguf"))
    hf.save(again, read, tmp_path / "out")
    np.testing.assert_allclose(their_logits(tmp_path / "out", file), file["logits"], rtol=0, atol=1e-5)
