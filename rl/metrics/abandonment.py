"""What giving episodes up early did, and what it may have cost. Host only; of a batch in which a rule spoke.

An episode of which a rule says that it is to end (rl/rollout/abandon.py) has `facts["abandonment"]`: `rule`, `turns`
played by then, `audited`; of an audited one, which was played on, `s` and `tokens`, what the world took and the policy
sampled after that.

| name | over | meaning |
|---|---|---|
| `abandon/frac` | scored episodes | a rule would end it |
| `abandon/{rule}_frac` | those | by this rule |
| `abandon/audited_frac` | those | played to its end all the same |
| `abandon/turns` | those | turns played by then |
| `abandon/success` | audited | success: the bias, for each that was not audited would have succeeded as often |
| `abandon/saved_s`, `abandon/saved_tokens` | audited | what ending it would have saved: seconds of its world, tokens |
| `abandon/kept_success` | scored episodes of which no rule spoke | success |
| `abandon/excluded_frac` | scored episodes | left out of its group's comparison |
| `abandon/dropped_groups_frac` | groups | refused, and members were left out of its comparison |

Success is of the episodes of which it is known: a world without labels says it of none that ended by itself.

Called a failure, an episode that would have succeeded is taught against: `frac` x (1 - `audited_frac`) x `success` of
all are. Left out, a group's mean is that of the others: too high by the share left out x (`kept_success` - `success`).
"""

from collections.abc import Sequence

from rl.rewards.compose import reward
from rl.rewards.outcome import is_unlabelled, success
from rl.types import Mean, Status, Trajectory

FACT = "abandonment"


def abandonment_means(groups: Sequence[tuple[Sequence[Trajectory], bool]]) -> dict[str, Mean]:
    """The table at the top of this file, of groups (members, whether it was dropped); {} where no rule has spoken."""
    scored = [t for members, _ in groups for t in members if t.status.scored]
    ended = [t for t in scored if FACT in t.facts]
    if not ended:
        return {}
    found = [t.facts[FACT] for t in ended]
    audited = [t for t in ended if t.facts[FACT]["audited"]]
    kept = [t for t in scored if FACT not in t.facts]
    known, kept_known = ([t for t in those if not is_unlabelled(t)] for those in (audited, kept))
    rules = [own["rule"] for own in found]
    without = [any(map(_is_excluded, members)) for members, _ in groups]

    def after(name: str) -> Mean:
        return Mean(float(sum(t.facts[FACT][name] for t in audited)), len(audited))

    return {
        "abandon/frac": Mean(len(ended), len(scored)),
        **{f"abandon/{rule}_frac": Mean(rules.count(rule), len(ended)) for rule in sorted(set(rules))},
        "abandon/audited_frac": Mean(len(audited), len(ended)),
        "abandon/turns": Mean(sum(own["turns"] for own in found), len(ended)),
        "abandon/success": Mean(sum(map(success, known)), len(known)),
        "abandon/saved_s": after("s"),
        "abandon/saved_tokens": after("tokens"),
        "abandon/kept_success": Mean(sum(map(success, kept_known)), len(kept_known)),
        "abandon/excluded_frac": Mean(sum(map(_is_excluded, scored)), len(scored)),
        "abandon/dropped_groups_frac": Mean(
            sum(own and dropped for own, (_, dropped) in zip(without, groups, strict=True)), len(groups)
        ),
    }


def _is_excluded(trajectory: Trajectory) -> bool:
    """Scored by how it ended, and judged by nobody."""
    return trajectory.status is Status.ABANDONED and reward(trajectory) != reward(trajectory)
