"""Reward models as terms: `orm` and `prm` ask the frozen model of a `launch.train_rm` run, which is read once."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launch import build, cli, policy, runs
from launch.plan import Plan, make_plan, on_one_device
from launch.workdir import config_of
from models.codec import Codec
from models.config import ModelConfig
from rl.reward_model import Judge, make_judge, outcome_scores, process_scores
from rl.rewards.compose import RewardTerm
from rl.rollout import abandon
from rl.rollout.abandon import Abandonment
from rl.rollout.values import Critic

SCORES = {"orm": outcome_scores, "prm": process_scores}
RESULT = "result.json"  # of a run that is finished
REWARDS, ABANDONS = "reward.options.{}.path", "rollout.abandon.{}_path"  # the keys that name a reward model's run


def paths(weights: Mapping[str, float], options: Mapping[str, Mapping[str, Any]], leader: str) -> dict[str, Path]:
    """Where the reward models of a reward are, by the names of their terms."""
    used = [name for name in SCORES if weights.get(name) or (name == leader and name in weights)]
    return {name: Path(options.get(name, {}).get("path", "")) for name in used}


def paths_of(plan: Plan) -> dict[str, Path]:
    return paths(plan.reward_terms, plan.reward_options, plan.reward_leader)


def check(there: Mapping[str, Path], *, tokenizer: Path, processes: int = 1, key: str = REWARDS) -> None:
    """That each is a finished run of its kind, whose ids are those of the `tokenizer` folder, if that is there yet.
    `key` is the config's for the path of a kind.

    No weight is read. Errors: ValueError, ConfigError.
    """
    if there and processes > 1:
        raise ValueError(f"{key.format(*there)}: a reward model is read by a run of one process only, got {processes}")
    for name, path in there.items():
        config_of(path)
        result = path / RESULT
        kind = json.loads(result.read_text()).get("kind") if result.exists() else None
        if kind != name:
            raise ValueError(
                f"{key.format(name)}={str(path)!r}: got a run of kind {kind}, want a finished launch.train_rm "
                f"run with rm.kind={name}"
            )
        own, theirs = (folder / "tokenizer.json" for folder in (path / "tokenizer", tokenizer))
        if theirs.exists() and own.read_bytes() != theirs.read_bytes():
            raise ValueError(
                f"{key.format(name)}={str(path)!r}: its tokenizer is another than that in {tokenizer}; train "
                "it with --init of the same policy"
            )


def build_terms(plan: Plan, codec: Codec, tokenizer: Path) -> list[RewardTerm]:
    """The terms of the plan's reward, with the models that they ask; `tokenizer` is that of `codec`. Errors: as `check`
    and `build.build_terms`.
    """
    shape = {"longest": plan.rollout.max_episode_tokens, "rows": plan.rl.group_size}
    return build.build_terms(plan, codec.view, build_scorers(paths_of(plan), tokenizer=tokenizer, **shape))


def abandons_by(plan: Plan) -> dict[str, Path]:
    """Where the reward model is that gives episodes up, if one does."""
    path = plan.rollout.abandon.prm_path
    return {"prm": Path(path)} if path else {}


def build_abandonment(plan: Plan, tokenizer: Path, critic: Critic | None = None) -> Abandonment:
    """The rules by which training gives episodes up, and what they ask: a model, a critic. Errors: as `check`."""
    a = plan.rollout.abandon
    shape = {"longest": plan.rollout.max_episode_tokens, "rows": plan.rl.group_size, "key": ABANDONS}
    score = build_scorers(abandons_by(plan), tokenizer=tokenizer, **shape)
    rules = {
        **({"repeats": abandon.repeats(a.repeats)} if a.repeats else {}),
        **({"prm": abandon.judged_below(a.prm_below, score["prm"])} if score else {}),
        **({"value": abandon.valued_below(a.value_below, critic)} if critic else {}),
    }
    return Abandonment(rules, abandon.audit(plan.seed, a.audit_frac))


def build_critic(plan: Plan, model: ModelConfig, params: Any, version: int, pad_id: int) -> Critic | None:
    """The critic that gives episodes up by `params`, until it is told of others; None where none does."""
    if not plan.rollout.abandon.value_below:
        return None
    longest = plan.rollout.max_episode_tokens + 1
    shape = {"lengths": widths(longest), "rows": plan.rl.group_size, "pad_id": pad_id}
    return Critic(model, params, version, after=plan.rollout.abandon.value_after, **shape)


def build_scorers(
    there: Mapping[str, Path], *, tokenizer: Path, longest: int, rows: int, key: str = REWARDS
) -> dict[str, Callable]:
    """By name, several trajectories -> scores. Rows of up to `longest` tokens are judged, `rows` at a time. Errors: as
    `check`.
    """
    check(there, tokenizer=tokenizer, key=key)
    return {name: partial(SCORES[name], _open(path, longest, rows)) for name, path in there.items()}


def widths(longest: int) -> list[int]:
    """The lengths that are compiled: four, up to `longest`."""
    return sorted({-(-longest * quarter // 4) for quarter in range(1, 5)})


def _open(path: Path, longest: int, rows: int) -> Judge:
    """The model of a run, whole on the first device of this process."""
    plan = on_one_device(make_plan(cli.resolve(None, str(path))))
    codec = policy.load_codec(path)
    model = policy.build_model(plan, codec.vocab_size, path / "tokenizer")
    params = runs.load_params(path / "ckpt", build.build_rm_learner(plan, model), best=False)
    return make_judge(model, params, lengths=widths(longest), rows=rows, pad_id=codec.pad_id)
