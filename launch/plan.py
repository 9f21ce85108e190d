"""From a config tree to plain, checked values: every leaf is read here, once, before anything is computed.

Below `launch/` nobody sees a config. Checks that need only the config (impossible combinations) are here too, so that
they end a launch in its first second.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from launch.cli import ConfigError, ReadTracker, assert_all_read


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    lanes: int
    residents: int
    capacity: int
    round_tokens: int
    prefill_rows: int
    prefill_chunk: int
    contexts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    length: int
    rows: int
    micro_rows: int
    logp_chunk: int


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    threads: int
    max_turn_tokens: int
    max_episode_tokens: int
    call_deadline_s: float
    retries: int


@dataclasses.dataclass(frozen=True)
class SftPlan:
    steps: int
    minutes: float
    rows: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    eval_every: int


@dataclasses.dataclass(frozen=True)
class RlPlan:
    recipe: str
    steps: int
    groups_per_batch: int
    group_size: int
    temperature: float
    max_staleness: int
    learning_rate: float
    warmup_steps: int
    schedule: str
    weight_decay: float
    clip_norm: float
    b2: float
    clip_low: float
    clip_high: float
    kl_coef: float
    entropy_coef: float
    scale: str
    drop_equal_groups: bool
    save_every: int


@dataclasses.dataclass(frozen=True)
class EvalPlan:
    split: str
    every: int
    n: int
    final_n: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a launch does, in plain values."""

    name: str
    seed: int
    world: str
    world_options: Mapping[str, Any]
    tokenizer_path: str
    vocab_size: int
    model: Mapping[str, Any]  # keyword arguments of models.config.ModelConfig, but for vocab_size
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    batch: BatchPlan
    engine: EnginePlan
    rollout: RolloutPlan
    n_demos: int
    sft: SftPlan
    rl: RlPlan
    reward_terms: Mapping[str, float]
    max_shaping: float
    eval: EvalPlan


def make_plan(config) -> Plan:
    """Read every leaf of `config` into a `Plan`; raise `ConfigError` (got, wanted, remedy) for what cannot work."""
    read = ReadTracker(config)
    mesh = read.section("mesh")
    plan = Plan(
        name=read["name"],
        seed=read["seed"],
        world=read["world.name"],
        world_options=read.section("world.options"),
        tokenizer_path=read["tokenizer.path"],
        vocab_size=read["tokenizer.vocab_size"],
        model=read.section("model"),
        mesh=(mesh["data"], mesh["fsdp"], mesh["tensor"]),
        batch=BatchPlan(**read.section("batch")),
        engine=EnginePlan(**{k: tuple(v) if k == "contexts" else v for k, v in read.section("engine").items()}),
        rollout=RolloutPlan(**read.section("rollout")),
        n_demos=read["demos.n"],
        sft=SftPlan(**read.section("sft")),
        rl=RlPlan(**read.section("rl")),
        reward_terms=read.section("reward.terms"),
        max_shaping=read["reward.max_shaping"],
        eval=EvalPlan(**read.section("eval")),
    )
    assert_all_read(read)
    _check(plan)
    return plan


def _check(plan: Plan) -> None:
    def refuse(wrong: bool, message: str) -> None:
        if wrong:
            raise ConfigError(message)

    e, b, r, rl = plan.engine, plan.batch, plan.rollout, plan.rl
    for name, value in {
        "batch.length": b.length,
        "batch.rows": b.rows,
        "batch.micro_rows": b.micro_rows,
        "engine.lanes": e.lanes,
        "engine.round_tokens": e.round_tokens,
        "rollout.threads": r.threads,
        "rl.groups_per_batch": rl.groups_per_batch,
        "rl.group_size": rl.group_size,
        "sft.rows": plan.sft.rows,
        "eval.n": plan.eval.n,
        "eval.final_n": plan.eval.final_n,
    }.items():
        refuse(value < 1, f"{name}: got {value}, wanted at least 1")
    refuse(
        b.rows % b.micro_rows != 0,
        f"batch.rows={b.rows} is not a multiple of batch.micro_rows={b.micro_rows}; change either",
    )
    refuse(
        plan.sft.rows % b.micro_rows != 0,
        f"sft.rows={plan.sft.rows} is not a multiple of batch.micro_rows={b.micro_rows}; change either",
    )
    refuse(
        b.rows < rl.groups_per_batch * rl.group_size,
        f"batch.rows={b.rows} < rl.groups_per_batch x rl.group_size = {rl.groups_per_batch * rl.group_size}: an "
        "episode may fill a row; raise batch.rows (rows without tokens cost nothing)",
    )
    shards = plan.mesh[0] * plan.mesh[1]
    refuse(
        b.micro_rows % shards != 0,
        f"batch.micro_rows={b.micro_rows} cannot be sharded over mesh.data x mesh.fsdp = {shards}; make it a multiple",
    )
    refuse(
        r.max_episode_tokens > b.length,
        f"rollout.max_episode_tokens={r.max_episode_tokens} does not fit a packed row of "
        f"batch.length={b.length}; raise batch.length",
    )
    refuse(
        r.max_episode_tokens > e.capacity,
        f"rollout.max_episode_tokens={r.max_episode_tokens} does not fit "
        f"engine.capacity={e.capacity}; raise engine.capacity",
    )
    refuse(
        e.lanes > e.residents,
        f"engine.lanes={e.lanes} > engine.residents={e.residents}; a lane is held by a resident: "
        "lower lanes or raise residents",
    )
    refuse(
        tuple(sorted(e.contexts)) != e.contexts or e.contexts[-1] != e.capacity,
        f"engine.contexts={e.contexts} must rise and end at engine.capacity={e.capacity}",
    )
    refuse(
        rl.temperature <= 0,
        f"rl.temperature={rl.temperature}: training samples by temperature alone, and it must be > 0",
    )
    refuse(rl.max_staleness != 0, f"rl.max_staleness={rl.max_staleness}: only synchronous rollout (0) is built so far")
    refuse(rl.recipe != "grpo", f"rl.recipe={rl.recipe!r}: wanted 'grpo', the only recipe built so far")
    refuse(
        rl.group_size < 2,
        f"rl.group_size={rl.group_size}: a group of one has advantage 0 and teaches nothing; wanted at least 2",
    )
    refuse(
        rl.schedule not in ("constant", "cosine", "linear"),
        f"rl.schedule={rl.schedule!r}: wanted constant, cosine or linear",
    )
    refuse(rl.scale not in ("std", "none"), f"rl.scale={rl.scale!r}: wanted std or none")
    refuse(plan.eval.split not in ("validation", "test"), f"eval.split={plan.eval.split!r}: wanted validation or test")
    refuse(
        not 0 <= rl.clip_low < 1 or rl.clip_high < 0,
        f"rl.clip_low={rl.clip_low}, rl.clip_high={rl.clip_high}: wanted 0 <= low < 1 and high >= 0",
    )
    reach = sum(abs(w) for name, w in plan.reward_terms.items() if name != "success")
    outcome = plan.reward_terms.get("success", 0.0)
    refuse(outcome <= 0, "reward.terms has no positive weight for 'success': the outcome must lead")
    refuse(
        reach > plan.max_shaping * outcome,
        f"reward.terms: shaping reaches {reach:g}, more than reward.max_shaping={plan.max_shaping:g} of the outcome's "
        f"{outcome:g}; lower the weights",
    )
