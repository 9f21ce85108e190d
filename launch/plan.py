"""From a config tree to plain, checked values: every leaf is read here, once, before anything is computed.

Below `launch/` nobody sees a config. What a plan must keep to is in launch/plan_checks.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from configs.defaults import defaults
from launch import plan_checks
from launch.cli import ReadTracker, assert_all_read, validating
from launch.plan_checks import RECIPES, refuse
from models.config import Lora, ModelConfig
from rl.metrics.alarms import Limits

COMPUTE = ("dtype", "remat", "attention")  # keys of a model that say how it is computed, not what


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    lanes: int
    residents: int
    capacity: int
    round_tokens: int
    prefill_rows: int
    prefill_chunk: int
    contexts: tuple[int, ...]
    kv_on_update: str
    replicas: int
    tensor: int
    split: bool


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    length: int
    rows: int
    micro_rows: int
    logp_chunk: int


@dataclasses.dataclass(frozen=True)
class AbandonPlan:
    repeats: int = 0
    prm_below: float = 0.0
    prm_path: str = ""
    value_below: float = 0.0
    value_after: int = 10
    audit_frac: float = 0.1

    @property
    def is_on(self) -> bool:
        """Whether there is any rule."""
        return self.repeats > 0 or self.prm_below > 0 or self.value_below > 0


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    threads: int
    max_turn_tokens: int
    max_episode_tokens: int
    call_deadline_s: float
    max_world_s: float
    retries: int
    group_retries: int
    data_retries: int
    max_quarantined_frac: float
    abandon: AbandonPlan = AbandonPlan()
    abandoned: str = "failure"
    worlds: str = "threads"
    processes: int = 2
    ray_address: str = ""
    calls_at_once: int = 0
    adaptive: bool = False
    constrain_tools: bool = False


@dataclasses.dataclass(frozen=True)
class SftPlan:
    steps: int
    save_every: int
    rows: int
    length: int
    micro_rows: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    eval_every: int


@dataclasses.dataclass(frozen=True)
class RftPlan:
    rounds: int
    tasks: int
    per_task: int
    steps: int


@dataclasses.dataclass(frozen=True)
class RmPlan:
    kind: str
    steps: int
    learning_rate: float
    held_out: float
    episodes: int
    roll_ins: int


@dataclasses.dataclass(frozen=True)
class RlPlan:
    recipe: str
    steps: int
    groups_per_batch: int
    group_size: int
    minibatches: int
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
    dual_clip: float
    is_cap: float
    proximal: str
    kl_coef: float
    kl_kind: str
    kl_in: str
    kl_target: float
    kl_horizon: float
    ref_every: int
    entropy_coef: float
    reduce: str
    loss_tokens: int
    value_coef: float
    value_clip: float
    scale: str
    drop_equal_groups: bool
    filter_overlong: bool
    train_on_world: bool
    save_every: int


@dataclasses.dataclass(frozen=True)
class TtrlPlan:
    split: str
    n: int
    samples: int
    per_query: bool
    queries: int
    steps: int


@dataclasses.dataclass(frozen=True)
class CurriculumPlan:
    name: str
    epsilon: float
    decay: float
    low: float
    high: float
    start_frac: float
    steps: int
    target: float
    step: float
    sensitivity: float
    wanted: float
    temperature: float
    staleness: float
    replay: float
    admit_low: float
    admit_high: float


@dataclasses.dataclass(frozen=True)
class HintsPlan:
    prob: float
    steps: int


@dataclasses.dataclass(frozen=True)
class CreditPlan:
    name: str
    discount: float
    lambda_: float
    turn_discount: float
    weight: float
    whiten: bool


@dataclasses.dataclass(frozen=True)
class EvalPlan:
    split: str
    every: int
    n: int
    final_n: int
    final_samples: int
    constrain_tools: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a launch does, in plain values."""

    name: str
    seed: int
    world: str
    world_options: Mapping[str, Any]
    tokenizer_path: str
    vocab_size: int
    model_path: str  # where shape, weights and tokenizer come from; "": from the keys of `model`, and from nothing
    model: Mapping[str, Any]  # keyword arguments of models.config.ModelConfig, but for vocab_size and n_ids
    lora: Lora | None  # None: everything is trained
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    batch: BatchPlan
    engine: EnginePlan
    rollout: RolloutPlan
    n_demos: int
    demos_without: tuple[str, ...]  # facts that are 0 in every demonstration
    demos_hinted: bool
    sft: SftPlan
    rft: RftPlan
    rm: RmPlan
    rl: RlPlan
    ttrl: TtrlPlan
    curriculum: CurriculumPlan
    hints: HintsPlan
    credit: CreditPlan
    reward_terms: Mapping[str, float]  # a term of rl/rewards/terms.py or a fact -> weight
    reward_reach: Mapping[str, float]  # of a fact that is a count: the largest difference it can make
    reward_options: Mapping[str, Mapping[str, Any]]  # of terms, by name
    reward_leader: str  # the term that is the outcome
    max_shaping: float
    alarms: Limits
    eval: EvalPlan


def make_plan(config) -> Plan:
    """Read every leaf of `config` into a `Plan`; raise `ConfigError` (got, wanted, remedy) for what cannot work."""
    read = ReadTracker(config)
    rl, credit = _of_recipe(read.into(RlPlan, "rl"), read.into(CreditPlan, "credit"))
    plan = Plan(
        name=read.typed("name", str),
        seed=read.typed("seed", int),
        world=read.typed("world.name", str),
        world_options=read.section("world.options"),
        tokenizer_path=read.typed("tokenizer.path", str),
        vocab_size=read.typed("tokenizer.vocab_size", int),
        model_path=read.typed("model.path", str),
        model=_model(read),
        lora=_lora(read),
        mesh=tuple(read.typed(f"mesh.{axis}", int) for axis in ("data", "fsdp", "tensor")),
        batch=read.into(BatchPlan, "batch"),
        engine=read.into(EnginePlan, "engine", contexts=_contexts(read)),
        rollout=read.into(RolloutPlan, "rollout", abandon=read.into(AbandonPlan, "rollout.abandon")),
        n_demos=read.typed("demos.n", int),
        demos_without=_names(read, "demos.without"),
        demos_hinted=read.typed("demos.hinted", bool),
        sft=read.into(SftPlan, "sft"),
        rft=read.into(RftPlan, "rft"),
        rm=read.into(RmPlan, "rm"),
        rl=rl,
        ttrl=read.into(TtrlPlan, "ttrl"),
        curriculum=read.into(CurriculumPlan, "curriculum"),
        hints=read.into(HintsPlan, "hints"),
        credit=credit,
        reward_terms=_numbers(read, "reward.terms"),
        reward_reach=_numbers(read, "reward.reach"),
        reward_options=_options(read, "reward.options"),
        reward_leader=read.typed("reward.leader", str),
        max_shaping=read.typed("reward.max_shaping", float),
        alarms=read.into(Limits, "alarms"),
        eval=read.into(EvalPlan, "eval"),
    )
    assert_all_read(read)
    plan_checks.check(plan)
    return plan


def _of_recipe(rl: RlPlan, credit: CreditPlan) -> tuple[RlPlan, CreditPlan]:
    """Both with the recipe's own credit and scale, where the config leaves them to it."""
    scale = rl.scale or ("none" if rl.recipe == "dr_grpo" else "std")
    name = credit.name or RECIPES.get(rl.recipe, "")
    return dataclasses.replace(rl, scale=scale), dataclasses.replace(credit, name=name)


def on_one_device(plan: Plan) -> Plan:
    """The plan that only samples: a checkpoint of any mesh is read onto the one device where the engine is."""
    return dataclasses.replace(plan, mesh=(1, 1, 1), engine=dataclasses.replace(plan.engine, split=False))


def _model(read: ReadTracker) -> dict[str, Any]:
    """Keyword arguments of a ModelConfig that exists: made here once, so that what it refuses is refused first.

    With model.path they are what the config sets beside the defaults, and how to compute, which no file says.
    """
    with validating():
        model = read.into(ModelConfig, "model", vocab_size=read.typed("tokenizer.vocab_size", int), n_ids=None)
    width = model.n_kv_heads * model.head_dim
    refuse(
        model.init == "mimetic" and width > model.d_model,
        f"model.init='mimetic': got n_kv_heads x head_dim = {width}, wanted at most model.d_model={model.d_model}",
    )
    given = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f"model.{f.name}" in read.read()}
    if not read.typed("model.path", str):
        return given
    unset = defaults().model
    return {name: value for name, value in given.items() if name in COMPUTE or unset.get(name) != value}


def _lora(read: ReadTracker) -> Lora | None:
    """None where the rank is 0, whatever the other two are."""
    rank, alpha, targets = read.typed("lora.rank", int), read.typed("lora.alpha", float), _names(read, "lora.targets")
    refuse(rank < 0, f"lora.rank: got {rank}, wanted at least 0 (0: everything is trained)")
    with validating():
        return Lora(rank, alpha, targets) if rank else None


def _names(read: ReadTracker, key: str) -> tuple[str, ...]:
    names = read[key]
    refuse(
        not isinstance(names, tuple | list) or not all(type(name) is str for name in names),
        f"{key}: got {names!r}, wanted a tuple of names",
    )
    return tuple(names)


def _contexts(read: ReadTracker) -> tuple[int, ...]:
    contexts = read["engine.contexts"]
    refuse(
        not isinstance(contexts, tuple | list) or not all(type(width) is int for width in contexts),
        f"engine.contexts: got {contexts!r}, wanted a tuple of whole numbers",
    )
    return tuple(contexts)


def _numbers(read: ReadTracker, key: str) -> dict[str, float]:
    """A section of name -> number whose names are free."""
    return {name: read.typed(f"{key}.{name}", float) for name in read.section(key)}


def _options(read: ReadTracker, key: str) -> dict[str, dict[str, Any]]:
    """A section of name -> section of options, whose names are free."""
    tree = read.section(key)
    for name, options in tree.items():
        refuse(not isinstance(options, dict), f"{key}.{name}: got {options!r}, wanted a section of options")
    return tree
