"""Write a run's policy as a Hugging Face folder: `python -m launch.export --workdir=D --out=F [--newest]`.

Adapters are merged. The folder is read back and compared, number by number, before it gets its name; `transformers`
loads it (AutoModelForCausalLM, AutoTokenizer).
"""

import shutil
from pathlib import Path

from absl import flags

from launch import cli
from launch.plan import make_plan, on_one_device


def export(workdir: Path, out: Path, *, best: bool = True) -> int:
    """Exports the best checkpoint of a run (the newest, if not `best`); returns how many parameters were written.

    Errors: ValueError for a policy that no Hugging Face family computes, before a weight is read; RuntimeError when
    what is read back differs.
    """
    import jax
    import numpy as np

    from launch import build, policy, runs
    from models import hf, lora
    from models.tokenizer import load_tokenizer

    with cli.validating():
        plan = on_one_device(make_plan(cli.resolve(None, str(workdir))))
        codec = policy.load_codec(workdir)
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        hf.family(model)
    with cli.validating():  # what a checkpoint holds, and that it is whole
        params = runs.load_params(workdir / "ckpt", build.build_rl_learner(plan, model), best=best)
    params = lora.merge(params)
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    hf.save(params, model, temporary, tokenizer=load_tokenizer(workdir / "tokenizer"), end_ids=codec.end_ids)

    again, read = hf.load(temporary)
    if hf.describe(read) != hf.describe(model):
        raise RuntimeError(f"{temporary}: the config reads back as {read}, want {model}; nothing was exported")
    differ = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, same in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.array_equal, params, again))
        if not same
    ]
    if differ:
        raise RuntimeError(f"{temporary}: {differ[:5]} read back differently; nothing was exported")
    if policy.checked_codec(temporary).end_ids != codec.end_ids:
        raise RuntimeError(f"{temporary}: the end ids read back differently; nothing was exported")
    temporary.rename(out)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def main(_) -> None:
    with cli.validating():
        workdir = cli.want_workdir(flags.FLAGS.workdir)
        if not flags.FLAGS.out:
            raise cli.ConfigError("--out: got nothing, want the folder to write, e.g. --out=exported/mine")
        out = Path(flags.FLAGS.out)
        if out.exists() or not out.absolute().parent.is_dir():
            raise cli.ConfigError(f"--out: got {out}, want a new folder in one that exists")
    n = export(Path(workdir), out, best=not flags.FLAGS.newest)
    print(f"{out}: {n} parameters, read back equal")


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_workdir()
    flags.DEFINE_string("out", None, "Folder to write: config.json, *.safetensors, tokenizer, generation_config.json")
    flags.DEFINE_bool("newest", False, "The newest checkpoint instead of the best")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
