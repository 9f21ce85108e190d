"""From a config tree to plain, checked values: every leaf is read here, once, before anything is computed.

Below `launch/` nobody sees a config. Checks that need only the config (impossible combinations) are here too, so that
they end a launch in its first second.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from configs.defaults import defaults
from launch.cli import MOST_SEED, ConfigError, ReadTracker, assert_all_read, validating
from models.config import Lora, ModelConfig
from rl.metrics.alarms import Limits

CURRICULA = ("uniform", "easy_to_hard", "success_band", "learnability", "adarft", "plr")
RECIPES = {  # and the credit that is each one's own
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "gspo", "cispo"), "group"),
    "rloo": "others",
    "reinforce_pp": "returns",
    **dict.fromkeys(("gspo_token", "gigpo"), "anchor"),
    "ppo": "token",
}
OWN = -1.0  # a clip that is left to the recipe
# credit: who computes it
ON_HOST, ON_DEVICE = ("group", "others", "anchor", "process"), ("returns", "token", "turn", "bi_level")
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
    max_world_s: float
    retries: int
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
    kl_kind: str
    entropy_coef: float
    reduce: str
    loss_tokens: int
    value_coef: float
    value_clip: float
    scale: str
    drop_equal_groups: bool
    filter_overlong: bool
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
        rollout=read.into(RolloutPlan, "rollout"),
        n_demos=read.typed("demos.n", int),
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
    for check in (
        *(_check_sizes, _check_rates, _check_batch, _check_engine),
        *(_check_rl, _check_curriculum, _check_credit, _check_rest),
    ):
        check(plan)
    return plan


def _of_recipe(rl: RlPlan, credit: CreditPlan) -> tuple[RlPlan, CreditPlan]:
    """Both with the recipe's own credit and scale, where the config leaves them to it."""
    scale = rl.scale or ("none" if rl.recipe == "dr_grpo" else "std")
    name = credit.name or RECIPES.get(rl.recipe, "")
    return dataclasses.replace(rl, scale=scale), dataclasses.replace(credit, name=name)


def on_one_device(plan: Plan) -> Plan:
    """The plan that only samples: a checkpoint of any mesh is read onto the one device where the engine is."""
    return dataclasses.replace(plan, mesh=(1, 1, 1))


def check_processes(plan: Plan, processes: int) -> None:
    """That a batch can be dealt to the processes of a run. Errors: ConfigError."""
    data, fsdp, _ = plan.mesh
    _refuse(
        data * fsdp % processes != 0,
        f"mesh.data x mesh.fsdp = {data * fsdp}: not a multiple of {processes} processes, each of which holds its own "
        "rows; raise either",
    )
    _refuse(
        plan.rl.groups_per_batch % processes != 0,
        f"rl.groups_per_batch={plan.rl.groups_per_batch}: not a multiple of {processes} processes, each of which plays "
        "its share; raise it",
    )
    engines = plan.engine.replicas * plan.engine.tensor
    _refuse(
        processes > 1 and engines > 1,
        f"engine.replicas x engine.tensor = {engines}: of several processes each has one engine on its first device so "
        "far; set both to 1",
    )


def _model(read: ReadTracker) -> dict[str, Any]:
    """Keyword arguments of a ModelConfig that exists: made here once, so that what it refuses is refused first.

    With model.path they are what the config sets beside the defaults, and how to compute, which no file says.
    """
    with validating():
        model = read.into(ModelConfig, "model", vocab_size=read.typed("tokenizer.vocab_size", int), n_ids=None)
    width = model.n_kv_heads * model.head_dim
    _refuse(
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
    rank, alpha, targets = read.typed("lora.rank", int), read.typed("lora.alpha", float), read["lora.targets"]
    _refuse(
        not isinstance(targets, tuple | list) or not all(type(name) is str for name in targets),
        f"lora.targets: got {targets!r}, wanted a tuple of names",
    )
    _refuse(rank < 0, f"lora.rank: got {rank}, wanted at least 0 (0: everything is trained)")
    with validating():
        return Lora(rank, alpha, tuple(targets)) if rank else None


def _contexts(read: ReadTracker) -> tuple[int, ...]:
    contexts = read["engine.contexts"]
    _refuse(
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
        _refuse(not isinstance(options, dict), f"{key}.{name}: got {options!r}, wanted a section of options")
    return tree


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ConfigError(message)


def _check_sizes(plan: Plan) -> None:
    """What counts something: at least 1, or at least 0 where 0 means none or never."""
    b, e, r, sft, rl = plan.batch, plan.engine, plan.rollout, plan.sft, plan.rl
    for name, value in {
        "mesh.data": plan.mesh[0],
        "mesh.fsdp": plan.mesh[1],
        "mesh.tensor": plan.mesh[2],
        "batch.rows": b.rows,
        "batch.micro_rows": b.micro_rows,
        "sft.micro_rows": plan.sft.micro_rows,
        "batch.logp_chunk": b.logp_chunk,
        "engine.lanes": e.lanes,
        "engine.replicas": e.replicas,
        "engine.tensor": e.tensor,
        "engine.round_tokens": e.round_tokens,
        "engine.prefill_rows": e.prefill_rows,
        "engine.prefill_chunk": e.prefill_chunk,
        "rollout.threads": r.threads,
        "rollout.max_turn_tokens": r.max_turn_tokens,
        "demos.n": plan.n_demos,
        "sft.steps": sft.steps,
        "sft.rows": sft.rows,
        **{f"rft.{name}": value for name, value in dataclasses.asdict(plan.rft).items()},
        "rm.steps": plan.rm.steps,
        "rm.roll_ins": plan.rm.roll_ins,
        "rl.steps": rl.steps,
        "rl.groups_per_batch": rl.groups_per_batch,
        **{f"ttrl.{name}": getattr(plan.ttrl, name) for name in ("n", "samples", "queries", "steps")},
        "curriculum.steps": plan.curriculum.steps,
        "hints.steps": plan.hints.steps,
        "eval.n": plan.eval.n,
        "eval.final_n": plan.eval.final_n,
        "alarms.window": plan.alarms.window,
    }.items():
        _refuse(value < 1, f"{name}: got {value}, wanted at least 1")
    for name, value in {
        "seed": plan.seed,
        "rollout.retries": r.retries,
        "sft.warmup_steps": sft.warmup_steps,
        "sft.eval_every": sft.eval_every,
        "sft.save_every": sft.save_every,
        "rm.episodes": plan.rm.episodes,
        "rl.warmup_steps": rl.warmup_steps,
        "rl.save_every": rl.save_every,
        "eval.every": plan.eval.every,
    }.items():
        _refuse(value < 0, f"{name}: got {value}, wanted at least 0")

    _refuse(plan.seed > MOST_SEED, f"seed: got {plan.seed}, wanted at most {MOST_SEED}")


def _check_rates(plan: Plan) -> None:
    """Rates, coefficients and seconds; that they are finite was seen when they were read."""
    sft, rl = plan.sft, plan.rl
    for name, value in {
        "rollout.call_deadline_s": plan.rollout.call_deadline_s,
        "sft.learning_rate": sft.learning_rate,
        "rm.learning_rate": plan.rm.learning_rate,
        "rl.learning_rate": rl.learning_rate,
        "rl.clip_norm": rl.clip_norm,
        "rl.temperature": rl.temperature,  # training samples by temperature alone
    }.items():
        _refuse(value <= 0, f"{name}: got {value}, wanted more than 0")
    for name, value in {
        "sft.weight_decay": sft.weight_decay,
        "rl.weight_decay": rl.weight_decay,
        "rollout.max_world_s": plan.rollout.max_world_s,
        "rl.kl_coef": rl.kl_coef,
        "rl.entropy_coef": rl.entropy_coef,
        "reward.max_shaping": plan.max_shaping,
        **{f"alarms.{name}": value for name, value in dataclasses.asdict(plan.alarms).items()},
    }.items():
        _refuse(value < 0, f"{name}: got {value}, wanted at least 0")
    _refuse(not 0 < rl.b2 < 1, f"rl.b2: got {rl.b2}, wanted more than 0 and less than 1")
    _refuse(
        not (rl.clip_low == OWN or 0 <= rl.clip_low <= 1) or not (rl.clip_high == OWN or rl.clip_high >= 0),
        f"rl.clip_low={rl.clip_low}, rl.clip_high={rl.clip_high}: wanted 0 <= low <= 1 and high >= 0, or {OWN} for the "
        "recipe's own",
    )
    _refuse(
        rl.recipe == "cispo" and rl.clip_high == OWN,
        "rl.clip_high: got none for cispo, whose paper gives no number; set it",
    )


def _check_batch(plan: Plan) -> None:
    b, rl = plan.batch, plan.rl
    shards = plan.mesh[0] * plan.mesh[1]
    for name, part in {"batch": b, "sft": plan.sft}.items():
        _refuse(
            part.length < 2,
            f"{name}.length: got {part.length}, wanted at least 2: a token is scored from the one before it",
        )
        _refuse(
            part.rows % part.micro_rows != 0,
            f"{name}.rows={part.rows} is not a multiple of {name}.micro_rows={part.micro_rows}; change either",
        )
        _refuse(
            part.micro_rows % shards != 0,
            f"{name}.micro_rows={part.micro_rows} cannot be sharded over mesh.data x mesh.fsdp = {shards}; "
            "make it a multiple",
        )
    _refuse(
        b.rows < rl.groups_per_batch * rl.group_size,
        f"batch.rows={b.rows} < rl.groups_per_batch x rl.group_size = {rl.groups_per_batch * rl.group_size}: an "
        "episode may fill a row; raise batch.rows (rows without tokens cost nothing)",
    )


def _check_engine(plan: Plan) -> None:
    e, r = plan.engine, plan.rollout
    for name, tokens in {"engine.capacity": e.capacity, "rollout.max_episode_tokens": r.max_episode_tokens}.items():
        _refuse(tokens < 2, f"{name}: got {tokens}, wanted at least 2: a prompt and an answer")
    for name, room in {"batch.length": plan.batch.length, "engine.capacity": e.capacity}.items():
        _refuse(
            r.max_episode_tokens > room,
            f"rollout.max_episode_tokens={r.max_episode_tokens} does not fit {name}={room}; raise {name}",
        )
    _refuse(
        e.lanes > e.residents,
        f"engine.lanes={e.lanes} > engine.residents={e.residents}; a lane is held by a resident: "
        "lower lanes or raise residents",
    )
    _refuse(
        e.kv_on_update not in ("recompute", "keep"),
        f"engine.kv_on_update={e.kv_on_update!r}: wanted 'recompute' or 'keep'",
    )
    rising = all(a < b for a, b in zip((0, *e.contexts), e.contexts, strict=False))
    _refuse(
        not rising or e.contexts[-1:] != (e.capacity,),
        f"engine.contexts={e.contexts} must rise from at least 1 and end at engine.capacity={e.capacity}",
    )


def _check_rl(plan: Plan) -> None:
    rl = plan.rl
    _refuse(
        plan.rollout.constrain_tools,
        "rollout.constrain_tools=True: under a constraint log-probabilities are of the allowed ids alone, and the "
        "learner's are of all; set eval.constrain_tools instead",
    )
    _refuse(rl.max_staleness != 0, f"rl.max_staleness={rl.max_staleness}: only synchronous rollout (0) is built so far")
    _refuse(rl.recipe not in RECIPES, f"rl.recipe={rl.recipe!r}: wanted one of {', '.join(RECIPES)}")
    _refuse(rl.kl_kind not in ("", "k1", "k2", "k3"), f"rl.kl_kind={rl.kl_kind!r}: wanted k1, k2 or k3")
    _refuse(
        rl.recipe in ("dr_grpo", "rloo") and rl.loss_tokens < 1,
        f"rl.loss_tokens={rl.loss_tokens}: {rl.recipe} divides an episode's sum by it; wanted at least 1, say "
        "rollout.max_episode_tokens",
    )
    _refuse(
        rl.group_size < 2 and plan.credit.name in ON_HOST,
        f"rl.group_size={rl.group_size}: a group of one has advantage 0 and teaches nothing; wanted at least 2",
    )
    _refuse(rl.group_size < 1, f"rl.group_size={rl.group_size}: wanted at least 1")
    _refuse(
        rl.schedule not in ("constant", "cosine", "linear"),
        f"rl.schedule={rl.schedule!r}: wanted constant, cosine or linear",
    )
    _refuse(rl.reduce not in ("sequence", "token"), f"rl.reduce={rl.reduce!r}: wanted sequence or token")
    _refuse(rl.scale not in ("std", "none"), f"rl.scale={rl.scale!r}: wanted std or none")


def _check_curriculum(plan: Plan) -> None:
    c = plan.curriculum
    _refuse(c.name not in CURRICULA, f"curriculum.name={c.name!r}: wanted one of {', '.join(CURRICULA)}")
    for name in ("epsilon", "decay", "start_frac", "replay"):
        value = getattr(c, name)
        _refuse(not 0 < value <= 1, f"curriculum.{name}: got {value}, wanted more than 0 and at most 1")
    for name, value in {"hints.prob": plan.hints.prob, "curriculum.staleness": c.staleness}.items():
        _refuse(not 0 <= value <= 1, f"{name}: got {value}, wanted 0 to 1")
    for low, high in (("low", "high"), ("admit_low", "admit_high")):
        a, b = getattr(c, low), getattr(c, high)
        _refuse(not 0 <= a <= b <= 1, f"curriculum.{low}={a}, curriculum.{high}={b}: wanted 0 <= low <= high <= 1")
    for name in ("step", "sensitivity", "temperature"):
        value = getattr(c, name)
        _refuse(value <= 0, f"curriculum.{name}: got {value}, wanted more than 0")
    _refuse(not 0 <= c.target <= 100, f"curriculum.target: got {c.target}, wanted 0 to 100")


def _check_credit(plan: Plan) -> None:
    c, rl = plan.credit, plan.rl
    _refuse(
        c.name not in ON_HOST + ON_DEVICE,
        f"credit.name={c.name!r}: wanted one of {', '.join(ON_HOST + ON_DEVICE)}",
    )
    critic = c.name in ON_DEVICE and c.name != "returns"
    _refuse(
        (rl.recipe == "ppo") != critic,
        f"rl.recipe={rl.recipe!r} with credit.name={c.name!r}: the value head is ppo's, and token, turn and bi_level "
        "are the credit of one; change either",
    )
    for name in ("discount", "lambda_", "turn_discount"):
        value = getattr(c, name)
        _refuse(not 0 <= value <= 1, f"credit.{name}: got {value}, wanted 0 to 1")
    for name, value in {"credit.weight": c.weight, "rl.value_coef": rl.value_coef}.items():
        _refuse(value < 0, f"{name}: got {value}, wanted at least 0")
    _refuse(rl.value_clip <= 0, f"rl.value_clip: got {rl.value_clip}, wanted more than 0")


def _check_rest(plan: Plan) -> None:
    """Splits; the tokenizer; reward models; of the reward, what its terms do not see (rl.rewards.terms checks
    those).
    """
    rm = plan.rm
    _refuse(rm.kind not in ("orm", "prm"), f"rm.kind={rm.kind!r}: wanted orm or prm")
    _refuse(not 0 < rm.held_out < 1, f"rm.held_out: got {rm.held_out}, wanted more than 0 and less than 1")
    _refuse(
        bool(plan.model_path and plan.tokenizer_path),
        f"tokenizer.path={plan.tokenizer_path!r} with model.path={plan.model_path!r}: the tokenizer comes from there; "
        "leave tokenizer.path out",
    )
    _refuse(plan.eval.split not in ("validation", "test"), f"eval.split={plan.eval.split!r}: wanted validation or test")
    _refuse(
        plan.ttrl.split not in ("train", "validation", "test"),
        f"ttrl.split={plan.ttrl.split!r}: wanted train, validation or test",
    )
    stray = sorted(plan.reward_reach.keys() - plan.reward_terms.keys())
    _refuse(bool(stray), f"reward.reach: got {stray}, wanted names of reward.terms: {sorted(plan.reward_terms)}")
