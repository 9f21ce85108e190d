"""Search by PPO (1707.06347) with a value head: GAE over the policy's own tokens, observations skipped.

γ = λ = 1: an advantage is the reward less the value, whitened. The head starts at zero: with λ < 1 early tokens would
be given less than late ones before it knows anything (rl/critic.py).

Run:    python -m launch.quickstart --config=configs/search_ppo.py --workdir=runs/search_ppo/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has.
Expect: after 20 of its 36 steps held-out sampled success .29 ± .05 → .65 ± .07, greedy .79 (3 seeds, 256
        tasks; configs/sweeps/recipes.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_ppo"
    c.rl.recipe = "ppo"
    c.rl.reduce = "token"
    return c
