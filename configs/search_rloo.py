"""Search by RLOO (2402.14740): each episode against the mean of the others of its group.

REINFORCE over whole episodes: the sum over an episode, no clip that matters with one update a batch.

Run:    python -m launch.quickstart --config=configs/search_rloo.py --workdir=runs/search_rloo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .69 ± .02, greedy .79 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
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
