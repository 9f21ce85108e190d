"""Search over World Factbook, GeoNames and the elements, GRPO from an imperfect warm start, on two CPU cores.

Run:    make train
        (python -m launch.quickstart --config=configs/quickstart.py --workdir=runs/quickstart/seed0)
Cost:   7 to 8 minutes on two CPU cores (warm start 3.8, GRPO 2.8).
Expect: held-out sampled success .30 ± .06 → .76 ± .04 (3 seeds, 256 tasks, commit f697e2d); warm start alone for the
        same minutes .36 ± .05. See README.md, "Results", and LOG.md.
"""

from configs.arg import parse_arg
from configs.defaults import defaults


def get_config(arg: str = ""):
    parse_arg(arg)  # it takes none: a word there is an error
    c = defaults()
    c.name = "quickstart"
    # Copying must emerge first: shifted keys and the mimetic initialisation bring it early (no Hugging Face family has
    # them: models/hf.py refuses to export this policy).
    c.model.key_shift = True
    c.model.init = "mimetic"
    # Training tasks are asked under invented names: there is nothing to remember, so the policy learns to read.
    c.world.options.renamed_frac = 0.9
    c.sft.steps = 1100
    c.rl.steps = 36
    c.rl.schedule = "linear"  # at a constant rate the policy ends up copying worse than it began
    c.eval.every = 12
    return c
