"""Search by CISPO (MiniMax-M1, 2506.13585): importance weights are clipped, no token's gradient is.

Run:    python -m launch.quickstart --config=configs/search_cispo.py --workdir=runs/search_cispo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: not measured yet.
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
