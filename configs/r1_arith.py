"""DeepSeek-R1 style, small: one turn, `<think>` then `<answer>`, rewarded for accuracy and form, on two CPU cores.

Run:    python -m launch.quickstart --config=configs/r1_arith.py --workdir=runs/r1_arith/seed0
Cost:   3 to 4 minutes on one CPU core (warm start 2.7, RL .5).
Expect: held-out sampled success .40 ± .04 → .84 ± .06, greedy .81 → .89 (3 seeds, 256 tasks, commit cfcf0f9): days and
        units .93 to .97, sums of one digit .84, of three .32. Before the warm start is whole sums are .01: copying and
        ordering the columns come first, the table of one-digit sums last, and RL does not bring a table that is not
        there. Of 2,000 test tasks 406 questions are different.
"""

from configs.arg import parse_arg
from configs.defaults import defaults


def get_config(arg: str = ""):
    parse_arg(arg)
    c = defaults()
    c.name = "r1_arith"
    c.world.name = "arith"
    c.world.options.levels = {"sum": [1, 2, 3], "date": [1], "unit": [1]}
    c.tokenizer.vocab_size = 360  # bytes, tags, the few words, and each digit alone
    c.model.key_shift = True
    c.model.init = "mimetic"

    c.rollout.max_turn_tokens = 72
    c.rollout.max_episode_tokens = 112
    c.engine.lanes = 64
    c.engine.residents = 64
    c.engine.capacity = 112
    c.engine.contexts = (112,)
    c.engine.prefill_rows = 16
    c.engine.prefill_chunk = 32

    c.demos.n = 12_000
    c.sft.steps = 900  # copying comes first, then the table of sums, of some 400 entries
    c.sft.length = 384
    c.batch.length = 384
    c.batch.logp_chunk = 384
    c.rl.steps = 30
    c.rl.schedule = "linear"
    # R1-Zero adds accuracy and format with equal weights; here the form may weigh as much as max_shaping lets it.
    c.reward.terms.format = 0.2
    c.eval.every = 15
    return c
