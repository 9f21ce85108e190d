"""Search by Dr. GRPO (2503.20783): no division by the length of an episode, nor by the spread of its group.

An episode's sum is divided by the most tokens that one may have, the same for all.

Run:    python -m launch.quickstart --config=configs/search_dr_grpo.py --workdir=runs/search_dr_grpo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .70 ± .02, greedy .79 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_dr_grpo"
    c.rl.recipe = "dr_grpo"
    # The tokens that a policy samples in an episode at most; what the world says is not the policy's.
    c.rl.loss_tokens = 6 * c.rollout.max_turn_tokens
    return c
