"""What a config's recipe and credit stand for: the loss, the advantages, the critic."""

from collections.abc import Callable, Sequence
from functools import partial

from launch.plan import Plan
from launch.plan_checks import OF_CRITIC, ON_HOST, OWN, is_weighted
from rl import credit, critic
from rl.losses import recipes
from rl.losses.kl import Penalty
from rl.losses.recipes import LossFn
from rl.losses.surrogate import truncated_weight
from rl.rewards.compose import RewardTerm
from rl.types import Status


def build_loss(plan: Plan) -> LossFn:
    """The recipe with the plan's clip, weights, KL and entropy, or with its own where the plan leaves them to it; where
    a recipe says how it is reduced, rl.reduce is not read.
    """
    rl, decoupled = plan.rl, plan.rl.recipe == "ppo_decoupled"
    clip = {"clip_low": rl.clip_low, "clip_high": rl.clip_high}
    value = {"value_coef": rl.value_coef, "value_clip": rl.value_clip}
    shared = {
        **{name: value for name, value in clip.items() if value != OWN},
        **({"dual_clip": rl.dual_clip} if rl.dual_clip else {}),
        **({"decoupled_cap": rl.is_cap} if rl.is_cap else {}),
        **({"weigh": truncated_weight} if rl.is_cap and not decoupled else {}),
        "proximal": rl.proximal,
        **({"kl_kind": rl.kl_kind} if rl.kl_kind else {}),
        "kl_coef": rl.kl_coef if rl.kl_in == "loss" else 0.0,
        "entropy_coef": rl.entropy_coef,
    }
    recipe: dict[str, Callable[..., LossFn]] = {
        "grpo": partial(recipes.grpo, reduce=rl.reduce),
        "dapo": recipes.dapo,
        "dr_grpo": partial(recipes.dr_grpo, length=rl.loss_tokens),
        "rloo": partial(recipes.rloo, length=rl.loss_tokens),
        "reinforce_pp": recipes.reinforce_pp,
        "gspo": recipes.gspo,
        "gspo_token": recipes.gspo_token,
        "gigpo": recipes.gigpo,
        "cispo": recipes.cispo,
        "ppo": partial(recipes.ppo, reduce=rl.reduce, **value),
        "ppo_decoupled": partial(recipes.ppo_decoupled, **({"value": value} if heads(plan) else {})),
    }
    return recipe[rl.recipe](**shared)


def build_credit(plan: Plan, terms: Sequence[RewardTerm]) -> credit.CreditFn:
    """Episodes and rewards -> credit, on the host; nothing yet where the device fills it."""
    c, scale = plan.credit, plan.rl.scale
    if build_critic(plan) is not None:
        return credit.of_critic
    return {
        "group": partial(credit.relative, scale=scale),
        "others": credit.leave_one_out,
        "anchor": partial(credit.by_anchor, discount=c.discount, weight=c.weight, scale=scale, terms=terms),
        "process": partial(credit.by_process, scale=scale, terms=terms),
    }[c.name]


def excluded(plan: Plan) -> tuple[Status, ...]:
    """How members ended that their group is compared without."""
    return (Status.ABANDONED,) if plan.rollout.abandoned == "excluded" else ()


def build_critic(plan: Plan) -> critic.Estimator | None:
    """What `learner.prepare` fills advantages with; None where the host does, which knows no KL to a reference."""
    c = plan.credit
    how = {"discount": c.discount, "lambda_": c.lambda_}
    if c.name in ON_HOST:
        if plan.rl.kl_in != "reward":
            return None
        return critic.by_group(baseline="others" if c.name == "others" else plan.rl.scale)
    estimator = {
        "returns": critic.token_level(discount=c.discount, lambda_=1.0),
        "token": critic.token_level(**how),
        "turn": critic.turn_level(**how),
        "bi_level": critic.bi_level(**how, turn_discount=c.turn_discount),
    }[c.name]
    return critic.whitened(estimator) if c.whiten else estimator


def heads(plan: Plan) -> tuple[str, ...]:
    """The heads that RL trains beside the policy, fresh at its start; nobody who only samples reads them."""
    return ("value_head",) if plan.credit.name in OF_CRITIC else ()


def wants_proximal(plan: Plan) -> bool:
    """Whether the loss reads the learner's own log-probabilities of before the update, and a forward pass computes
    them.
    """
    return plan.rl.proximal == "forward" and is_weighted(plan.rl)


def build_penalty(plan: Plan) -> Penalty | None:
    """The KL penalty as the learner must know it: in the reward, or with a coefficient that is adapted."""
    rl = plan.rl
    if rl.kl_in == "loss" and not rl.kl_target:
        return None
    gain = rl.groups_per_batch * rl.group_size / rl.minibatches / rl.kl_horizon  # of an update
    return Penalty(rl.kl_coef, in_reward=rl.kl_in == "reward", target=rl.kl_target, gain=gain)
