"""Search, adapted to test questions without their answers (TTRL, 2504.16084), from the quickstart's warm start.

The paper's shape, halved: 32 votes of which the first 16 are trained on (64 and 32), 8 questions a step, KL .001 by k3,
clip .2, cosine with a warm-up; its rate of 5e-7 is of models thousands of times this one. 40 steps are 5 rounds of the
64 questions. World, policy, warm start: configs/quickstart.py.

Run:    python -m launch.sft --config=configs/quickstart.py --workdir=runs/quickstart/sft
        python -m launch.ttrl --config=configs/ttrl_search.py --workdir=runs/ttrl_search --init=runs/quickstart/sft
        python -m launch.ttrl --config=configs/ttrl_search.py --workdir=runs/ttrl_search_each --per_query \\
            --init=runs/quickstart/sft
Cost:   4 to 5 minutes for 20 steps on one busy core; with --per_query 15 s a query.
Expect: not from this warm start: the majority is wrong in two of three, and that is learnt (20 of its 40 steps: adapted
        sampled .26 → .24, greedy .63 → .30; 3 seeds, configs/sweeps/ttrl.py). After RL on other tasks: .72 → .77,
        maj@16 before .80. One query at a time, from there: avg@16 .65 → .58 (8 queries, 1 seed; LOG.md).
"""

from configs import quickstart
from configs.arg import parse_arg


def get_config(arg: str = ""):
    parse_arg(arg)
    c = quickstart.get_config()
    c.name = "ttrl_search"
    by_majority(c)
    return c


def by_majority(c) -> None:
    """TTRL's settings over the world and policy of `c`."""
    c.reward.terms = {"majority": 1.0}
    c.reward.leader = "majority"
    c.reward.options.majority = {"train_first": 16}
    c.rl.group_size = 32
    c.rl.groups_per_batch = 8
    c.batch.rows = 256
    c.rl.kl_coef = 0.001
    c.rl.steps = 40
    c.rl.learning_rate = 5e-4
    c.rl.schedule = "cosine"
    c.rl.warmup_steps = 2
    # The last checkpoint is the result: an evaluation in between would choose by the labels.
    c.eval.every = 0
    c.eval.n = 64
