"""Search by RLOO (2402.14740): each episode against the mean of the others of its group.

REINFORCE over whole episodes: the sum over an episode, no clip that matters with one update a batch.

Run:    python -m launch.quickstart --config=configs/search_rloo.py --workdir=runs/search_rloo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: not measured yet.
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_rloo"
    c.rl.recipe = "rloo"
    c.rl.loss_tokens = 6 * c.rollout.max_turn_tokens
    return c
