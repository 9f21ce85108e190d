"""Search by GiGPO (2505.10978): the episode in its group, and each turn among those taken in the same state.

Run:    python -m launch.quickstart --config=configs/search_gigpo.py --workdir=runs/search_gigpo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .70 ± .00, greedy .79 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_gigpo"
    c.rl.recipe = "gigpo"
    c.credit.discount = 0.95
    return c
