"""Every recipe over the search world, from one warm start, at equal steps: the rows of the README.

Run:    python -m launch.sweep --sweep=configs/sweeps/recipes.py --workdir=runs/recipes
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, then 20 steps of 128 episodes an arm.
"""

NAMES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "ppo",
    "ppo_decoupled",
    "gigpo",
)


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {name: {"config": f"configs/search_{name}.py"} for name in NAMES},
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
