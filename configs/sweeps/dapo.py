"""What DAPO's parts do: without dynamic sampling, and without the higher upper clip.

Run:    python -m launch.sweep --sweep=configs/sweeps/dapo.py --workdir=runs/dapo
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 batches
        of RL an arm.
"""

# With one update a batch the ratio is 1 and no clip ever acts. So many updates are of 20 batches, too.
FOUR = {"rl.minibatches": 4, "rl.steps": 80, "rl.save_every": 20}


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            "dapo": {"config": "configs/search_dapo.py"},
            "dapo with every group": {
                "config": "configs/search_dapo.py",
                "curriculum.admit_low": 0.0,
                "curriculum.admit_high": 1.0,
            },
            "dapo by four updates a batch": {"config": "configs/search_dapo.py", **FOUR},
            "the same with a symmetric clip": {"config": "configs/search_dapo.py", "rl.clip_high": 0.2, **FOUR},
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
