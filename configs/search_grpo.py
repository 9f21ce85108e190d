"""Search by GRPO with its KL to the reference (DeepSeekMath, 2402.03300).

The quickstart leaves the KL away; the paper has β = .04, by k3 in the loss.

Run:    python -m launch.quickstart --config=configs/search_grpo.py --workdir=runs/search_grpo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .70 ± .01, greedy .79 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_grpo"
    c.rl.kl_coef = 0.04
    return c
