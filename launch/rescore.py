"""Another reward for episodes that were played already: their scores and advantages, with no world and no engine.

    python -m launch.report rescore --workdir=D --rewards=success=1,repetition=0.1 [--option=repetition.ngram=4 ...]

What the terms need beside their weights comes from the run's config, where it is there: `reward.reach`,
`reward.options`, `reward.leader`, `reward.max_shaping`, `rl.scale`; `--reach=searches=6,...`, `--option=NAME.KEY=JSON`
and `--leader=NAME` go before it.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.arg import ConfigError
from launch.workdir import config_of
from rl import advantages
from rl.episodes import read_episodes
from rl.rewards.compose import RewardTerm, reward, score_group
from rl.rewards.terms import make_terms
from rl.types import Status, Trajectory


def terms_of(
    workdir: Path, rewards: str, *, reach: str = "", options: Sequence[str] = (), leader: str = ""
) -> list[RewardTerm]:
    """The terms of a command line over the config of the run in `workdir`; a judge reads by the run's own tokenizer.

    Errors: ConfigError, ValueError.
    """
    there = config_of(workdir)["reward"]
    weights = _numbers("--rewards", rewards)
    if not weights:
        raise ConfigError("--rewards: got nothing, want name=weight[,name=weight]")
    given = {name: dict(of) for name, of in there.get("options", {}).items() if name in weights}
    for option in options:
        (name, _, key), equals, text = _split(option)
        if not (name and key and equals):
            raise ConfigError(f"--option: got {option!r}, want NAME.KEY=JSON, e.g. repetition.ngram=4")
        try:
            given.setdefault(name, {})[key] = json.loads(text)
        except ValueError as err:
            raise ConfigError(f"--option {name}.{key}: got {text!r}, want JSON ({err})") from err
    leader = leader or there.get("leader", "success")
    return make_terms(
        weights,
        {**there.get("reach", {}), **_numbers("--reach", reach)},
        given,
        leader=leader,
        max_shaping=there["max_shaping"],
        view=_view(workdir) if "judge" in weights else None,
        scorers=_scorers(workdir, weights, given, leader) if {"orm", "prm"} & weights.keys() else None,
    )


def rescore(
    workdir: Path, terms: Sequence[RewardTerm], *, scale: str, excluded: Collection[Status] = ()
) -> list[dict[str, Any]]:
    """A record for each stored episode of training, in the order of ticket and member: {ticket, member, task_id,
    status, and `before` and `after`, each {scores, reward, advantage}}.

    The advantage is relative to the episode's group, without those that ended as one of `excluded`; None where the
    episode was not judged. Memory: all episodes.
    """
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in read_episodes(workdir):
        groups[trajectory.ticket].append(trajectory)
    records = []
    for ticket in sorted(groups):
        before = sorted(groups[ticket], key=lambda t: t.member)
        after = score_group(terms, before, excluded=excluded)
        for old, new, was, now in zip(before, after, _credit(before, scale), _credit(after, scale), strict=True):
            records.append(
                {"ticket": ticket, "member": old.member, "task_id": old.task_id, "status": old.status.value}
                | {"before": _account(old, was), "after": _account(new, now)}
            )
    return records


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What changed: {episodes, groups, terms {name: {before, after}} (means of what it judged, weighted), reward
    {before, after}, not_judged {before, after} (episodes that were scored), correlation (Pearson, of the rewards of
    episodes judged both times; None where one of them does not vary), sign_changes (groups in which an episode's
    advantage has another sign), equal_groups {before, after}}.
    """
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["ticket"]].append(record)
    names = dict.fromkeys(name for r in records for when in ("before", "after") for name in r[when]["scores"])
    both = [(r["before"]["reward"], r["after"]["reward"]) for r in records]
    both = [pair for pair in both if None not in pair]

    def each(of: Callable[[str], Any]) -> dict[str, Any]:
        return {when: of(when) for when in ("before", "after")}

    def mean(when: str, name: str) -> float | None:
        return _mean(r[when]["scores"].get(name) for r in records)

    return {
        "episodes": len(records),
        "groups": len(groups),
        "terms": {name: each(lambda when, name=name: mean(when, name)) for name in names},
        "reward": each(lambda when: _mean(r[when]["reward"] for r in records)),
        "not_judged": each(lambda w: sum(bool(r[w]["scores"]) and r[w]["reward"] is None for r in records)),
        "correlation": _correlation(both),
        "sign_changes": sum(any(_sign(r["before"]) != _sign(r["after"]) for r in group) for group in groups.values()),
        "equal_groups": each(lambda w: sum(not any(r[w]["advantage"] for r in group) for group in groups.values())),
    }


def tell(found: Mapping[str, Any]) -> str:
    """`summary` as a table for people."""

    def row(name: str, of: Mapping[str, Any]) -> str:
        cells = ("-" if of[when] is None else f"{of[when]:.4g}" for when in ("before", "after"))
        return f"{name:24}" + "".join(f"{cell:>12}" for cell in cells)

    correlation = "-" if found["correlation"] is None else f"{found['correlation']:.3f}"
    return "\n".join(
        [
            f"{found['episodes']} episodes in {found['groups']} groups",
            f"{'mean':24}{'before':>12}{'after':>12}",
            *(row(name, of) for name, of in found["terms"].items()),
            *(row(name.replace("_", " "), found[name]) for name in ("reward", "not_judged", "equal_groups")),
            f"correlation of rewards {correlation}; in {found['sign_changes']} groups an advantage changes its sign",
        ]
    )


def write(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """One JSON line for each episode."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
    temporary.replace(file)


def _numbers(flag: str, text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (name and equals and math.isfinite(number)) or name in found:
            raise ConfigError(f"{flag}: got {item!r}, want name=number[,name=number], each name once")
        found[name] = number
    return found


def _split(option: str) -> tuple[tuple[str, str, str], str, str]:
    name, equals, text = option.partition("=")
    return name.partition("."), equals, text


def _view(workdir: Path) -> Callable[[Sequence[int]], str]:
    from launch import policy  # only who asks for text waits for the tokenizer

    return policy.load_codec(workdir).view


def _scorers(workdir: Path, *given: Any) -> dict[str, Callable]:
    from launch import reward_models  # only who asks a reward model waits for jax

    config = config_of(workdir)
    shape = {"longest": config["rollout"]["max_episode_tokens"], "rows": config["rl"]["group_size"]}
    return reward_models.build_scorers(reward_models.paths(*given), tokenizer=workdir / "tokenizer", **shape)


def _credit(group: Sequence[Trajectory], scale: str) -> list[float | None]:
    rewards = np.array([reward(t) for t in group])
    judged = np.isfinite(rewards)
    credit = advantages.group_relative(rewards, np.zeros(len(group), int), judged, scale=scale)
    return [float(a) if known else None for a, known in zip(credit, judged, strict=True)]


def _account(trajectory: Trajectory, advantage: float | None) -> dict[str, Any]:
    scores = {name: _number(score) for name, score in trajectory.scores.items()}
    return {"scores": scores, "reward": _number(reward(trajectory)), "advantage": advantage}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _sign(account: Mapping[str, Any]) -> int:
    advantage = account["advantage"] or 0.0
    return (advantage > 0) - (advantage < 0)


def _mean(values) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    x, y = np.array(pairs, np.float64).reshape(-1, 2).T
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
