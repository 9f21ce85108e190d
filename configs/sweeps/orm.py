"""Does an outcome reward model beside the outcome help? It is taught once a seed, by the warm start's own episodes.

Run:    python -m launch.sweep --sweep=configs/sweeps/orm.py --workdir=runs/orm
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, 1,280 episodes
        and 300 steps for the reward model, then 20 steps of RL an arm.
"""


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "rm": "configs/search_orm.py",
        "arms": {
            "outcome": {"config": "configs/quickstart.py"},
            "outcome and ORM": {"config": "configs/search_orm.py"},
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
