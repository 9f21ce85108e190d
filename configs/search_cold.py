"""Search by a policy that goes on from what it found only where a hint tells it to: then it is asked without.

It is taught questions of one hop as they are, and questions of two with a hint, which names the page of the second hop.
Asked two hops without a hint it hardly ever succeeds (.02 in training). Hints in training prompts bring it to the
second page; they go, and it has to see that page's name in what it found.

Run:    python -m launch.sft --config=configs/search_cold.py:taught=true --workdir=runs/search_cold/sft
        python -m launch.train --config=configs/search_cold.py --workdir=runs/search_cold/rl --init=runs/search_cold/sft
        (Without hints: --config.hints.prob=0.)
Cost:   about that of configs/quickstart.py, whose policy and steps it has.
Expect: held-out sampled success .02 -> .61, without hints .62 (3 seeds, configs/sweeps/hints.py): rare
        successes are enough. A policy taught one hop alone does not know what a hint is for: with hints and without
        .004 before and after (LOG.md).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    given = parse_arg(arg, taught=False)
    c = quickstart.get_config()
    c.name = "search_cold"
    c.world.options.mix = {"hop1": 0.5, "hop2": 0.5} if given.taught else {"hop2": 1.0}
    c.world.options.sizes = {"train": 8_000, "validation": 300, "test": 600}
    c.demos.hinted = given.taught
    c.hints.prob = 1.0
    c.hints.steps = 24  # of 36: the last third is without
    return c
