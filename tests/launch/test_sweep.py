"""A sweep: every arm of every seed once, from the seed's one warm start; what is finished is not run again."""

import json

import pytest

from launch import report, sweep
from launch.cli import ConfigError

TWO = """
def get_sweep():
    return {
        "warm": "configs/quickstart.py",
        "arms": {
            "small": {"config": "configs/search_grpo.py", "rl.group_size": 4},
            "paid": {"config": "configs/quickstart.py", "reward.terms.search_bonus": 0.1},
        },
        "shared": {"rl.steps": 3},
    }
"""


@pytest.fixture
def two(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    return sweep.load_sweep(tmp_path / "two.py")


def test_an_arm_is_its_config_with_what_the_sweep_sets(two):
    small, paid = (sweep.arm_config(two, arm, 7) for arm in ("small", "paid"))
    assert (small.rl.group_size, small.rl.kl_coef, small.rl.steps, small.seed) == (4, 0.04, 3, 7)
    assert dict(paid.reward.terms) == {"success": 1.0, "search_bonus": 0.1} and paid.rl.steps == 3
    assert two["arms"]["small"] == {"config": "configs/search_grpo.py", "rl.group_size": 4}, "the sweep is as it was"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(): return {}", "got no get_sweep, want a function of that name"),
        ("def get_sweep(): return {'warm': 'w', 'arm': {}}", "got \\['arm'\\], want of warm, arms"),
        ("def get_sweep(): return {'warm': 'w', 'arms': {}}", "at least one of 'arms'"),
        (
            "def get_sweep(): return {'warm': 'w', 'arms': {'a': {'stage': 'r'}}}",
            "got stage 'r', want of train, sft, teach, rft, ttrl",
        ),
        (
            "def get_sweep(): return {'warm': 'w', 'arms': {'a': {'first': [{'stage': 'ttrl'}]}}}",
            "got ttrl before another step, want it last",
        ),
    ],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        sweep.load_sweep(tmp_path / "bad.py")
    with pytest.raises(ConfigError, match="no key 'rl.stepz'"):
        sweep.load_config("configs/quickstart.py", {"rl.stepz": 3}, 0)


def test_each_arm_runs_once_from_the_warm_start_of_its_seed(two, tmp_path, monkeypatch):
    ran = []

    def run_arm(_, arm, seed, workdir, warm, given):
        assert given == {"set": {}, "models": {}}
        ran.append((arm, seed, warm.name))
        digest = sweep._digest(sweep.arm_config(two, arm, seed))
        stage = {"": {"n_tasks": 4, "sampled": 0.5 + seed / 10, "greedy": 0.75, "searches": 1.5, "facts": {}}}
        own = {"arm": arm, "seed": seed, "config": digest, "commit": "abc", "minutes": 1.5}
        workdir.mkdir(parents=True)
        return own | {"episodes": 12, "turns": 20, "after": stage}

    def warm_start(_, seed, root, given):
        (root / f"w{seed}").mkdir(parents=True, exist_ok=True)
        return root / f"w{seed}"

    monkeypatch.setattr(sweep, "run_arm", run_arm)
    monkeypatch.setattr(sweep, "warm_start", warm_start)
    first = {"": {"n_tasks": 4, "sampled": 0.25, "greedy": 0.5, "searches": None, "facts": {}}}
    monkeypatch.setattr(sweep, "measured", lambda *_: first)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    for _ in range(2):
        sweep.run(two, "two", tmp_path / "runs", tmp_path / "warm", [0, 1])
    assert ran == [("small", 0, "w0"), ("paid", 0, "w0"), ("small", 1, "w1"), ("paid", 1, "w1")]
    sweep.run(two | {"arms": {"again": two["arms"]["paid"]}}, "more", tmp_path / "more", tmp_path / "warm", [1])
    assert len(ran) == 4  # an arm of another sweep that is the same is the same run
    (again,) = report.read(tmp_path / "results" / "sweep_more.jsonl")
    lines = report.read(tmp_path / "results" / "sweep_two.jsonl")
    assert again == lines[3] | {"arm": "again"}
    (tmp_path / "results" / "sweep_more.jsonl").unlink()
    assert [(line["arm"], line["seed"]) for line in lines] == [("small", 0), ("paid", 0), ("small", 1), ("paid", 1)]
    text = report.all_tables(tmp_path / "results")
    assert "### two" in text
    assert "| *warm start* | 0.250 ± 0.000 (0.250, 0.250) | 0.500 ± 0.000 |  |  |  |" in text
    assert "| small | 0.550 ± 0.071 (0.500, 0.600) | 0.750 ± 0.000 | 1.50 | 12 | 1.5 |" in text

    assert "| paid (seed 1) | 0.600 (0.600)" in report.sweep_table(
        [line for line in lines if line["arm"] != "paid" or line["seed"]]
    )

    recovers = [  # a column more where every line says how the episodes with a fork ended
        {
            **line,
            **{when: {"": line[when][""] | {"facts": {"success_after_fork": 0.25}}} for when in ("before", "after")},
        }
        for line in lines
    ]
    assert "(each) | after a fork | greedy" in report.sweep_table(recovers)
    assert "| small | 0.550 ± 0.071 (0.500, 0.600) | 0.250 ± 0.000 | 0.750" in report.sweep_table(recovers)
    assert "after a fork" not in report.sweep_table([*recovers[1:], lines[0]])

    apart = report.sweep_table([line | {"before": line["after"]} if line["arm"] == "small" else line for line in lines])
    assert "*warm start*" not in apart and "| *before: small* | 0.550 ± 0.071 (0.500, 0.600)" in apart

    kept = tmp_path / "runs" / "paid" / "seed1" / "result.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"config": "other"}))
    with pytest.raises(ConfigError, match="result of another config"):
        sweep.run(two, "two", tmp_path / "runs", tmp_path / "warm", [1])


STEPS = """
def get_sweep():
    arith, search = "configs/r1_arith.py", "configs/quickstart.py"
    taught = {"config": search, "stage": "teach"}
    return {
        "warm": arith,
        "rm": "configs/search_orm.py",
        "measure": {"": search},
        "arms": {
            "long": {"first": [{"config": arith}, taught], "config": "configs/search_orm.py"},
            "adapted": {"config": "configs/ttrl_search.py", "stage": "ttrl"},
        },
        "shared": {"rl.steps": 3, "eval.every": 0},
    }
"""


@pytest.fixture
def steps(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    return sweep.load_sweep(tmp_path / "steps.py")


def test_the_steps_of_an_arm_begin_each_from_the_one_before(steps, tmp_path, monkeypatch):
    ran = []
    given = {"set": {"tokenizer.path": "both"}, "models": {"orm": "judge"}}

    def run_step(stage, config, workdir, before):
        ran.append((stage, config.name, workdir.name, before.name))
        assert (config.rl.steps, config.tokenizer.path) == (3, "both")
        assert config.name != "search_orm" or config.reward.options.orm.path == "judge"

    monkeypatch.setattr(sweep, "run_step", run_step)
    monkeypatch.setattr(sweep, "measured", lambda _, workdir, seed: workdir.name)
    line = sweep.run_arm(steps, "long", 0, tmp_path / "arm", tmp_path / "warm", given)
    assert ran == [
        ("train", "r1_arith", "0_train", "warm"),
        ("teach", "quickstart", "1_teach", "0_train"),
        ("train", "search_orm", "2_train", "1_teach"),
    ]
    assert line["after"] == "2_train" and line["config"] == sweep.arm_digest(steps, "long", 0, given)
    other = {"set": {}, "models": {"orm": "another"}}
    assert line["config"] != sweep.arm_digest(steps, "long", 0, other), "another judge is another arm"


def test_the_line_of_an_adapted_arm_is_its_own_before_and_after(steps, tmp_path, monkeypatch):
    numbers = {"avg_at_k": 0.5, "greedy": 0.75, "maj_at_k": {"1": 0.5, "4": 0.625}, "majority": {"ratio": 0.9}}
    own = {name: numbers for name in ("adapted", "held_out")}
    result = {"n": 8, "samples": 4, "held_out": {"n": 5}, "before": own, "after": own | {"adapted": numbers}}

    def run_step(stage, config, workdir, before):
        assert (stage, workdir.name) == ("ttrl", "0_ttrl"), "its result.json is not the arm's"
        workdir.mkdir(parents=True)
        (workdir / "result.json").write_text(json.dumps(result))

    monkeypatch.setattr(sweep, "run_step", run_step)
    given = {"set": {}, "models": {}}
    line = sweep.run_arm(steps, "adapted", 0, tmp_path / "arm", tmp_path / "warm", given)
    assert line["before"]["held out"] == {
        "n_tasks": 5,
        "greedy": 0.75,
        "sampled": 0.5,
        "searches": None,
        "facts": {"majority": 0.625, "ratio": 0.9},
    }
    assert line["after"]["adapted"]["n_tasks"] == 8
    text = report.sweep_table([line])
    assert "| adapted: majority of all samples | held out: majority of all samples | greedy" in text
    assert "| adapted | 0.500 (0.500) | 0.500 (0.500) | 0.625 | 0.625 | 0.750 |" in text


def test_one_tokenizer_of_several_worlds_keeps_digits_apart(tmp_path):
    from models.tokenizer import load_tokenizer

    texts = ["configs/r1_arith.py", "configs/r1_arith.py"]
    given = sweep.shared_tokenizer({"texts": texts}, tmp_path)
    assert given == sweep.shared_tokenizer({"texts": texts}, tmp_path) and sweep.shared_tokenizer({}, tmp_path) == {}
    ids = load_tokenizer(given["tokenizer.path"]).encode(" 1999", add_special_tokens=False)
    assert len(ids) == 4
