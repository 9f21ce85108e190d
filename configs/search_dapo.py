"""Search by DAPO (2503.14476): clip-higher, token mean, dynamic sampling, overlong shaping, no KL.

Groups whose rewards are all equal give their place to the next ticket. An episode near its token limit is fined
in tokens, within what max_shaping lets shaping reach (the paper's fine may reach the outcome's own weight).

Run:    python -m launch.quickstart --config=configs/search_dapo.py --workdir=runs/search_dapo/seed0
Cost:   as configs/quickstart.py, whose world, policy and warm start it has.
Expect: README.md, "Recipes and credit".
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_dapo"
    c.rl.recipe = "dapo"
    c.rl.clip_high = 0.28
    c.rl.drop_equal_groups = True
    c.reward.terms.soft_overlong = 0.2
    c.reward.options.soft_overlong = {
        "max_tokens": 6 * c.rollout.max_turn_tokens,
        "cache_tokens": c.rollout.max_turn_tokens,
    }
    return c
