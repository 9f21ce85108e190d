"""Search by a policy that has never gone on from what it found: taught questions of one hop alone, then asked two.

It can search, read and copy; it never succeeds here, because it answers after its first search, so no group teaches it
anything. A hint names the page of the second hop: with it one search is enough. Hints go, and it has to find the page.

Run:    python -m launch.sft --config=configs/search_cold.py:hops=1 --workdir=runs/search_cold/sft
        python -m launch.train --config=configs/search_cold.py --workdir=runs/search_cold/rl --init=runs/search_cold/sft
        (Without hints: --config.hints.prob=0.)
Cost:   about that of configs/quickstart.py, whose policy and steps it has.
Expect: no run yet; see configs/sweeps/hints.py. Of the world (300 training tasks): after one search for what the
        question names, the answer is shown in 6 %, and a value at random of what is shown is right in .8 %; after one
        for the hinted page it is shown in all. No demonstration of one hop searches twice (0 of 400).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    given = parse_arg(arg, hops=2)
    c = quickstart.get_config()
    c.name = "search_cold"
    c.world.options.mix = {f"hop{given.hops}": 1.0}
    c.world.options.sizes = {"train": 8_000, "validation": 300, "test": 600}
    c.hints.prob = 1.0
    c.hints.steps = 24  # of 36: the last third is without
    return c
