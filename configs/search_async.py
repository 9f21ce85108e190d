"""Search, asynchronously: sampling runs up to four batches ahead of learning, and decoupled PPO corrects for it (AReaL,
2505.24298), with GRPO's advantages of the group.

Weights are swapped between two rounds of the engine, in the middle of episodes; each token remembers the version that
sampled it. The ratio is clipped around the policy of just before the update and weighted to the one that sampled; a
token of weight over 5 is rejected. `policy/staleness` says how old what is trained on is, `time/rollout_s` how long the
learner waited for it, `time/engine_idle_s` how long the engine had nothing to do.

Run:    python -m launch.quickstart --config=configs/search_async.py:eta=4 --workdir=runs/search_async/seed0
Cost:   about that of configs/quickstart.py, whose world, policy and warm start it has: this world answers at once, so
        that there is little to overlap. What slow worlds gain: python -m launch.bench async.
Expect: after 20 of its 36 steps held-out sampled success .31 ± .03 → .71 ± .04 with eta=4, .72 and .70 with 1 and 8;
        synchronous .71 ± .02, naive PPO .66 with eta=4 (3 seeds, 256 tasks; configs/sweeps/staleness.py).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    given = parse_arg(arg, eta=4)
    c = quickstart.get_config()
    c.name = "search_async"
    c.rl.recipe = "ppo_decoupled"
    c.credit.name = "group"
    c.rl.max_staleness = given.eta
    return c
