"""Where parameters lie. That eight devices compute what one does is a law of the learner (tests/laws)."""

import jax
import pytest
from jax.sharding import PartitionSpec

from models.config import ModelConfig
from models.sharding import dispatching, make_mesh, param_shardings


def test_parameters_lie_where_the_rules_say():
    config = ModelConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
    places = param_shardings(config, make_mesh())
    assert places["embed"].spec == PartitionSpec("tensor", "fsdp")
    assert places["blocks"]["attention"]["wk"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert places["blocks"]["mlp"]["down"].spec == PartitionSpec(None, "tensor", "fsdp")


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=f"got {len(jax.devices())} devices, want 999"):
        make_mesh(data=999)


def test_programs_of_several_devices_have_one_lock_and_those_of_one_have_none():
    devices = jax.devices()
    with dispatching(make_mesh(data=2, devices=devices[:2]).devices.flat):
        assert dispatching(devices[1:3]).locked()
        with dispatching(()), dispatching(devices[:1]):
            pass
    assert not dispatching(devices[1:3]).locked()
