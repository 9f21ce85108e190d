"""What a plan must keep to: impossible combinations of a config end a launch in its first second, each in one sentence
(got, wanted, remedy). Only what the config alone can say; what data, world and tokenizer say is launch/build.py's.
"""

import dataclasses
from typing import TYPE_CHECKING

from launch.cli import MOST_SEED, ConfigError

if TYPE_CHECKING:  # a plan is made with these checks
    from launch.plan import Plan, RlPlan

WORLDS_IN = ("threads", "processes", "ray")
CURRICULA = ("uniform", "easy_to_hard", "success_band", "learnability", "adarft", "plr")
RECIPES = {  # and the credit that is each one's own
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "gspo", "cispo"), "group"),
    "rloo": "others",
    "reinforce_pp": "returns",
    **dict.fromkeys(("gspo_token", "gigpo"), "anchor"),
    "ppo": "token",
    "ppo_decoupled": "returns",
}
OWN = -1.0  # a clip that is left to the recipe
OF_CRITIC = ("token", "turn", "bi_level")  # credit that needs the values of a head
# credit: who computes it
ON_HOST, ON_DEVICE = ("group", "others", "anchor", "process"), ("returns", *OF_CRITIC)


def check(plan: "Plan") -> None:
    """Errors: ConfigError, for the first that is wrong."""
    for of_section in (
        *(_check_sizes, _check_rates, _check_batch, _check_engine, _check_abandon),
        *(_check_rl, _check_kl, _check_curriculum, _check_credit, _check_rest),
    ):
        of_section(plan)


def refuse(wrong: bool, message: str) -> None:
    """Raises ConfigError(message) where `wrong`."""
    if wrong:
        raise ConfigError(message)


def is_weighted(rl: "RlPlan") -> bool:
    """Whether the loss weighs each token by π_proximal/π_behavior."""
    return rl.recipe == "ppo_decoupled" or rl.is_cap > 0


def _check_sizes(plan: "Plan") -> None:
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
        "rollout.processes": r.processes,
        "rollout.max_turn_tokens": r.max_turn_tokens,
        "demos.n": plan.n_demos,
        "sft.steps": sft.steps,
        "sft.rows": sft.rows,
        **{f"rft.{name}": value for name, value in dataclasses.asdict(plan.rft).items()},
        "rm.steps": plan.rm.steps,
        "rm.roll_ins": plan.rm.roll_ins,
        "rl.steps": rl.steps,
        "rl.groups_per_batch": rl.groups_per_batch,
        "rl.minibatches": rl.minibatches,
        **{f"ttrl.{name}": getattr(plan.ttrl, name) for name in ("n", "samples", "queries", "steps")},
        "curriculum.steps": plan.curriculum.steps,
        "hints.steps": plan.hints.steps,
        "eval.n": plan.eval.n,
        "eval.final_n": plan.eval.final_n,
        "eval.final_samples": plan.eval.final_samples,
        "alarms.window": plan.alarms.window,
    }.items():
        refuse(value < 1, f"{name}: got {value}, wanted at least 1")
    for name, value in {
        "seed": plan.seed,
        "rollout.retries": r.retries,
        "rollout.calls_at_once": r.calls_at_once,
        "rollout.group_retries": r.group_retries,
        "rollout.data_retries": r.data_retries,
        "sft.warmup_steps": sft.warmup_steps,
        "sft.eval_every": sft.eval_every,
        "sft.save_every": sft.save_every,
        "rm.episodes": plan.rm.episodes,
        "rl.warmup_steps": rl.warmup_steps,
        "rl.save_every": rl.save_every,
        "rl.ref_every": rl.ref_every,
        "rl.max_staleness": rl.max_staleness,
        "eval.every": plan.eval.every,
    }.items():
        refuse(value < 0, f"{name}: got {value}, wanted at least 0")

    refuse(plan.seed > MOST_SEED, f"seed: got {plan.seed}, wanted at most {MOST_SEED}")


def _check_rates(plan: "Plan") -> None:
    """Rates, coefficients and seconds; that they are finite was seen when they were read."""
    sft, rl = plan.sft, plan.rl
    for name, value in {
        "rollout.call_deadline_s": plan.rollout.call_deadline_s,
        "sft.learning_rate": sft.learning_rate,
        "rm.learning_rate": plan.rm.learning_rate,
        "rl.learning_rate": rl.learning_rate,
        "rl.clip_norm": rl.clip_norm,
        "rl.temperature": rl.temperature,  # training samples by temperature alone
        "rl.kl_horizon": rl.kl_horizon,
    }.items():
        refuse(value <= 0, f"{name}: got {value}, wanted more than 0")
    for name, value in {
        "sft.weight_decay": sft.weight_decay,
        "rl.weight_decay": rl.weight_decay,
        "rollout.max_world_s": plan.rollout.max_world_s,
        "rl.kl_coef": rl.kl_coef,
        "rl.kl_target": rl.kl_target,
        "rl.is_cap": rl.is_cap,
        "rl.entropy_coef": rl.entropy_coef,
        "reward.max_shaping": plan.max_shaping,
        **{f"alarms.{name}": value for name, value in dataclasses.asdict(plan.alarms).items()},
    }.items():
        refuse(value < 0, f"{name}: got {value}, wanted at least 0")
    share = plan.rollout.max_quarantined_frac
    refuse(not 0 <= share <= 1, f"rollout.max_quarantined_frac: got {share}, wanted 0 to 1, a share of the tasks")
    refuse(not 0 < rl.b2 < 1, f"rl.b2: got {rl.b2}, wanted more than 0 and less than 1")
    refuse(
        not (rl.clip_low == OWN or 0 <= rl.clip_low <= 1) or not (rl.clip_high == OWN or rl.clip_high >= 0),
        f"rl.clip_low={rl.clip_low}, rl.clip_high={rl.clip_high}: wanted 0 <= low <= 1 and high >= 0, or {OWN} for the "
        "recipe's own",
    )
    refuse(
        rl.recipe == "cispo" and rl.clip_high == OWN,
        "rl.clip_high: got none for cispo, whose paper gives no number; set it",
    )


def _check_batch(plan: "Plan") -> None:
    b, rl = plan.batch, plan.rl
    shards = plan.mesh[0] * plan.mesh[1]
    for name, part in {"batch": b, "sft": plan.sft}.items():
        refuse(
            part.length < 2,
            f"{name}.length: got {part.length}, wanted at least 2: a token is scored from the one before it",
        )
        refuse(
            part.rows % part.micro_rows != 0,
            f"{name}.rows={part.rows} is not a multiple of {name}.micro_rows={part.micro_rows}; change either",
        )
        refuse(
            part.micro_rows % shards != 0,
            f"{name}.micro_rows={part.micro_rows} cannot be sharded over mesh.data x mesh.fsdp = {shards}; "
            "make it a multiple",
        )
    refuse(
        b.rows < rl.groups_per_batch * rl.group_size,
        f"batch.rows={b.rows} < rl.groups_per_batch x rl.group_size = {rl.groups_per_batch * rl.group_size}: an "
        "episode may fill a row; raise batch.rows (rows without tokens cost nothing)",
    )


def _check_engine(plan: "Plan") -> None:
    e, r = plan.engine, plan.rollout
    for name, tokens in {"engine.capacity": e.capacity, "rollout.max_episode_tokens": r.max_episode_tokens}.items():
        refuse(tokens < 2, f"{name}: got {tokens}, wanted at least 2: a prompt and an answer")
    for name, room in {"batch.length": plan.batch.length, "engine.capacity": e.capacity}.items():
        refuse(
            r.max_episode_tokens > room,
            f"rollout.max_episode_tokens={r.max_episode_tokens} does not fit {name}={room}; raise {name}",
        )
    refuse(r.worlds not in WORLDS_IN, f"rollout.worlds={r.worlds!r}: wanted one of {', '.join(WORLDS_IN)}")
    refuse(
        bool(r.ray_address) and r.worlds != "ray",
        f"rollout.ray_address={r.ray_address!r} with rollout.worlds={r.worlds!r}: nobody asks there; set it to 'ray'",
    )
    refuse(
        e.lanes > e.residents,
        f"engine.lanes={e.lanes} > engine.residents={e.residents}; a lane is held by a resident: "
        "lower lanes or raise residents",
    )
    refuse(
        e.kv_on_update not in ("recompute", "keep"),
        f"engine.kv_on_update={e.kv_on_update!r}: wanted 'recompute' or 'keep'",
    )
    rising = all(a < b for a, b in zip((0, *e.contexts), e.contexts, strict=False))
    refuse(
        not rising or e.contexts[-1:] != (e.capacity,),
        f"engine.contexts={e.contexts} must rise from at least 1 and end at engine.capacity={e.capacity}",
    )


def _check_abandon(plan: "Plan") -> None:
    a, abandoned = plan.rollout.abandon, plan.rollout.abandoned
    refuse(
        a.repeats < 0 or a.repeats == 1,
        f"rollout.abandon.repeats: got {a.repeats}, wanted 0 (off) or at least 2: the first time is no repetition",
    )
    for name in ("prm_below", "audit_frac"):
        value = getattr(a, name)
        refuse(not 0 <= value <= 1, f"rollout.abandon.{name}: got {value}, wanted 0 to 1")
    refuse(a.value_below < 0, f"rollout.abandon.value_below: got {a.value_below}, wanted at least 0 (0: off)")
    refuse(
        a.value_below > 0 and plan.credit.name not in OF_CRITIC,
        f"rollout.abandon.value_below={a.value_below} with credit.name={plan.credit.name!r}: there is no critic; "
        f"wanted credit of {', '.join(OF_CRITIC)}, or 0",
    )
    for wrong, message in (
        (a.value_after < 1, f"rollout.abandon.value_after={a.value_after}: a critic begins at 0; wanted at least 1"),
        (
            a.value_after >= plan.rl.steps // plan.rl.minibatches,
            f"rollout.abandon.value_after={a.value_after}: the run ends before; wanted fewer batches than it has",
        ),
        (plan.rl.value_coef == 0, "rl.value_coef=0: the critic is never trained; raise it"),
        (
            plan.credit.discount < 1,
            f"credit.discount={plan.credit.discount}: what the critic expects then falls with every token that is "
            "still to come; set it to 1",
        ),
        (
            abandoned != "excluded" or a.audit_frac == 0,
            f"rollout.abandoned={abandoned!r}, rollout.abandon.audit_frac={a.audit_frac}: the critic would be taught "
            "its own verdicts; wanted 'excluded' and more than 0",
        ),
        (plan.ttrl.per_query, "ttrl.per_query: each query begins with a new critic; leave either out"),
    ):
        refuse(a.value_below > 0 and wrong, f"rollout.abandon.value_below={a.value_below} with {message}")
    refuse(
        a.is_on and abandoned == "failure" and plan.reward_leader in ("orm", "prm"),
        f"rollout.abandoned='failure' with reward.leader={plan.reward_leader!r}: a model judges what there is of an "
        "episode, and may like it; set it to 'excluded'",
    )
    refuse(
        bool(a.prm_path) != (a.prm_below > 0),
        f"rollout.abandon.prm_below={a.prm_below} with rollout.abandon.prm_path={a.prm_path!r}: wanted both, or none",
    )
    refuse(abandoned not in ("failure", "excluded"), f"rollout.abandoned={abandoned!r}: wanted 'failure' or 'excluded'")
    refuse(
        abandoned == "excluded" and not a.is_on,
        "rollout.abandoned='excluded': no rule of rollout.abandon is on, so nothing is abandoned; set one",
    )


def _check_rl(plan: "Plan") -> None:
    rl = plan.rl
    refuse(
        plan.rollout.constrain_tools,
        "rollout.constrain_tools=True: under a constraint log-probabilities are of the allowed ids alone, and the "
        "learner's are of all; set eval.constrain_tools instead",
    )
    refuse(
        plan.ttrl.per_query and rl.max_staleness != 0,
        f"ttrl.per_query with rl.max_staleness={rl.max_staleness}: a query's tickets are its own; set it to 0",
    )
    refuse(
        plan.ttrl.per_query and rl.drop_equal_groups,
        "ttrl.per_query with rl.drop_equal_groups: the groups of a query on which the policy agrees with itself, as it "
        "is to in the end, are all refused, and no step is ever complete; set either to False",
    )
    refuse(
        plan.ttrl.per_query and rl.ref_every > 0 and plan.ttrl.steps % rl.ref_every != 0,
        f"ttrl.per_query with ttrl.steps={plan.ttrl.steps}, rl.ref_every={rl.ref_every}: the second query's reference "
        "would be refreshed after other steps than the first's; make it a multiple",
    )
    refuse(
        rl.filter_overlong and plan.credit.name in ON_DEVICE,
        f"rl.filter_overlong with credit.name={plan.credit.name!r}: a filtered episode is in no batch, so neither "
        f"whitening nor a critic would know it; wanted credit of {', '.join(ON_HOST)}, or False",
    )
    refuse(
        rl.drop_equal_groups and rl.group_size < 2,
        f"rl.drop_equal_groups with rl.group_size={rl.group_size}: the rewards of one are always equal; raise it",
    )
    refuse(
        rl.train_on_world and rl.max_staleness != 0,
        f"rl.train_on_world with rl.max_staleness={rl.max_staleness}: nobody sampled an observation, so its ratio "
        "is to the policy of its batch; set either to 0",
    )
    refuse(
        rl.train_on_world and (plan.credit.name in ON_DEVICE or rl.kl_in == "reward"),
        f"rl.train_on_world with credit.name={plan.credit.name!r} and rl.kl_in={rl.kl_in!r}: what is computed on the "
        f"device goes from one sampled token to the next; wanted credit of {', '.join(ON_HOST)} and rl.kl_in='loss'",
    )
    for name, steps in {
        "rl.steps": rl.steps,
        "rl.save_every": rl.save_every,
        "rl.ref_every": rl.ref_every,
        "eval.every": plan.eval.every,
        **({"ttrl.steps": plan.ttrl.steps} if plan.ttrl.per_query else {}),
    }.items():
        refuse(
            steps % rl.minibatches != 0,
            f"{name}={steps}: not a multiple of rl.minibatches={rl.minibatches}, the steps that a batch makes",
        )
    episodes, micro = rl.groups_per_batch * rl.group_size, plan.batch.micro_rows
    refuse(
        rl.minibatches > episodes,
        f"rl.minibatches={rl.minibatches}: a batch has {episodes} episodes, of which each update wants its share; "
        "lower it",
    )
    most = rl.minibatches * -(-episodes // (rl.minibatches * micro)) * micro
    refuse(
        rl.minibatches > 1 and plan.batch.rows < most,
        f"batch.rows={plan.batch.rows}: {rl.minibatches} mini-batches of rows by batch.micro_rows={micro} may fill "
        f"{most} (an episode may fill a row); raise it, or lower batch.micro_rows",
    )
    refuse(rl.recipe not in RECIPES, f"rl.recipe={rl.recipe!r}: wanted one of {', '.join(RECIPES)}")
    refuse(rl.proximal not in ("forward", "loglinear"), f"rl.proximal={rl.proximal!r}: wanted 'forward' or 'loglinear'")
    refuse(
        rl.proximal != "forward" and not is_weighted(rl),
        f"rl.proximal={rl.proximal!r} with rl.recipe={rl.recipe!r}: no proximal policy is read; set rl.is_cap, or "
        "rl.recipe='ppo_decoupled', or leave it out",
    )
    refuse(
        rl.dual_clip != 0 and rl.dual_clip <= 1,
        f"rl.dual_clip={rl.dual_clip}: wanted a bound above 1 on the ratio, or 0 for none",
    )
    refuse(
        rl.dual_clip != 0 and rl.recipe == "cispo",
        f"rl.dual_clip={rl.dual_clip} with rl.recipe='cispo': it bounds every weight by rl.clip_high; leave it out",
    )
    refuse(
        rl.recipe in ("dr_grpo", "rloo") and rl.loss_tokens < 1,
        f"rl.loss_tokens={rl.loss_tokens}: {rl.recipe} divides an episode's sum by it; wanted at least 1, say "
        "rollout.max_episode_tokens",
    )
    refuse(
        rl.group_size < 2 and plan.credit.name in ON_HOST,
        f"rl.group_size={rl.group_size}: a group of one has advantage 0 and teaches nothing; wanted at least 2",
    )
    refuse(rl.group_size < 1, f"rl.group_size={rl.group_size}: wanted at least 1")
    refuse(
        rl.schedule not in ("constant", "cosine", "linear"),
        f"rl.schedule={rl.schedule!r}: wanted constant, cosine or linear",
    )
    refuse(rl.reduce not in ("sequence", "token"), f"rl.reduce={rl.reduce!r}: wanted sequence or token")
    refuse(rl.scale not in ("std", "none"), f"rl.scale={rl.scale!r}: wanted std or none")


def _check_kl(plan: "Plan") -> None:
    """The penalty of KL to a reference: what would be read by nobody, or taken for something else."""
    rl, credit = plan.rl, plan.credit.name
    refuse(rl.kl_kind not in ("", "k1", "k2", "k3"), f"rl.kl_kind={rl.kl_kind!r}: wanted k1, k2 or k3")
    refuse(rl.kl_in not in ("loss", "reward"), f"rl.kl_in={rl.kl_in!r}: wanted loss or reward")
    for name, used in {
        "rl.kl_in='reward'": rl.kl_in == "reward",
        f"rl.kl_target={rl.kl_target}": rl.kl_target > 0,
        f"rl.ref_every={rl.ref_every}": rl.ref_every > 0,
    }.items():
        refuse(used and rl.kl_coef == 0, f"{name} with rl.kl_coef=0: there is no penalty and no reference; set it")
    refuse(
        rl.ref_every > 0 and plan.lora is not None,
        f"rl.ref_every={rl.ref_every} with lora.rank={plan.lora and plan.lora.rank}: the reference of adapters is "
        "their base, which stays; set either to 0",
    )
    groups = 1 if plan.ttrl.per_query else rl.groups_per_batch
    least = 0.2 * groups * rl.group_size / rl.minibatches  # rl.losses.kl.MOST_ERROR of an update's episodes
    refuse(
        rl.kl_target > 0 and rl.kl_horizon <= least,
        f"rl.kl_horizon={rl.kl_horizon:g}: one update can take all of the coefficient, or more, where it is not above "
        f"{least:g}, a fifth of the update's episodes; raise it (it counts episodes, not batches)",
    )
    if rl.kl_in != "reward":
        return
    refuse(
        rl.kl_kind not in ("", "k1"),
        f"rl.kl_kind={rl.kl_kind!r} with rl.kl_in='reward': as a reward k1 alone has the gradient of the KL; leave it "
        "out",
    )
    refuse(
        credit in ("anchor", "process"),
        f"rl.kl_in='reward' with credit.name={credit!r}: the turns of a group are compared before the KL is known; set "
        "rl.kl_in='loss'",
    )
    refuse(
        plan.rl.filter_overlong and credit in ON_HOST,
        f"rl.kl_in='reward' with rl.filter_overlong and credit.name={credit!r}: a filtered episode is in no batch, so "
        "its KL is not known to its group; set rl.kl_in='loss'",
    )


def _check_curriculum(plan: "Plan") -> None:
    c = plan.curriculum
    refuse(c.name not in CURRICULA, f"curriculum.name={c.name!r}: wanted one of {', '.join(CURRICULA)}")
    for name in ("epsilon", "decay", "start_frac", "replay"):
        value = getattr(c, name)
        refuse(not 0 < value <= 1, f"curriculum.{name}: got {value}, wanted more than 0 and at most 1")
    for name, value in {"hints.prob": plan.hints.prob, "curriculum.staleness": c.staleness}.items():
        refuse(not 0 <= value <= 1, f"{name}: got {value}, wanted 0 to 1")
    for low, high in (("low", "high"), ("admit_low", "admit_high")):
        a, b = getattr(c, low), getattr(c, high)
        refuse(not 0 <= a <= b <= 1, f"curriculum.{low}={a}, curriculum.{high}={b}: wanted 0 <= low <= high <= 1")
    for name in ("step", "sensitivity", "temperature"):
        value = getattr(c, name)
        refuse(value <= 0, f"curriculum.{name}: got {value}, wanted more than 0")
    refuse(
        c.name == "plr" and plan.rl.group_size < 2,
        f"curriculum.name='plr' with rl.group_size={plan.rl.group_size}: it goes by the spread of a group, and one "
        "episode has none; raise it",
    )
    refuse(not 0 <= c.target <= 100, f"curriculum.target: got {c.target}, wanted 0 to 100")


def _check_credit(plan: "Plan") -> None:
    c, rl = plan.credit, plan.rl
    refuse(
        c.name not in ON_HOST + ON_DEVICE,
        f"credit.name={c.name!r}: wanted one of {', '.join(ON_HOST + ON_DEVICE)}",
    )
    critic = c.name in OF_CRITIC
    refuse(
        (rl.recipe == "ppo" and not critic) or (critic and rl.recipe not in ("ppo", "ppo_decoupled")),
        f"rl.recipe={rl.recipe!r} with credit.name={c.name!r}: the value head is ppo's, and token, turn and bi_level "
        "are the credit of one; change either",
    )
    for name in ("discount", "lambda_", "turn_discount"):
        value = getattr(c, name)
        refuse(not 0 <= value <= 1, f"credit.{name}: got {value}, wanted 0 to 1")
    for name, value in {"credit.weight": c.weight, "rl.value_coef": rl.value_coef}.items():
        refuse(value < 0, f"{name}: got {value}, wanted at least 0")
    refuse(rl.value_clip <= 0, f"rl.value_clip: got {rl.value_clip}, wanted more than 0")


def _check_rest(plan: "Plan") -> None:
    """Splits; the tokenizer; reward models; of the reward, what its terms do not see (rl.rewards.terms checks
    those).
    """
    rm = plan.rm
    refuse(rm.kind not in ("orm", "prm"), f"rm.kind={rm.kind!r}: wanted orm or prm")
    refuse(not 0 < rm.held_out < 1, f"rm.held_out: got {rm.held_out}, wanted more than 0 and less than 1")
    refuse(
        bool(plan.model_path and plan.tokenizer_path),
        f"tokenizer.path={plan.tokenizer_path!r} with model.path={plan.model_path!r}: the tokenizer comes from there; "
        "leave tokenizer.path out",
    )
    refuse(plan.eval.split not in ("validation", "test"), f"eval.split={plan.eval.split!r}: wanted validation or test")
    refuse(
        plan.ttrl.split not in ("train", "validation", "test"),
        f"ttrl.split={plan.ttrl.split!r}: wanted train, validation or test",
    )
    stray = sorted(plan.reward_reach.keys() - plan.reward_terms.keys())
    refuse(bool(stray), f"reward.reach: got {stray}, wanted names of reward.terms: {sorted(plan.reward_terms)}")


def check_processes(plan: "Plan", processes: int) -> None:
    """That a batch can be dealt to the processes of a run. Errors: ConfigError."""
    data, fsdp, _ = plan.mesh
    refuse(
        data * fsdp % processes != 0,
        f"mesh.data x mesh.fsdp = {data * fsdp}: not a multiple of {processes} processes, each of which holds its own "
        "rows; raise either",
    )
    refuse(
        plan.rl.groups_per_batch % processes != 0,
        f"rl.groups_per_batch={plan.rl.groups_per_batch}: not a multiple of {processes} processes, each of which plays "
        "its share; raise it",
    )
    engines = plan.engine.replicas * plan.engine.tensor
    refuse(
        processes > 1 and plan.engine.split,
        "engine.split=True: of several processes each has its engine on its first device so far; set it to False",
    )
    refuse(
        processes > 1 and engines > 1,
        f"engine.replicas x engine.tensor = {engines}: of several processes each has one engine on its first device so "
        "far; set both to 1",
    )
