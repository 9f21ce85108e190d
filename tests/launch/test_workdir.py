"""A run's folder is opened by code that knows more keys than the run did."""

import json

from configs.defaults import defaults
from launch.plan import make_plan
from launch.workdir import check_workdir, config_of, open_workdir


def test_a_run_of_before_a_key_was_there_has_its_default(tmp_path):
    config = defaults()
    config.reward.terms = {"exact_match": 1.0}
    config.reward.leader = "exact_match"
    with open_workdir(tmp_path / "run", config):
        pass
    file = tmp_path / "run" / "config.json"
    stored = json.loads(file.read_text())
    del stored["credit"], stored["rl"]["kl_kind"], stored["reward"]["options"]
    file.write_text(json.dumps(stored))
    old = config_of(tmp_path / "run")
    assert old["credit"] == dict(defaults().credit) and old["rl"]["kl_kind"] == defaults().rl.kl_kind
    assert old["reward"]["terms"] == {"exact_match": 1.0}, "what an experiment names is not added to"
    assert make_plan(old) == make_plan(config)
    assert check_workdir(tmp_path / "run", config), "and it is resumed by the same config"
