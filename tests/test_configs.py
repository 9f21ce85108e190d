"""Law: every experiment in configs/ builds and makes a plan (which reads every leaf of it), and its world takes its
options.
"""

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from configs import qa_file, search_flaky
from configs.arg import ConfigError
from configs.defaults import defaults
from envs import WORLDS, make_world
from launch import sweep
from launch.plan import make_plan

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if "def get_config(" in p.read_text())


def leaves(tree: dict, prefix: str = "") -> set[str]:
    return {
        leaf
        for name, value in tree.items()
        for leaf in (leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}"})
    }


def test_there_are_configs():
    assert {"quickstart", "search_flaky", "qa_file"} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_builds_and_makes_a_plan(name):
    module = importlib.import_module(f"configs.{name}")
    assert f"configs/{name}.py" in module.__doc__, "the docstring says the command"
    config = module.get_config()
    plan = make_plan(config)
    assert plan.name == name
    assert make_plan(config.to_dict()) == plan
    assert make_plan(json.loads(json.dumps(config.to_dict()))) == plan, "a resumed run reads its config from JSON"
    free = ("world.options.", "reward.terms.", "reward.reach.", "reward.options.")
    known = leaves(defaults().to_dict())
    new = {leaf for leaf in leaves(config.to_dict()) if not leaf.startswith(free)} - known
    assert not new, "a key that defaults() lacks"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_variants_that_its_docstring_names_are_plans(name):
    module = importlib.import_module(f"configs.{name}")
    found = re.findall(rf"configs/{name}\.py:([a-z]+=[^ \n`,)']+)", module.__doc__)
    for arg in found:
        if "file=" not in arg and "builder=" not in arg:
            make_plan(module.get_config(arg))
    assert (name, found) != ("swe_rl", [])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_world_takes_its_options(name):
    plan = make_plan(importlib.import_module(f"configs.{name}").get_config())
    module, _, function = WORLDS[plan.world].partition(":")
    known = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert plan.world_options.keys() <= known.keys()


SWEEPS = sorted(p for p in (ROOT / "configs" / "sweeps").glob("*.py") if p.stem != "__init__")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_arm_of_a_sweep_makes_a_plan_and_starts_from_its_warm_start(path):
    module = importlib.import_module(f"configs.sweeps.{path.stem}")
    assert f"configs/sweeps/{path.name}" in module.__doc__, "the docstring says the command"
    loaded = sweep.load_sweep(path)
    warm = make_plan(sweep.load_config(loaded["warm"], {}, 0))
    plans = {arm: make_plan(sweep.arm_config(loaded, arm, 0)) for arm in loaded["arms"]}
    steps = [step for own in loaded["arms"].values() for step in sweep.steps_of(own)]
    measures = [make_plan(sweep.load_config(file, {}, 0)) for file in loaded["measure"].values()]
    of_texts = () if "texts" in loaded else ("tokenizer_path", "vocab_size", "world")
    for plan in [*(make_plan(sweep.step_config(loaded, step, 0)) for step in steps), *measures]:
        same = ("model", "model_path", *of_texts)
        assert [getattr(plan, name) for name in same] == [getattr(warm, name) for name in same]
    assert {plan.world for plan in plans.values()} == {plan.world for plan in measures}
    stages = {arm: [step.get("stage") for step in sweep.steps_of(own)] for arm, own in loaded["arms"].items()}
    assert len({(repr(stages[arm]), repr(dataclasses.replace(plans[arm], name=""))) for arm in plans}) == len(plans)
    assert not any("," in arm for arm in plans), "--arms is a list"


def test_every_option_of_the_questions_is_a_leaf():
    """--config.world.options.X=... sets existing leaves only."""
    known = inspect.signature(importlib.import_module("envs.qa").make_world).parameters
    assert set(qa_file.get_config().world.options) == set(known)


def test_a_builder_with_one_split_trains_by_config_alone():
    arg = "builder=b,data_dir=d,train_split=train[:80%],validation_split=train[80%:90%],test_split=train[90%:]"
    options = make_plan(qa_file.get_config(arg + ",question_key=q,answers_key=a,tag=none,reward=m:f")).world_options
    assert options["splits"] == {"train": "train[:80%]", "validation": "train[80%:90%]", "test": "train[90%:]"}
    assert [options[name] for name in ("builder", "data_dir", "question_key", "answers_key", "tag", "reward")] == [
        *("b", "d", "q", "a"),
        None,
        "m:f",
    ]
    with pytest.raises(ConfigError, match="tag: got 'xml', want answer or none"):
        qa_file.get_config("tag=xml")


def test_a_file_is_dealt_by_the_shares_of_the_config(tmp_path):
    rows = [{"prompt": f"{i} + 1 = ?", "answers": [str(i + 1)]} for i in range(40)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = qa_file.get_config(f"file={tmp_path / 'q.jsonl'},train_share=0.5,validation_share=0.5,test_share=0")
    config.world.options.instruction = "Answer, in tags."
    world = make_world("qa", **make_plan(config).world_options)
    dealt = {split: world.tasks(split) for split in qa_file.SPLITS}
    assert sum(map(len, dealt.values())) == 40 and len(dealt["test"]) == 0 and len(dealt["train"]) > 10
    assert [message.content for message in dealt["train"][0].prompt][0] == "Answer, in tags."


def test_the_rate_of_the_flaky_engine():
    assert make_plan(search_flaky.get_config("rate=0.5")).world_options["flaky_rate"] == 0.5
