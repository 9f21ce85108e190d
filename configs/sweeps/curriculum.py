"""Which tasks first? One to three hops mixed; the samplers of rl/task_samplers.py beside uniform epochs.

Run:    python -m launch.sweep --sweep=configs/sweeps/curriculum.py --workdir=runs/curriculum
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 steps
        of RL an arm.
"""


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            name: {"config": "configs/quickstart.py", "curriculum.name": name, "curriculum.steps": 20}
            for name in ("uniform", "easy_to_hard", "success_band", "learnability", "adarft", "plr")
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
