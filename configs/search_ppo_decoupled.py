"""Search by decoupled PPO (AReaL, 2505.24298): clipped around the policy of just before the update, weighted to the one
that sampled; a token of weight over 5 is rejected. Returns whitened over the batch, no critic.

Rollout is synchronous, so that both are one policy but for rounding, and this is PPO without a critic. On stored
episodes (`launch.train --replay=...`) they differ, and the weight is what corrects for it.

Run:    python -m launch.quickstart --config=configs/search_ppo_decoupled.py --workdir=runs/search_ppo_decoupled/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has, and a forward pass more a step.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .68 ± .05, greedy .80 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_ppo_decoupled"
    c.rl.recipe = "ppo_decoupled"
    return c
