"""Your own questions: a JSONL or parquet file of (prompt, answers), or a TFDS builder, with a reward of your own.

Run:    python -m launch.train --config=configs/qa_file.py:file=questions.jsonl --reward=my_rewards:score \\
            --workdir=runs/mine
        python -m launch.train --config=configs/qa_file.py:builder=my_set,data_dir=data,question_key=question \\
            --config.world.options.splits.train='train[:80%]' \\
            --config.world.options.splits.validation='train[80%:]' --workdir=runs/mine
Single turn: the policy answers in `<answer>…</answer>` (`tag=none`: its whole text is the answer). `--reward` names a
function (answer text, answers) -> float in [0, 1]; without it, exact match. Without `--init` the policy starts from
scratch, with a tokenizer trained on the prompts. A file is dealt to the splits by their `*_share`; of a builder each
split is what its `*_split` says. Each name of the argument (`train_split=train[:80%]`) is an option of the world too
(--config.world.options.splits.train), where text may have commas: an instruction, say.
"""

from configs.arg import ConfigError, parse_arg
from configs.defaults import defaults

SPLITS = ("train", "validation", "test")


def get_config(arg: str = ""):
    given = parse_arg(
        arg,
        file="",
        builder="",
        data_dir="data",
        train_split="train",
        validation_split="validation",
        test_split="test",
        train_share=0.8,
        validation_share=0.1,
        test_share=0.1,
        question_key="prompt",
        answers_key="answers",
        instruction="",
        tag="answer",
        reward="",
    )
    if given.tag not in ("answer", "none"):
        raise ConfigError(f"config argument tag: got {given.tag!r}, want answer or none")
    c = defaults()
    c.name = "qa_file"
    c.world.name = "qa"
    # Every option of envs/qa.py's make_world is a leaf, so that --config.world.options.X=... sets it too.
    for option in ("file", "builder", "data_dir", "question_key", "answers_key", "instruction"):
        c.world.options[option] = given[option]
    c.world.options.splits = {split: given[f"{split}_split"] for split in SPLITS}
    c.world.options.shares = {split: given[f"{split}_share"] for split in SPLITS}
    c.world.options.tag = None if given.tag == "none" else given.tag
    c.world.options.reward = given.reward  # module:function, or --reward
    c.eval.n = 32
    c.eval.final_n = 32
    return c
