"""Search by DAPO (2503.14476): clip-higher, token mean, dynamic sampling, overlong shaping, no KL.

Groups whose outcomes are all equal give their place to the next ticket. An episode that samples nearly all the tokens
it may is fined, within what max_shaping lets shaping reach (the paper's fine may reach the outcome's own weight).

Run:    python -m launch.quickstart --config=configs/search_dapo.py --workdir=runs/search_dapo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .71 ± .01, greedy .82 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_dapo"
    c.rl.recipe = "dapo"
    # By the outcome: the fine on length may differ where all succeed or none does.
    c.curriculum.admit_low = 0.5 / c.rl.group_size
    c.curriculum.admit_high = 1 - 0.5 / c.rl.group_size
    c.reward.terms.soft_overlong = 0.2
    c.reward.options.soft_overlong = {
        "max_tokens": 6 * c.rollout.max_turn_tokens,
        "cache_tokens": c.rollout.max_turn_tokens,
    }
    return c
