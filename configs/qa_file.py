"""Your own questions: a JSONL or parquet file of (prompt, answers), or a TFDS builder, with a reward of your own.

Run:    python -m launch.train --config=configs/qa_file.py:file=questions.jsonl --reward=my_rewards:score \\
            --workdir=runs/mine
Single turn: the policy answers in `<answer>…</answer>`. `--reward` names a function (answer text, answers) -> float in
[0, 1]; without it, exact match. Without `--init` the policy starts from scratch, with a tokenizer trained on the
prompts.
"""

from configs.arg import parse_arg
from configs.defaults import defaults


def get_config(arg: str = ""):
    given = parse_arg(arg, file="", builder="", question_key="prompt", answers_key="answers")
    c = defaults()
    c.name = "qa_file"
    c.world.name = "qa"
    for option in ("file", "builder", "question_key", "answers_key"):
        if given[option]:
            c.world.options[option] = given[option]
    c.world.options.reward = ""  # module:function, or --reward
    c.eval.n = 32
    c.eval.final_n = 32
    return c
