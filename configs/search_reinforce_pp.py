"""Search by REINFORCE++ (2501.03262): returns whitened over the batch, no groups and no critic.

The KL to the reference (k2) is in the loss.

Run:    python -m launch.quickstart --config=configs/search_reinforce_pp.py --workdir=runs/search_reinforce_pp/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .68 ± .03, greedy .80 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_reinforce_pp"
    c.rl.recipe = "reinforce_pp"
    c.rl.kl_coef = 0.001
    return c
