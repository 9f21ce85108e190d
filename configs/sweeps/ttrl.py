"""Does TTRL reach what voting gives? Success of one sample after it, beside the majority of 16 samples before.

Both are of the same 64 test tasks, which are adapted to without their answers; "held out" are others.

Run:    python -m launch.sweep --sweep=configs/sweeps/ttrl.py --workdir=runs/ttrl
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 steps
        of 256 episodes an arm.
"""


def get_sweep():
    adapt = {"config": "configs/ttrl_search.py", "stage": "ttrl", "rl.steps": 20}
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            "TTRL": adapt,
            # What is adapted to is less than what it can do: after RL on other tasks, which have answers.
            "TTRL after RL": adapt | {"first": [{"config": "configs/quickstart.py", "rl.steps": 20}]},
        },
        "shared": {"eval.every": 0},
    }
