"""Search with a process reward model: each turn gets what it adds to the chance of success, or takes from it.

Its labels are Math-Shepherd's (2312.08935): from the state after each turn of a stored episode the policy goes on a few
times, and the share that succeeds is the label. As a reward it is frozen, and its turns are credited by themselves.

Run:    python -m launch.sft --config=configs/search_prm.py --workdir=runs/search_prm/sft
        python -m launch.evaluate --workdir=runs/search_prm/sft --split=train --n=256 --samples=4
        python -m launch.train_rm --config=configs/search_prm.py --workdir=runs/search_prm/rm \
            --init=runs/search_prm/sft --episodes=runs/search_prm/sft/episodes_train
        python -m launch.train --config=configs/search_prm.py --workdir=runs/search_prm/rl --init=runs/search_prm/sft
Cost:   of a sweep, on one busy core: 5 minutes for episodes, roll-ins and reward model, 3 for 20 steps of RL.
Expect: held-out AUC of the reward model .86, accuracy .76 (a constant: .63; 521 turns of 59 tasks, one seed). RL with
        it, after 20 steps: held-out sampled success .70 ± .03, the outcome alone .72 ± .02 (3
        seeds; configs/sweeps/prm.py).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_prm"
    c.rm.kind = "prm"
    c.rm.roll_ins = 4
    c.credit.name = "process"
    c.reward.terms.prm = 0.3  # the most that max_shaping lets it
    # "last": an episode scores P after its last turn; "min": the least P of all turns, as Math-Shepherd scores
    c.reward.options.prm = {"path": "runs/search_prm/rm", "how": "min"}
    return c
