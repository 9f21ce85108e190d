"""Search with an outcome reward model beside the outcome: P(success) by a model that learnt it from stored episodes.

The warm start plays training tasks; a copy of it learns to say at the end of an episode whether it succeeded; then it
stands frozen beside the outcome, and tells failures that looked right from those that did not.

Run:    python -m launch.sft --config=configs/search_orm.py --workdir=runs/search_orm/sft
        python -m launch.evaluate --workdir=runs/search_orm/sft --split=train --n=512 --samples=8
        python -m launch.train_rm --config=configs/search_orm.py --workdir=runs/search_orm/rm \
            --init=runs/search_orm/sft --episodes=runs/search_orm/sft/episodes_train
        python -m launch.train --config=configs/search_orm.py --workdir=runs/search_orm/rl --init=runs/search_orm/sft
        (A run of launch.train or launch.rft has episodes too: --episodes=THAT_RUN. The model alone as the outcome, as
        in WebRL: --config.reward.leader=orm --config.reward.terms.success=0 --config.reward.terms.orm=1
        --config.reward.options.orm.threshold=0.5)
Cost:   of a sweep, on one busy core: 3 minutes for episodes and reward model, 3 for 20 steps of RL.
Expect: held-out AUC of the reward model .98, accuracy .95 (a constant: .88), of 1,280 episodes by a warm start of 400
        steps, 200 steps of its own (one run, 28 held-out tasks, commit 64d16a2; LOG.md). RL with it, after 20 steps:
        held-out sampled success .31 ± .03 → .70 ± .02, the outcome alone .72 ± .02 (3 seeds; configs/sweeps/orm.py).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "search_orm"
    c.rm.kind = "orm"
    c.reward.terms.orm = 0.3  # the most that max_shaping lets it
    # WebRL (2411.02337) takes 1 where P >= 0.5; with a threshold of 0 it is P itself
    c.reward.options.orm = {"path": "runs/search_orm/rm", "threshold": 0.0}
    return c
