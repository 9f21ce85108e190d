"""How many episodes of one task? 128 a step in all arms.

Run:    python -m launch.sweep --sweep=configs/sweeps/group_size.py --workdir=runs/group_size
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 steps
        of RL an arm.
"""


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            f"groups of {size}": {
                "config": "configs/quickstart.py",
                "rl.group_size": size,
                "rl.groups_per_batch": 128 // size,
            }
            for size in (2, 4, 8, 16)
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
