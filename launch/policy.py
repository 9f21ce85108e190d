"""Codec, model and first weights of a run: made from nothing, or somebody else's (`model.path`).

A run keeps a whole copy of what it reads and writes by: D/tokenizer, with the model's config.json where that is
somebody else's. So resuming, evaluating and exporting need nothing but D.
"""

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from envs.base import World
from launch.plan import COMPUTE, Plan
from models import heads, hf_config, lora, pretrained
from models.codec import Codec
from models.config import HEADS, ModelConfig
from models.sharding import make_mesh
from models.tokenizer import train_tokenizer


def build_codec(plan: Plan, world: World, folder: Path) -> Codec:
    """The codec of a run, its tokenizer kept in `folder`: a copy of the plan's, or trained on the world's texts."""
    if not folder.exists():
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        if plan.model_path:
            pretrained.copy_description(pretrained.find(plan.model_path), temporary)
        elif plan.tokenizer_path:
            pretrained.copy_tokenizer(Path(plan.tokenizer_path), temporary)
        else:
            train_tokenizer(world.texts(), plan.vocab_size, temporary)
        temporary.rename(folder)  # whole or not at all
    return checked_codec(folder)


def load_codec(workdir: Path) -> Codec:
    """The codec of a run that exists already."""
    return checked_codec(workdir / "tokenizer")


def checked_codec(path: Path) -> Codec:
    """Of a folder or GGUF file. Errors (ValueError, OSError): no tokenizer there, or a template in which the world has
    no role.
    """
    tokenizer, ends = pretrained.tokenizer_of(path)
    try:
        codec = Codec(tokenizer, ends)
        role = codec.world_role
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err
    if role != "tool":
        logging.warning("%s: the chat template has no tool role; the world speaks as %r", path, role)
    return codec


def build_model(plan: Plan, vocab_size: int, folder: Path) -> ModelConfig:
    """The model of a run whose tokenizer (and, of somebody else's model, config.json) is in `folder`."""
    if not plan.model_path:
        return ModelConfig(vocab_size=vocab_size, **plan.model)
    return _as_planned(plan, hf_config.load_config(folder), vocab_size)


def check_model(plan: Plan, kept: Path | None = None) -> Codec | None:
    """Whatever can be wrong with model.path, tokenizer.path and lora.*; the codec, if it is not to be trained.

    `kept`: D/tokenizer of the run that goes on, or of the one that it starts from. Where it is there, model.path and
    tokenizer.path need not be. Else every tensor's name and shape is looked at; no weight is read. Errors: ValueError,
    OSError.
    """
    codec = None
    if kept is not None and kept.exists():
        codec = checked_codec(kept)
        model = build_model(plan, codec.vocab_size, kept)
    elif plan.model_path:
        codec, model = describe(plan)
    else:
        codec = checked_codec(Path(plan.tokenizer_path)) if plan.tokenizer_path else None
        model = ModelConfig(vocab_size=plan.vocab_size, **plan.model)
    if plan.lora is not None:
        lora.check(model, plan.lora)
    return codec


def describe(plan: Plan) -> tuple[Codec, ModelConfig]:
    """Codec and model of model.path, its every tensor accounted for. Errors: ValueError, OSError."""
    path = pretrained.find(plan.model_path)
    theirs, codec = pretrained.check(path), checked_codec(path)
    return codec, _as_planned(plan, theirs, codec.vocab_size)


def fresh_start(plan: Plan, model: ModelConfig, key: jax.Array) -> Any:
    """What a learner starts from, where no earlier run is given: the weights of model.path, else the key itself."""
    if not plan.model_path:
        return key
    return with_adapters(plan, model, load_weights(plan), key)


def load_weights(plan: Plan) -> Any:
    """The parameters of model.path, born sharded on the plan's mesh. Errors: ValueError, OSError."""
    data, fsdp, tensor = plan.mesh
    return pretrained.load(pretrained.find(plan.model_path), mesh=make_mesh(data, fsdp, tensor))


def with_adapters(plan: Plan, model: ModelConfig, params: Any, key: jax.Array) -> Any:
    """`params` as the plan's learner wants them to start from: any adapters merged, then the plan's own added, which
    change nothing yet. So a stage never goes on with the adapters of the one before it, and its base is its start.
    """
    params = jax.jit(lora.merge)(params) if lora.adapted(params) else params
    if plan.lora is None:
        return params
    return jax.jit(lambda params, key: lora.add(params, model, plan.lora, key))(params, key)


def with_heads(names: Sequence[str], model: ModelConfig, start: Any, key: jax.Array) -> Any:
    """`start` with the named heads, fresh. A key stays one: the learner adds them itself."""
    return start if isinstance(start, jax.Array) else heads.add(start, model, names, key)


def sampled(params: Any) -> Any:
    """What sampling needs of `params`: all but the heads."""
    return {name: tree for name, tree in params.items() if name not in HEADS}


def _as_planned(plan: Plan, theirs: ModelConfig, vocab_size: int) -> ModelConfig:
    """Their shape, computed as the plan says; rows of their table beyond the tokenizer's ids are padding.

    Errors: ValueError where the plan says something else than they.
    """
    for name, value in plan.model.items():
        if name not in COMPUTE and getattr(theirs, name) != value:
            raise ValueError(
                f"model.{name}={value!r}, but model.path={plan.model_path} has {getattr(theirs, name)!r}; "
                f"leave model.{name} out"
            )
    if vocab_size > theirs.vocab_size:
        raise ValueError(
            f"model.path={plan.model_path}: its tokenizer has {vocab_size} ids and its table {theirs.vocab_size} rows; "
            "want a row for each id"
        )
    n_ids = vocab_size if vocab_size < theirs.vocab_size else None
    computed = {name: plan.model[name] for name in COMPUTE if name in plan.model}
    return dataclasses.replace(theirs, n_ids=n_ids, **computed)
