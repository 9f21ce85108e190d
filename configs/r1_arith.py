"""DeepSeek-R1 style, small: one turn, `<think>` then `<answer>`, rewarded for accuracy and form, on two CPU cores.

Run:    python -m launch.quickstart --config=configs/r1_arith.py --workdir=runs/r1_arith/seed0
Cost:   not measured alone yet (250 steps of warm start and 30 of GRPO, on a machine that other programs kept busy).
Expect: one run, not finished: held-out success after the warm start sampled .27, greedy .60 (256 tasks), all of it days
        and units: 250 steps are too few for sums (.01). Of 2,000 test tasks 406 questions are different.
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
    c.sft.steps = 250
    c.sft.length = 384
    c.batch.length = 384
    c.batch.logp_chunk = 384
    c.rl.steps = 30
    c.rl.schedule = "linear"
    # R1-Zero adds accuracy and format with equal weights; here the form may weigh as much as max_shaping lets it.
    c.reward.terms.format = 0.2
    c.eval.every = 15
    return c
