"""Are retrieved tokens to be masked? Search-R1's ablation (2503.09516): the loss on what the policy wrote alone, or on
the observations as well.

Run:    python -m launch.sweep --sweep=configs/sweeps/masking.py --workdir=runs/masking
Cost:   2 to 6 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 steps
        of RL an arm, the second with one more forward pass a step.
"""


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            "observations masked": {"config": "configs/quickstart.py"},
            "observations trained": {"config": "configs/quickstart.py", "rl.train_on_world": True},
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
