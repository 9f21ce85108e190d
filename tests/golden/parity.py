"""Law: the committed golden files are what transformers and torch compute today, tensor by tensor.

Run: make parity. Not part of `make test`, which needs no torch; without torch this module is an error, not a skip.
"""

import numpy as np
import pytest
import torch

from tests.golden.families import FAMILIES
from tests.golden.make import HERE, golden


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
