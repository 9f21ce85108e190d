"""SWE-RL as published (2502.18449): one turn, whole files in the prompt, likeness to the merged patch as the reward.

Run:    python -m launch.train --config=configs/swe_rl_similarity.py --workdir=runs/swe_rl_similarity
        python -m launch.train --config=configs/swe_rl_similarity.py:model=qwen2.5-coder-7b --workdir=runs/similarity
Cost:   not measured yet.
Expect: not measured yet. The paper, 70 billion weights: SWE-bench Verified 41.0 (supervised alone 36.2). The world
        runs the tests, too: success, beside the similarity that is learnt from, says how often a likeness works.
"""

from configs import swe_rl
from configs.arg import ConfigError, parse_arg


def get_config(arg: str = ""):
    given = parse_arg(arg, model="smollm2")
    if given.model not in swe_rl.MODELS or given.model == "tiny":
        raise ConfigError(f"model: got {given.model!r}, want smollm2 or qwen2.5-coder-7b: it reads whole files")
    c = swe_rl.get_config(f"model={given.model}")
    c.name = "swe_rl_similarity"
    c.world.options.protocol = "patch"
    c.world.options.show = "files" if given.model != "smollm2" else "function"
    c.world.options.instruction = ""
    c.world.options.families = ["one", "several", "regression"]  # what cannot be repaired has no patch
    c.world.options.max_turns = 1
    c.rollout.max_turn_tokens = 1024 if given.model != "smollm2" else 400
    c.rl.recipe = "grpo"
    c.rl.filter_overlong = False
    c.reward.terms = {"similarity": 1.0}
    c.reward.leader = "similarity"
    return c
