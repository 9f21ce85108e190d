"""Law: a run that starts from somebody else's model has its shape, weights, tokenizer and end ids, and afterwards needs
nothing but its own folder; what it exports is what it trained.
"""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from absl import flags
from transformers import AutoConfig, AutoTokenizer

from configs.defaults import defaults
from envs import make_world
from launch import build, evaluate, export, policy, quickstart, runs, sft, train
from launch.cli import ConfigError
from launch.plan import COMPUTE, make_plan
from launch.workdir import open_workdir
from models import gguf, hf, lora
from models.config import ModelConfig
from models.sampling import Sampling
from models.tokenizer import load_tokenizer, train_tokenizer
from rl.episodes import read_episodes
from rl.rewards.compose import RewardTerm
from tests.models import test_gguf
from tests.models.weights import drawn, same

THEIRS = ModelConfig(
    vocab_size=416, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, rope_theta=5e5, rms_eps=1e-5
)


def options(data):
    return {"data_dir": str(data), "sizes": {"train": 40, "validation": 8, "test": 8}, "max_turns": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """data/: a few tasks; theirs/: a model folder whose generation_config has a second end id."""
    root = tmp_path_factory.mktemp("policy")
    tokenizer = train_tokenizer(make_world("search", **options(root / "data")).texts(), 400, root / "tokenizer")
    ends = [tokenizer.eos_token_id, 7]
    params = drawn(THEIRS, 3)
    said = {"longest": 4321, "generation": {"temperature": 0.7, "eos_token_id": 3}}
    hf.save(params, THEIRS, root / "theirs", tokenizer=tokenizer, end_ids=ends, shard_bytes=40_000, **said)
    return root


def config_of(root, **changes):
    """The smallest batches of a run that starts from theirs/; `changes` are leaves by dotted name, "/" for "."."""
    c = defaults()
    c.name, c.model.path = "theirs", str(root / "theirs")
    c.world.options = options(root / "data")
    c.lora.rank = 2
    c.batch.length, c.batch.rows, c.batch.micro_rows = 256, 4, 2
    c.sft.length, c.sft.micro_rows, c.sft.steps, c.sft.rows, c.demos.n = 256, 2, 1, 2, 20
    c.engine.lanes, c.engine.residents, c.engine.capacity, c.engine.contexts = 4, 4, 256, (256,)
    c.rollout.threads, c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 4, 6, 256
    c.rl.steps, c.rl.groups_per_batch, c.rl.group_size, c.rl.save_every = 2, 2, 2, 0
    c.eval.n, c.eval.final_n, c.eval.every = 4, 4, 0
    for name, value in changes.items():
        section, _, leaf = name.partition("/")
        c[section][leaf] = value
    return c


def launch_main(stage, *args: str) -> None:
    """`python -m launch.STAGE ARGS`, in this process."""
    before = set(flags.FLAGS)
    stage.define_flags()
    try:
        flags.FLAGS([stage.__name__, *args])
        stage.main([])
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)


def test_shape_weights_tokenizer_and_ends_are_theirs(root, tmp_path):
    plan = make_plan(config_of(root, **{"model/dtype": "bfloat16", "lora/rank": 0}))
    codec = policy.build_codec(plan, None, tmp_path / "tokenizer")
    assert codec.vocab_size == 400 and codec.end_ids[1:] == (7,)
    model = policy.build_model(plan, codec.vocab_size, tmp_path / "tokenizer")
    assert model == dataclasses.replace(THEIRS, dtype="bfloat16", n_ids=400)  # 16 rows of their table are padding
    assert not list(tmp_path.glob("**/*.safetensors"))
    start = policy.fresh_start(plan, model, jax.random.key(0))
    assert same(start, hf.load(root / "theirs")[0])
    described, same_model = policy.describe(plan)
    assert same_model == model and described.end_ids == codec.end_ids


def test_without_a_path_the_start_is_the_key():
    key = jax.random.key(0)
    assert policy.fresh_start(make_plan(defaults()), THEIRS, key) is key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model/d_model": 64}, "model.d_model=64, but model.path=.*theirs has 32; leave model.d_model out"),
        ({"model/key_shift": True}, "model.key_shift=True, but .* has False"),
        ({"model/path": "/nowhere"}, "/nowhere: no such file"),
        ({"model/path": "package:no_such_model"}, "no such package is installed"),
        ({"lora/rank": 20}, "lora.rank: got 20, want at most 16"),
    ],
)
def test_what_contradicts_the_model_is_refused(root, changes, message):
    with pytest.raises((ValueError, OSError), match=message):
        policy.check_model(make_plan(config_of(root, **changes)))


def test_a_value_that_is_theirs_or_the_default_s_is_no_contradiction(root):
    plan = make_plan(
        config_of(root, **{"model/d_model": 32, "model/rope_theta": 5e5, "model/d_ff": defaults().model.d_ff})
    )
    policy.check_model(plan)
    assert plan.model.keys() - COMPUTE == {"d_model", "rope_theta"}  # and d_ff is as if it were not there


def test_a_second_tokenizer_is_refused(root):
    with pytest.raises(ConfigError, match="the tokenizer comes from there; leave tokenizer.path out"):
        make_plan(config_of(root, **{"tokenizer/path": "somewhere"}))


def test_of_a_tokenizer_s_folder_the_weights_and_the_shape_stay_there(root, tmp_path):
    """The folder of a whole model: its end ids are those of its tokenizer, its shape is not that of this policy."""
    plan = make_plan(config_of(root, **{"model/path": "", "tokenizer/path": str(root / "theirs")}))
    codec = policy.build_codec(plan, None, tmp_path / "tokenizer")
    assert codec.vocab_size == 400 and codec.end_ids[1:] == (7,)
    copied = {file.name for file in (tmp_path / "tokenizer").iterdir()}
    assert {"tokenizer.json", "generation_config.json"} <= copied <= {file.name for file in (root / "theirs").iterdir()}
    assert not any(name.endswith(".safetensors") or name == "config.json" for name in copied)


def test_a_folder_without_tokenizer_and_a_table_too_small_are_refused(root, tmp_path):
    shutil.copytree(root / "theirs", tmp_path / "m")
    plan = make_plan(config_of(root, **{"model/path": str(tmp_path / "m")}))
    (tmp_path / "m" / "tokenizer.json").rename(tmp_path / "away.json")
    with pytest.raises(FileNotFoundError, match="m/tokenizer.json: no such file"):
        policy.check_model(plan)
    shutil.rmtree(tmp_path / "m")
    small = dataclasses.replace(THEIRS, vocab_size=380)
    hf.save(drawn(small), small, tmp_path / "m")
    for file in (root / "tokenizer").iterdir():
        shutil.copyfile(file, tmp_path / "m" / file.name)
    with pytest.raises(ValueError, match="its tokenizer has 400 ids and its table 380 rows"):
        policy.check_model(plan)


def test_errors_name_the_path_that_was_given(root, tmp_path):
    folder = tmp_path / "m"
    plan = make_plan(config_of(root, **{"model/path": str(folder)}))
    shutil.copytree(root / "theirs", folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=f"^{folder}: codec: .*want a fast tokenizer with a chat template: .*jinja"):
        policy.check_model(plan)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match=f"^{folder}: codec: the chat template refuses"):
        policy.check_model(plan)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=f"^{folder}/tokenizer_config.json: unreadable"):
        policy.check_model(plan)
    test_gguf.written(tmp_path / "m.gguf", changes={"tokenizer.chat_template": None})
    with pytest.raises(ValueError, match=f"^{tmp_path}/m.gguf: codec: .*want a fast tokenizer with a chat template"):
        policy.describe(make_plan(config_of(root, **{"model/path": str(tmp_path / "m.gguf")})))


@pytest.fixture(scope="module")
def warm(root):
    """A warm start of one step that moves nothing."""
    config = config_of(root, **{"sft/learning_rate": 1e-12, "lora/rank": 0})
    with open_workdir(root / "warm", config) as workdir:
        sft.run(make_plan(config), workdir)
    return root / "warm"


def test_the_warm_start_begins_with_their_weights(root, warm):
    learner = build.build_rl_learner(make_plan(config_of(root, **{"lora/rank": 0})), THEIRS)
    for ours, theirs in zip(
        jax.tree.leaves(runs.load_params(warm / "ckpt", learner)),
        jax.tree.leaves(hf.load(root / "theirs")[0]),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_run_needs_only_its_folder_and_exports_what_it_trained(root, tmp_path, monkeypatch):
    # It never succeeds, and equal rewards would teach it nothing.
    term = RewardTerm("outcome", 1.0, "episode", lambda t: float(t.rows[-1].tokens.sum() % 5))
    monkeypatch.setattr(build, "build_terms", lambda plan, *given: [term])
    shutil.copytree(root / "theirs", tmp_path / "theirs")
    config = config_of(root, **{"model/path": str(tmp_path / "theirs")})
    plan, theirs = make_plan(config), hf.load(root / "theirs")[0]
    with open_workdir(tmp_path / "rl", config) as workdir:
        train.run(plan, workdir, None, stop_at_step=1)
    learner = build.build_rl_learner(plan, THEIRS)
    assert same(lora.base(runs.load_params(tmp_path / "rl" / "init", learner)), theirs)

    shutil.rmtree(tmp_path / "theirs")
    shutil.rmtree(tmp_path / "rl" / "init")  # without a reference nothing is read but the checkpoint
    launch_main(train, f"--workdir={tmp_path / 'rl'}")
    both = {"sampled": Sampling(), "greedy": Sampling(greedy=True)}
    for samplings in (both, {"greedy": both["greedy"]}):  # the second in place of both of the first
        summary = evaluate.of_run(plan, tmp_path / "rl", split="test", n=4, samplings=samplings, best=False)
        assert summary["greedy"]["n"] == 4
        assert len(list(read_episodes(tmp_path / "rl", folder="episodes_test"))) == 4 * len(samplings)

    n = export.export(tmp_path / "rl", tmp_path / "out", best=False)
    trained = runs.load_params(tmp_path / "rl" / "ckpt", learner, best=False)
    assert lora.adapted(trained) and n == sum(x.size for x in jax.tree.leaves(theirs))
    params, model = hf.load(tmp_path / "out")
    assert model == THEIRS and same(params, lora.merge(trained)) and not same(params, theirs)
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "llama"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)) == 400
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert tuple(said["eos_token_id"]) == policy.load_codec(tmp_path / "rl").end_ids and said["temperature"] == 0.7
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 4321
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


def test_what_started_from_it_goes_on_without_the_model_s_folder(root, warm, tmp_path, monkeypatch):
    """A warm start, and the quickstart behind it, whose RL starts from that."""
    config = json.loads((warm / "config.json").read_text())
    config["model"]["path"] = str(tmp_path / "gone")
    shutil.copytree(warm, tmp_path / "sft")
    (tmp_path / "sft" / "config.json").write_text(json.dumps(config))
    before = (tmp_path / "sft" / "metrics.jsonl").read_text()
    launch_main(sft, f"--workdir={tmp_path / 'sft'}")
    assert (tmp_path / "sft" / "metrics.jsonl").read_text() == before

    (tmp_path / "c.py").write_text(
        f"from ml_collections import ConfigDict\ndef get_config(arg=''):\n    return ConfigDict({config!r})\n"
    )
    ran = []
    monkeypatch.setattr(quickstart, "run", lambda *args, control: ran.append(control))
    monkeypatch.setattr(quickstart, "table", lambda result: "")
    command = f"--config={tmp_path / 'c.py'}", f"--workdir={tmp_path}"
    launch_main(quickstart, *command)
    with pytest.raises(ConfigError, match="gone: no such file"):  # the control begins anew, with their weights
        launch_main(quickstart, *command, "--control")
    assert ran == [False]


def test_what_reads_back_differently_is_not_exported(warm, tmp_path, monkeypatch):
    load = hf.load

    def altered(folder):
        params, model = load(folder)
        return {**params, "embed": params["embed"].at[5, 5].add(1e-3)}, model

    monkeypatch.setattr(hf, "load", altered)
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "theirs").write_text("a user's own")
    with pytest.raises(RuntimeError, match=r"out: \['embed'\] read back differently"):
        export.export(warm, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.tmp"]
    assert (tmp_path / "out.tmp" / "theirs").read_text() == "a user's own"


def test_a_policy_of_no_family_is_not_exported(root, tmp_path):
    config = config_of(root, **{"model/path": "", "model/key_shift": True})
    with open_workdir(tmp_path / "run", config) as workdir:
        shutil.copytree(root / "tokenizer", workdir / "tokenizer")
    with pytest.raises(ConfigError, match="no Hugging Face family has key_shift=True"):
        export.export(tmp_path / "run", tmp_path / "out")


def test_a_tokenizer_that_transformers_would_read_otherwise_is_not_exported(root, tmp_path):
    """Of Qwen2 it makes Qwen2Tokenizer, whatever tokenizer.json says; the other families' it leaves alone."""
    ours = load_tokenizer(root / "tokenizer")
    qwen2 = dataclasses.replace(THEIRS, attention_bias=True)
    for model in (THEIRS, dataclasses.replace(THEIRS, qk_norm=True)):
        export.check_tokenizer(ours, model)
    with pytest.raises(ValueError, match="'qwen2' transformers reads it as Qwen2Tokenizer, which has another norm"):
        export.check_tokenizer(ours, qwen2)
    test_gguf.written(tmp_path / "m.gguf", "qwen2")
    export.check_tokenizer(gguf.load(tmp_path / "m.gguf")[2], qwen2)  # it cuts text as that class does

    config = config_of(root, **{"model/path": "", "model/attention_bias": True, "model/qk_norm": False})
    with open_workdir(tmp_path / "run", config) as workdir:
        shutil.copytree(root / "tokenizer", workdir / "tokenizer")
    with pytest.raises(ConfigError, match="gives other ids; keep this policy"):
        export.export(tmp_path / "run", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
