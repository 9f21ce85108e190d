"""The reward of an experiment from its config: names and weights to terms."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.rewards import format, judge, majority, milestones, outcome, process, shaping, truthful
from rl.rewards.compose import RewardTerm, check_terms


def make_terms(
    weights: Mapping[str, float],
    reach: Mapping[str, float],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    leader: str = "success",
    max_shaping: float = 0.3,
    view: Callable[[Sequence[int]], str] | None = None,
    scorers: Mapping[str, Callable] | None = None,
) -> list[RewardTerm]:
    """Terms by name, one of those below or a fact of the world, in which `leader` leads (`check_terms`). A weight of 0
    leaves a term out.

    `reach`: the largest value of each fact that is a count. `options`: keyword arguments of a term by its name. `view`:
    ids to text, for the terms that read what was said. `scorers`: by name, whom a reward model's term asks. Errors
    (ValueError): a name that is neither, an option that the term does not take or a value that it refuses, a negative
    weight of a term that knows its own sign.
    """
    builders: dict[str, Callable[..., RewardTerm]] = {
        "success": outcome.success_term,
        "search_r1": format.search_r1_term,
        "truthful": truthful.truthful_term,
        "majority": majority.majority_term,
        "format": format.format_term,
        "milestones": milestones.milestones_term,
        "judge": judge.judge_term,
        "orm": outcome.orm_term,
        "prm": process.prm_term,
        "search_bonus": shaping.search_bonus_term,
        "step_cost": shaping.step_cost_term,
        "length_cost": shaping.length_cost_term,
        "repetition": shaping.repetition_term,
        "soft_overlong": shaping.soft_overlong_term,
        "kimi_length": shaping.kimi_length_term,
    }
    options, scorers = options or {}, scorers or {}
    handed = {"judge": {"view": view}, **{name: {"score": scorers.get(name)} for name in ("orm", "prm")}}
    stray = sorted((options.keys() - builders.keys()) | (options.keys() - weights.keys()))
    if stray:
        raise ValueError(
            f"reward.options: got {stray}, want names of reward.terms that take options: "
            f"{sorted(builders.keys() & weights.keys())}"
        )
    made = []
    for name, weight in weights.items():
        if weight == 0 and name != leader:
            continue
        if name in builders:
            made.append(_build(builders[name], name, weight, options.get(name, {}), handed.get(name, {})))
        else:
            made.append(outcome.fact_term(name, weight, _reach(name, reach, list(builders))))
    check_terms(made, outcome=leader, max_shaping=max_shaping)
    return made


def _build(
    builder: Callable[..., RewardTerm],
    name: str,
    weight: float,
    options: Mapping[str, Any],
    handed: Mapping[str, Any],
) -> RewardTerm:
    """`handed` is what the program gives, beside the `options` of the config."""
    if weight < 0:
        raise ValueError(
            f"reward.terms.{name}: got weight {weight:g}, want more than 0; what costs has values below 0 already"
        )
    try:
        return builder(weight, **options, **handed)
    except TypeError as err:
        named = inspect.signature(judge.Endpoint if builder is judge.judge_term else builder).parameters.values()
        takes = [str(p).replace("'", "") for p in named if p.name != "weight" and p.name not in handed]
        raise ValueError(f"reward.options.{name}: {err}; it takes {takes}") from err


def _reach(name: str, reach: Mapping[str, float], known: Sequence[str]) -> float:
    if name not in reach and name not in outcome.FRACTIONS:
        raise ValueError(
            f"reward.terms: {name!r} is not known to lie in [0, 1]: it is neither a term ({', '.join(known)}) nor a "
            f"fact that does ({', '.join(outcome.FRACTIONS)}); if the world counts it, say how large it can get, "
            f"reward.reach.{name}=N (for something counted once a turn: the turns)"
        )
    return float(reach.get(name, 1.0))
