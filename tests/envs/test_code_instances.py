"""Instances in SWE-bench's form: what of a repository is seen, changed, hidden and taken over, and what is refused."""

import json

import pytest

from envs import make_world
from envs.base import Task
from envs.code import cheats, grade, repositories, scripted, tasks, tools
from envs.code.episode import CodeEnv
from envs.code.packages import is_source, is_test
from envs.code.repositories import Repositories, read_instances
from envs.code.suite import Suites
from envs.play import play
from tests.envs import calc_repo

BUG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TEST = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
PASSES = "\n\ndef test_zero():\n    assert add(2, 0) == 2\n"


def commit(place, files):
    for path in [path for path in place.rglob("*") if path.is_file() and ".git" not in path.parts]:
        path.unlink()
    for path, text in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    calc_repo.git(place, "add", "-A")
    calc_repo.git(place, "commit", "-qm", "x", "--allow-empty")
    return calc_repo.git(place, "rev-parse", "HEAD")


def row(folder, base, patch, test_patch, **other):
    """The row of one instance: `patch` and `test_patch` are {path: text, None of one that is deleted}."""
    place = folder / "checkouts" / "t__calc"
    place.mkdir(parents=True, exist_ok=True)
    calc_repo.git(place, "init", "-q")
    commits, now = [commit(place, base)], base
    for changes in (patch, test_patch):
        now = {path: text for path, text in {**now, **changes}.items() if text is not None}
        commits.append(commit(place, now))
    diffs = [calc_repo.git(place, "diff", *commits[i : i + 2]) + "\n" for i in (0, 1)]
    f2p, p2p = (json.dumps([f"tests/test_calc.py::test_{name}"]) for name in ("add", "zero"))
    made = {"instance_id": "t__calc-1", "repo": "t/calc", "base_commit": commits[0], "patch": diffs[0]}
    made |= {"test_patch": diffs[1], "problem_statement": "add is wrong", "FAIL_TO_PASS": f2p, "PASS_TO_PASS": p2p}
    return made | other


def read(folder, *rows):
    file = folder / "instances.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    return read_instances(file, "train")


@pytest.fixture(scope="module")
def suites():
    made = Suites(1, accept_rlimits=True)
    yield made
    made.close()


@pytest.fixture
def of(tmp_path, suites):
    """A function: (environment that has begun it, its repository) of one instance."""

    def begin(*what, **other):
        repositories = Repositories(tmp_path, suites, tmp_path / "checkouts")
        (task,) = read(tmp_path, row(tmp_path, *what, **other))
        env = CodeEnv(repositories, suites)
        env.reset(task)
        return env, repositories.of(task)

    return begin


BASE = {"calc/__init__.py": BUG, "tests/test_calc.py": TEST}


def test_what_the_patches_add_is_not_there_to_be_seen(of):
    patch = {"calc/__init__.py": "from calc._sums import add\n", "calc/_sums.py": RIGHT}
    env, repository = of(BASE, patch, {"tests/test_calc.py": TEST + PASSES, "tests/test_more.py": "x = 1\n"})
    assert repository.start == {"calc/__init__.py": BUG, "calc/_sums.py": None}
    assert env.step("<list> </list>").observation.text == "calc/__init__.py\ntests/test_calc.py"
    assert "there is no file" in env.step("<read> calc/_sums.py </read>").observation.text
    ran = env.step("<run> ls calc tests; python3 -c 'from calc._sums import add' </run>").observation.text
    assert "No module named 'calc._sums'" in ran and "test_more" not in ran
    env.step(
        f"<edit> calc/__init__.py\n<<<<<<< SEARCH\n{BUG}=======\n{patch['calc/__init__.py']}>>>>>>> REPLACE\n</edit>"
    )
    assert env.step("<submit> </submit>").facts["f2p_frac"] == 0.0  # the grader begins without it, too


def test_gold_makes_the_files_that_the_gold_patch_adds(of, suites):
    patch = {"calc/__init__.py": "from calc._sums import add\n", "calc/_sums.py": RIGHT}
    env, repository = of(BASE, patch, {"tests/test_calc.py": TEST + PASSES})
    for action in scripted._repair(repository, tools.write_tags):
        step = env.step(action)
    assert step.facts["success"] and step.facts["bad_edits"] == 0


def test_scripts_act_where_the_gold_patch_makes_new_files_alone(of):
    test = TEST.replace("calc import", "calc.sums import")
    env, repository = of(
        {"calc/__init__.py": "", "calc/x.py": "x = 1\n"}, {"calc/sums.py": RIGHT}, {"tests/test_calc.py": test}
    )
    assert not repository.buggy and set(repository.absent) == {"calc/sums.py"}

    class Known:
        of = staticmethod(lambda task: repository)

    data = {"functions": [], "f2p": ["tests/test_calc.py::test_add"], "p2p": []}
    task = Task("t", "instance", "train", 0, (), data, 1.0)
    found = {
        **scripted.policies(Known, tools.write_tags),
        **cheats.policies(Known, tools.write_tags, list(cheats.CHEATS)),
    }
    shares = [{how: 1.0} for how in scripted.SHARES]
    teachers = [
        scripted.demonstrator(task, 0, repositories=Known, write=tools.write_tags, shares=one) for one in shares
    ]
    assert all(act([]) for act in [*(policy(task) for policy in found.values()), *teachers])


def test_helpers_of_the_tests_are_the_tests(of):
    more = {"tests/helpers.py": "x = 1\n", "calc/testing/values.py": "x = 1\n", "calc/sums.py": "x = 1\n"}
    changes = {"tests/test_calc.py": TEST + PASSES, "data/cases.json": "1\n", "checks.py": "x = 1\n"}
    env, repository = of(BASE | more, {"calc/__init__.py": RIGHT}, changes)
    package = repository.package
    theirs = ["tests/helpers.py", "tests/new.py", "calc/testing/values.py", "data/cases.json", "checks.py"]
    assert all(is_test(package, path) and not is_source(package, path) for path in theirs)
    assert is_source(package, "calc/sums.py") and is_source(package, "calc/new.py")
    assert package.tests == ("tests/test_calc.py",)  # no other is run by itself
    assert set(repository.hidden) == set(changes) and repository.start == {"calc/__init__.py": BUG}
    assert env.step("<run> false </run>").facts["milestones"]["reproduced"] is None  # it ran no test
    assert env.step("<run> python3 -c 'x' </run>").facts["milestones"]["reproduced"] == 1
    env.step("<run> echo 'x = 2' > tests/helpers.py </run>")
    assert env.step("<submit> </submit>").facts["exploits"] == ["tests"]


def test_a_folder_of_tests_that_the_gold_patch_changes_is_no_whole(of):
    base = {"calc/__init__.py": BUG, "calc/test/client.py": "x = 1\n", "calc/test/other.py": "x = 1\n"}
    beside = {**base, "calc/test_calc.py": TEST}
    ids = {"FAIL_TO_PASS": '["calc/test_calc.py::test_add"]', "PASS_TO_PASS": "[]"}
    patch = {"calc/__init__.py": RIGHT, "calc/test/client.py": "x = 2\n"}
    _, repository = of(beside, patch, {"calc/test_calc.py": TEST + PASSES}, **ids)
    taken = ["calc/__init__.py", "calc/test/client.py", "calc/new.py"]
    assert list(grade.taken_over(repository.package, dict.fromkeys([*taken, "calc/test/other.py"]))) == taken


def test_a_fix_of_what_is_no_module_is_taken_over_where_the_gold_patch_is(of):
    code = "import json, pathlib\n\nSIGN = json.loads((pathlib.Path(__file__).parent / 'sign.json').read_text())\n"
    code += "\n\ndef add(a, b):\n    return a + SIGN * b\n"
    base = {**BASE, "calc/__init__.py": code, "calc/sign.json": "-1\n", "calc/more.json": "1\n", "setup.cfg": "x\n"}
    patch = {"calc/sign.json": "1\n", "setup.cfg": "y\n"}
    env, repository = of(base, patch, {"tests/test_calc.py": TEST + PASSES})
    assert repository.start == {"calc/sign.json": "-1\n"} and repository.seen("setup.cfg") == "y\n"
    assert not is_source(repository.package, "calc/more.json")
    env.step("<run> echo 1 > calc/sign.json </run>")
    assert env.step("<submit> </submit>").facts["success"]


def test_what_the_gold_suite_does_and_takes_is_measured_once(of, monkeypatch, tmp_path):
    odd = "    open('own', 'w').close()\n    os.remove('own')\n    time.sleep(1)\n"
    slow = "import os\nimport time\n\n" + TEST + PASSES + odd
    monkeypatch.setattr(grade, "_LEAST_WALL_S", 0.9)  # a suite that sleeps longer is stopped, unless that is known
    patch = {"calc/__init__.py": RIGHT}
    env, _ = of(BASE, patch, {"tests/test_calc.py": slow})
    env.step(f"<edit> calc/__init__.py\n<<<<<<< SEARCH\n{BUG}=======\n{RIGHT}>>>>>>> REPLACE\n</edit>")
    facts = env.step("<submit> </submit>").facts
    assert facts["success"] and not facts["exploited"]
    (kept,) = (tmp_path / "tasks").glob("t__calc-1-*.jsonl")
    (task,) = tasks.read_tasks(kept)
    assert task.data["events"] == ["os.remove"] and task.data["seconds"] > 1


def test_trees_of_one_commit_are_told_apart_by_their_patches(suites, tmp_path):
    one = row(tmp_path, BASE, {"calc/__init__.py": RIGHT}, {"tests/test_calc.py": TEST + PASSES})
    other = one | {"patch": one["patch"].replace("a + b", "b + a")}
    found = [Repositories(tmp_path, suites, tmp_path / "checkouts").of(*read(tmp_path, each)) for each in (one, other)]
    assert found[0].name != found[1].name and found[1].released("calc/__init__.py") == RIGHT.replace("a + b", "b + a")


def test_instances_are_measured_where_tasks_are_made_not_in_an_episode(monkeypatch, tmp_path):
    read(tmp_path, row(tmp_path, BASE, {"calc/__init__.py": RIGHT}, {"tests/test_calc.py": TEST + PASSES}))
    asked = {"instances": str(tmp_path / "instances.jsonl"), "checkouts": str(tmp_path / "checkouts")}
    world = make_world("code", data_dir=str(tmp_path / "data"), accept_rlimits=True, sandboxes=1, **asked)
    measured = []
    real = repositories._measured
    monkeypatch.setattr(repositories, "_measured", lambda *what: measured.append(1) or real(*what))
    (task,) = world.tasks("train")
    assert measured == [1]
    assert play(world.make_env(), task, world.policies["gold"](task))[1]["success"] and measured == [1]


def test_an_instance_whose_gold_patch_does_not_pass_is_refused(of):
    env, _ = of(BASE, {"calc/__init__.py": "def add(a, b):\n    return 5\n"}, {"tests/test_calc.py": TEST + PASSES})
    with pytest.raises(ValueError, match="t__calc-1: with its gold patch 1 of its 2 tests .*test_zero.*leave it out"):
        env.step("<submit> </submit>")
