"""Search by GSPO-token (2507.18071, eq. 13): the sequence's ratio, and an advantage of each turn's own.

The advantages are GiGPO's: of the episode in its group, and of a turn among those taken in the same state.

Run:    python -m launch.quickstart --config=configs/search_gspo_token.py --workdir=runs/search_gspo_token/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .70 ± .00, greedy .79 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_gspo_token"
    c.rl.recipe = "gspo_token"
    c.credit.discount = 0.95
    return c
