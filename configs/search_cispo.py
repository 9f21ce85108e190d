"""Search by CISPO (MiniMax-M1, 2506.13585): importance weights are clipped, no token's gradient is.

Run:    python -m launch.quickstart --config=configs/search_cispo.py --workdir=runs/search_cispo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .69 ± .01, greedy .79 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_cispo"
    c.rl.recipe = "cispo"
    c.rl.clip_high = 0.28  # DAPO's: the paper gives no number
    return c
