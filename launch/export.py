"""Write a run's policy as a Hugging Face folder: `python -m launch.export --workdir=D --out=F [--newest]`.

Adapters are merged. The folder is read back and compared, number by number, before it gets its name; `transformers`
loads it (AutoModelForCausalLM, AutoTokenizer).
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from launch import cli
from launch.plan import make_plan, on_one_device

if TYPE_CHECKING:  # importing them starts jax, which flags precede
    from transformers import PreTrainedTokenizerFast

    from models.config import ModelConfig


def export(workdir: Path, out: Path, *, best: bool = True) -> int:
    """Exports the best checkpoint of a run (the newest, if not `best`); returns how many parameters were written.

    Errors: ConfigError for a policy that no Hugging Face family computes, or whose token ids `transformers` would take
    for others, before a weight is read; RuntimeError when what is read back differs.
    """
    import jax

    from launch import build, policy, runs
    from models import hf, lora
    from models.tokenizer import load_tokenizer

    with cli.validating():
        plan = on_one_device(make_plan(cli.resolve(None, str(workdir))))
        codec = policy.load_codec(workdir)
        model = policy.build_model(plan, codec.vocab_size, workdir / "tokenizer")
        tokenizer = load_tokenizer(workdir / "tokenizer")
        check_tokenizer(tokenizer, model)
    with cli.validating():  # what a checkpoint holds, and that it is whole
        params = runs.load_params(workdir / "ckpt", build.build_sft_learner(plan, model), best=best)
    params = lora.merge(params)
    kept = _kept(workdir / "tokenizer") if plan.model_path else {}
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f"{out.name}-") as own:
        temporary = Path(own) / out.name
        hf.save(params, model, temporary, tokenizer=tokenizer, end_ids=codec.end_ids, **kept)
        _check_equal(temporary, params, model, codec.end_ids)
        temporary.rename(out)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _kept(folder: Path) -> dict[str, Any]:
    """What a run's copy of their model's description says beside the computation and the ids."""

    def read(name: str) -> dict[str, Any]:
        file = folder / name
        return json.loads(file.read_text()) if file.is_file() else {}

    return {
        "longest": read("config.json").get("max_position_embeddings"),
        "generation": read("generation_config.json"),
    }


def _check_equal(folder: Path, params: Any, model: "ModelConfig", end_ids: Sequence[int]) -> None:
    """That the folder reads back to these. Errors: RuntimeError says what differs."""
    import jax
    import numpy as np

    from launch import policy
    from models import hf

    again, read = hf.load(folder)
    if hf.describe(read) != hf.describe(model):
        raise RuntimeError(f"{folder.name}: the config reads back as {read}, want {model}; nothing was exported")
    differ = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, same in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.array_equal, params, again))
        if not same
    ]
    if differ:
        raise RuntimeError(f"{folder.name}: {differ[:5]} read back differently; nothing was exported")
    if policy.checked_codec(folder).end_ids != end_ids:
        raise RuntimeError(f"{folder.name}: the end ids read back differently; nothing was exported")


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast", model: "ModelConfig") -> None:
    """That AutoTokenizer gives the run's own ids beside such a model's config.json: it lets model_type choose a class,
    and some classes cut text in a way of their own. Errors: ValueError, also for a model of no family.
    """
    from transformers import AutoTokenizer

    from models import hf

    described = hf.describe(model)
    with tempfile.TemporaryDirectory(prefix="wayfinder-") as folder:
        tokenizer.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps(described))
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours, read = _what_decides_ids(tokenizer), _what_decides_ids(theirs)
    differ = [name for name, part in ours.items() if part != read[name]]
    if differ:
        raise ValueError(
            f"tokenizer: beside model_type {described['model_type']!r} transformers reads it as {type(theirs).__name__}"
            f", which has another {', '.join(differ)} and gives other ids; keep this policy as an Orbax checkpoint, or "
            "train one with the tokenizer of that family, or without attention_bias"
        )


def _what_decides_ids(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """A tokenizer's parts without what says nothing of ids: offsets into the text, and which tokens decoding skips."""

    def bare(part: Any) -> Any:
        if isinstance(part, list):
            return [bare(item) for item in part]
        if not isinstance(part, dict):
            return part
        return {k: bare(v) for k, v in part.items() if k not in ("trim_offsets", "special") and v not in (None, "")}

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: bare(spec[name]) for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}


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
