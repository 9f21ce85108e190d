"""Search through an engine with forks: a seeded share of calls answers with an error, a time-out, nothing, or pages
under each other's titles.

A fork is an *observation* that the policy reads and must learn to live with, never an ENV_ERROR. No demonstration has
one in it (`demos.without`), those that chance brings included. Watch `episode/success_after_fork`, the success of the
episodes that met one, and `episode/recovery_frac`: searches that found something right after a fork, per fork.

Run:    python -m launch.quickstart --config=configs/search_flaky.py:rate=0.2 --workdir=runs/search_flaky/seed0
        (rate=0 is the same without forks: what configs/sweeps/thesis.py begins from.)
Cost:   8 minutes on two CPU cores.
Expect: held-out sampled success where a fifth are forks .26 → .63, of episodes that met one .14 → .35; RL without forks
        .62 and .21 (3 seeds, 256 tasks; configs/sweeps/thesis.py, whose table is in the README).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    given = parse_arg(arg, rate=0.2)
    c = quickstart.get_config()
    c.name = "search_flaky"
    c.world.options.flaky_rate = given.rate
    c.world.options.flaky_kinds = ["error", "timeout", "empty", "misleading"]
    c.demos.without = ("forks",)
    return c
