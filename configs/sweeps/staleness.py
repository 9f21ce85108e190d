"""Does running ahead cost success, and does the decoupled objective pay for it? configs/search_async.py at equal steps,
by how many batches sampling may run ahead (η), with decoupled PPO and with the plain clipped objective, whose ratio is
to the policy that sampled (naive PPO; AReaL, 2505.24298, table 2). Advantages are the group's in both: the objective
alone differs. At η = 0 both are one (tests/rl/test_losses.py), so that "synchronous" is an arm of either.

Run:    python -m launch.sweep --sweep=configs/sweeps/staleness.py --workdir=runs/staleness
Cost:   2 to 4 minutes an arm on one busy CPU core; a warm start a seed, shared with the other sweeps, then 20 steps
        of 128 episodes an arm.
"""

NAIVE = {"rl.recipe": "grpo", "rl.reduce": "token"}  # what ppo_decoupled is without its proximal policy and weight


def _arm(eta, **changes):
    return {"config": f"configs/search_async.py:eta={eta}", **changes}


def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            "synchronous": _arm(0),
            **{f"eta {eta}": _arm(eta) for eta in (1, 4, 8)},
            **{f"naive PPO eta {eta}": _arm(eta, **NAIVE) for eta in (1, 4, 8)},
        },
        "shared": {"rl.steps": 20, "eval.every": 0},
    }
