"""Where parameters and batches live: logical axes of the model on the axes of a device mesh."""

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PRNGKeyArray

from models import heads as on_trunk
from models import lora
from models.config import ModelConfig
from models.transformer import Params, init, logical_axes

MESH_AXES = ("data", "fsdp", "tensor")
# `embed` is the axis that every matrix has, so sharding it shards all of them; heads, mlp and vocab split the compute.
RULES: Mapping[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "rank": None,  # of an adapter: thin, whole everywhere
    "answers": None,  # yes and no
}
_DISPATCH = threading.Lock()


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh (data, fsdp, tensor) over the first data·fsdp·tensor of `devices` (default: all, of every process)."""
    whole_run = devices is None and jax.process_count() > 1
    devices = jax.devices() if devices is None else devices
    need = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or need > len(devices):
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor}: got {len(devices)} devices, want {need}; "
            "every axis is at least 1"
        )
    if whole_run and need < len(devices):
        raise ValueError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor}: got {jax.process_count()} processes with {len(devices)} "
            f"devices, want a mesh of all of them, not of {need}: every process takes part in every step"
        )
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:need])


def born(
    config: ModelConfig, key: PRNGKeyArray, *, adapters: lora.Lora | None = None, heads: Sequence[str] = ()
) -> Params:
    """Fresh parameters: those of `init`, with the named heads and with adapters."""
    params = on_trunk.add(init(config, key), config, heads, key)
    return params if adapters is None else lora.add(params, config, adapters, key)


def param_shardings(
    config: ModelConfig,
    mesh: Mesh,
    rules: Mapping[str, str | None] = RULES,
    *,
    adapters: lora.Lora | None = None,
    heads: Sequence[str] = (),
) -> Params:
    """Sharding of every parameter, in the structure of `born`; see `shardings` for errors."""
    shapes = jax.eval_shape(lambda key: born(config, key, adapters=adapters, heads=heads), jax.random.key(0))
    named = logical_axes(config) | {name: on_trunk.AXES[name] for name in heads}
    named = named if adapters is None else lora.with_axes(named, config, adapters)
    return shardings(shapes, named, mesh, rules)


def shardings(shapes: Params, named: Params, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Params:
    """Sharding of every array of `shapes` by its named axes; an axis that the mesh does not divide is an error."""

    def place(path: tuple, leaf: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> NamedSharding:
        spec = [rules[axis] for axis in axes]
        for axis, size, target in zip(axes, leaf.shape, spec, strict=True):
            if target is not None and size % mesh.shape[target]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)}: axis {axis!r} of {size} is not divisible by mesh axis {target!r} "
                    f"of {mesh.shape[target]}; choose a smaller {target!r} or pass rules with {axis!r}: None"
                )
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, shapes, named)


def dispatching(devices: Iterable[jax.Device]) -> contextlib.AbstractContextManager:
    """To be held while a program of `devices` is enqueued, and never while one is waited for.

    Two threads whose programs reach two devices in different orders would wait for each other for ever. The sets of
    devices of learner and engines overlap, so all sets have one lock; a program of one device waits for
    no other, and holds nothing.
    """
    return _DISPATCH if len(set(devices)) > 1 else contextlib.nullcontext()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows (axis 0) over data and fsdp together; the other axes whole."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def heads_sharding(mesh: Mesh) -> NamedSharding:
    """Queries, keys or values [B T N H] of a batch: rows as `batch_sharding`, heads over tensor."""
    return NamedSharding(mesh, PartitionSpec(*batch_sharding(mesh).spec, None, RULES["heads"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
