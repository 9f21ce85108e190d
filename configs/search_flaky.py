"""Search through an engine that fails: a seeded share of calls answers with an error, a time-out or nothing.

A failure is an *observation* that the policy reads and must learn to live with, never an ENV_ERROR. Watch
`episode/recovery_frac`: searches that found something right after one that did not, per failed call.

Run:    python -m launch.quickstart --config=configs/search_flaky.py:rate=0.2 --workdir=runs/search_flaky/seed0
Cost:   8 minutes on two CPU cores.
Expect: held-out sampled success .19 → .64; of the calls that failed or found nothing .04 → .69 followed by a search
        that found something (1 seed, 256 tasks, commit 8645895). See LOG.md.
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    given = parse_arg(arg, rate=0.2)
    c = quickstart.get_config()
    c.name = "search_flaky"
    c.world.options.flaky_rate = given.rate
    return c
