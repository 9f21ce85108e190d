"""Is a run healthy? Alarms over what its monitor records; each says metric, value and limit.

"first" is the mean over the first `window` records that have the metric, "now" that over the last `window`; an alarm
that compares the two rings only when they do not overlap.

| alarm | rings when |
|---|---|
| `entropy_collapse` | `policy/entropy` now < `entropy_frac` x first |
| `kl_spike` | `policy/kl` or `policy/ref_kl` of one step > `kl_nats` |
| `length_drift` | `episode/tokens` now > `length_ratio` x first, or < first / `length_ratio` |
| `logp_gap` | `policy/engine_gap_max` of one step > `gap_nats`: the engine and the learner are two policies |
| `equal_groups` | `batch/equal_groups_frac` now > `equal_groups_frac`: most of a batch teaches nothing |
| `env_errors` | `episode/env_error_frac` of one step > `env_error_frac` |
| `fabrication` | `episode/success` now > first, and `episode/unsupported` now > first + `unsupported_rise` |
"""

import dataclasses
from collections.abc import Mapping, Sequence

Record = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What each alarm bears; the table at the top of this file says how each is used."""

    window: int = 5  # records
    entropy_frac: float = 0.1
    kl_nats: float = 0.5
    length_ratio: float = 2.0
    gap_nats: float = 0.1
    equal_groups_frac: float = 0.8
    env_error_frac: float = 0.1
    unsupported_rise: float = 0.1


@dataclasses.dataclass(frozen=True)
class Alarm:
    name: str
    metric: str
    value: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name}: {self.metric} is {self.value:.3g}, limit {self.limit:.3g}"


NAMES = ("entropy_collapse", "kl_spike", "length_drift", "logp_gap", "equal_groups", "env_errors", "fabrication")
WATCHED = (
    *("policy/entropy", "policy/kl", "policy/ref_kl", "policy/engine_gap_max", "batch/equal_groups_frac"),
    *("episode/tokens", "episode/env_error_frac", "episode/success", "episode/unsupported"),
)


def ringing(records: Sequence[Record], limits: Limits) -> list[Alarm]:
    """The alarms of the last of `records`, which are those of a run so far, in order."""
    if not records:
        return []
    last, found = records[-1], []

    def above(name: str, metric: str, value: float | None, limit: float) -> None:
        if value is not None and value > limit:
            found.append(Alarm(name, metric, value, limit))

    def below(name: str, metric: str, value: float | None, limit: float) -> None:
        if value is not None and value < limit:
            found.append(Alarm(name, metric, value, limit))

    first, now = _first_and_now(records, "policy/entropy", limits.window)
    below("entropy_collapse", "policy/entropy", now, limits.entropy_frac * first)
    for metric in ("policy/kl", "policy/ref_kl"):
        above("kl_spike", metric, last.get(metric), limits.kl_nats)
    first, now = _first_and_now(records, "episode/tokens", limits.window)
    above("length_drift", "episode/tokens", now, limits.length_ratio * first)
    below("length_drift", "episode/tokens", now, first / limits.length_ratio)
    above("logp_gap", "policy/engine_gap_max", last.get("policy/engine_gap_max"), limits.gap_nats)
    equal = _known(records, "batch/equal_groups_frac")[-limits.window :]
    if len(equal) == limits.window:
        above("equal_groups", "batch/equal_groups_frac", sum(equal) / len(equal), limits.equal_groups_frac)
    above("env_errors", "episode/env_error_frac", last.get("episode/env_error_frac"), limits.env_error_frac)
    success_first, success_now = _first_and_now(records, "episode/success", limits.window)
    first, now = _first_and_now(records, "episode/unsupported", limits.window)
    if success_now is not None and success_now > success_first:
        above("fabrication", "episode/unsupported", now, first + limits.unsupported_rise)
    return found


def _known(records: Sequence[Record], metric: str) -> list[float]:
    return [value for record in records if (value := record.get(metric)) is not None]


def _first_and_now(records: Sequence[Record], metric: str, window: int) -> tuple[float, float | None]:
    """Both means; "now" is None while the two would overlap."""
    known = _known(records, metric)
    first = known[:window]
    if len(known) < 2 * window:
        return sum(first) / max(1, len(first)), None
    return sum(first) / window, sum(known[-window:]) / window
