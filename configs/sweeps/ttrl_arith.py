"""Does TTRL reach what voting gives, on sums, days and units? As configs/sweeps/ttrl.py, in one turn.

Run:    python -m launch.sweep --sweep=configs/sweeps/ttrl_arith.py --workdir=runs/ttrl_arith
Cost:   1 to 2 minutes an arm on one CPU core; a warm start a seed, then 40 steps of 256 episodes an arm.
"""


def get_sweep():
    adapt = {"config": "configs/ttrl_arith.py", "stage": "ttrl"}
    return {
        "warm": "configs/r1_arith.py",
        "arms": {"TTRL": adapt, "TTRL after RL": adapt | {"first": [{"config": "configs/r1_arith.py"}]}},
        "shared": {"eval.every": 0},
    }
