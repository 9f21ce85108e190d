"""What does RL add to the demonstrations? At equal minutes, on clean tasks and where a fifth of the calls fails.

Run:    python -m launch.sweep --sweep=configs/sweeps/thesis.py --workdir=runs/thesis
Cost:   not measured alone yet; a warm start a seed, shared with the other sweeps, then 20 steps of RL an arm.
"""


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "measure": {"clean": "configs/quickstart.py", "a fifth fails": "configs/search_flaky.py"},
        "arms": {
            "RL": {"config": "configs/quickstart.py"},
            "RL where a fifth fails": {"config": "configs/search_flaky.py"},
            "demonstrations alone longer": {"config": "configs/quickstart.py", "stage": "sft", "sft.steps": 2000},
            "rejection sampling": {"config": "configs/quickstart.py", "stage": "rft"},
        },
        "shared": {"eval.every": 0},
    }
