"""Paying for searches, within `reward.max_shaping` of the outcome and past it: when does it become the goal?

Run:    python -m launch.sweep --sweep=configs/sweeps/shaping.py --workdir=runs/shaping
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 steps
        of RL an arm.
"""


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            f"search bonus {weight}": {
                "config": "configs/quickstart.py",
                "reward.terms.search_bonus": weight,
                "reward.options.search_bonus": {"at_most": 4},
                "reward.max_shaping": 10.0,
            }
            for weight in (0.0, 0.3, 1.0, 3.0)
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
