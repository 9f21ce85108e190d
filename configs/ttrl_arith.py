"""Sums, days and units in one turn, adapted to test questions without their answers (TTRL, 2504.16084).

As configs/ttrl_search.py, over the world and policy of configs/r1_arith.py; the reward has no term on the form: it is
the majority's answer alone.

Run:    python -m launch.sft --config=configs/r1_arith.py --workdir=runs/r1_arith/sft
        python -m launch.ttrl --config=configs/ttrl_arith.py --workdir=runs/ttrl_arith --init=runs/r1_arith/sft
        python -m launch.ttrl --config=configs/ttrl_arith.py --workdir=runs/ttrl_arith_each --per_query \\
            --init=runs/r1_arith/sft
Cost:   not measured yet.
Expect: not measured yet.
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
