"""Sums, days and units in one turn, adapted to test questions without their answers (TTRL, 2504.16084).

As configs/ttrl_search.py, over the world and policy of configs/r1_arith.py; the reward has no term on the form: it is
the majority's answer alone.

Run:    python -m launch.quickstart --config=configs/r1_arith.py --workdir=runs/r1_arith/seed0
        python -m launch.ttrl --config=configs/ttrl_arith.py --workdir=runs/ttrl_arith --init=runs/r1_arith/seed0/sft
        python -m launch.ttrl --config=configs/ttrl_arith.py --workdir=runs/ttrl_arith_each --per_query \\
            --init=runs/r1_arith/seed0/sft
Cost:   under a minute on one CPU core; with --per_query 2 s a query to adapt, .1 s to answer.
Expect: from the warm start (3 seeds) avg@16 of the 64 tasks adapted to .41 → .60, where maj@16 was .59, of others
        .44 → .60; but greedy .80 → .63: an answer is agreed on, not found. From after RL (--init=.../rl) .86 → .84,
        maj@16 before .91 (configs/sweeps/ttrl_arith.py). One query at a time (8
        queries, 1 seed): avg@16 .52 → .55, maj@16 .75 → .63.
"""

from configs import r1_arith
from configs.arg import parse_arg
from configs.ttrl_search import by_majority


def get_config(arg: str = ""):
    parse_arg(arg)
    c = r1_arith.get_config()
    c.name = "ttrl_arith"
    by_majority(c)
    return c
