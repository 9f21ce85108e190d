"""Do hints help a policy that hardly ever succeeds? Taught two hops with a hint alone and asked them without; every
training prompt has a hint at first, and none has one later.

Run:    python -m launch.sweep --sweep=configs/sweeps/hints.py --workdir=runs/hints
Cost:   5 to 17 minutes an arm on one busy CPU core; a warm start a seed of its own, then 36 steps of RL an arm.
"""

ASKED = "configs/search_cold.py"


def get_sweep():
    return {
        "warm": "configs/search_cold.py:taught=true",
        "measure": {"": ASKED},
        "arms": {"no hints": {"config": ASKED, "hints.prob": 0.0}, "hints": {"config": ASKED}},
        "shared": {"eval.every": 0},
    }
