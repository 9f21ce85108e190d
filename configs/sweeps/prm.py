"""Does a process reward model beside the outcome help? It is taught once a seed, by roll-ins from the warm start's own
episodes, and each turn is credited with what is still to come.

Run:    python -m launch.sweep --sweep=configs/sweeps/prm.py --workdir=runs/prm
Cost:   8 to 12 minutes on one busy CPU core; a warm start a seed, shared with the other sweeps, 1,280 episodes,
        roll-ins and 300 steps for the reward model, then 20 steps of RL an arm.
"""


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "rm": "configs/search_prm.py",
        "arms": {
            "outcome": {"config": "configs/quickstart.py"},
            "outcome and PRM": {"config": "configs/search_prm.py"},
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
