"""What does RL add to the demonstrations? Beside three times as long on demonstrations alone, on clean tasks and where
a fifth of the calls is a fork that no demonstration has: an error, a time-out, an empty result, a misleading title.

Recovery is `success_after_fork` of a measure's facts: the success of the episodes that met a fork.

Run:    python -m launch.sweep --sweep=configs/sweeps/thesis.py --workdir=runs/thesis
Cost:   5 minutes an arm on one busy CPU core, 17 for demonstrations alone; a warm start a seed of its own, then 36
        steps of RL an arm.
"""

CLEAN, FORKS = "configs/search_flaky.py:rate=0", "configs/search_flaky.py"


def get_sweep():
    return {
        "warm": CLEAN,
        "measure": {"clean": CLEAN, "a fifth are forks": FORKS},
        "arms": {
            "RL": {"config": CLEAN},
            "RL where a fifth are forks": {"config": FORKS},
            "demonstrations alone longer": {"config": CLEAN, "stage": "sft", "sft.steps": 2000},
            "rejection sampling": {"config": CLEAN, "stage": "rft"},
        },
        "shared": {"eval.every": 0},
    }
