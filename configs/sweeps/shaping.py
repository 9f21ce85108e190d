"""Paying for searches, and charging for turns, within `reward.max_shaping` of the outcome and past it: when does it
become the goal?

Run:    python -m launch.sweep --sweep=configs/sweeps/shaping.py --workdir=runs/shaping
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 steps
        of RL an arm.
"""


def _arm(term, weight, **options):
    return {
        "config": "configs/quickstart.py",
        f"reward.terms.{term}": weight,
        f"reward.options.{term}": options,
        "reward.max_shaping": 10.0,
    }


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            **{f"search bonus {weight}": _arm("search_bonus", weight, at_most=4) for weight in (0.0, 0.3, 1.0, 3.0)},
            **{f"turn cost {weight}": _arm("step_cost", weight, turns=4) for weight in (0.3, 1.0, 3.0)},
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
