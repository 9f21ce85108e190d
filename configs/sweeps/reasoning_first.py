"""Does reasoning RL first help agentic RL? R1-style arithmetic, then search, beside search alone, at equal steps of RL.

The warm start has learnt arithmetic from demonstrations. Both arms are then taught to search by the same ones, just
before RL on search: no tiny policy searches without. One tokenizer is made of both worlds' texts.

Run:    python -m launch.sweep --sweep=configs/sweeps/reasoning_first.py --workdir=runs/reasoning_first
Cost:   12 minutes an arm on one busy CPU core; a warm start a seed of its own, then 1,100 steps of demonstrations and
        36 of RL an arm.
"""

ARITH, SEARCH = "configs/r1_arith.py", "configs/quickstart.py"


def get_sweep():
    taught = {"config": SEARCH, "stage": "teach"}
    return {
        "warm": ARITH,
        "texts": (SEARCH, ARITH),
        "measure": {"": SEARCH},
        "arms": {
            "reasoning then search": {
                "first": [{"config": ARITH, "rl.steps": 18}, taught],
                "config": SEARCH,
                "rl.steps": 18,
            },
            "search": {"first": [taught], "config": SEARCH, "rl.steps": 36},
        },
        "shared": {"eval.every": 0},
    }
