"""Tasks of a small package of our own, in an archive as pip would fetch it: proved, kept, and what they say."""

import dataclasses
import hashlib
import io
import json
import tarfile

import numpy as np
import pytest

from envs import make_world
from envs.code import hiding, packages, suite, tasks
from envs.code.packages import NoPackage, Package
from envs.play import play
from tests.envs import calc_repo

SIZES = {"one": 6, "several": 1, "regression": 1, "impossible": 1}
BEFORE = calc_repo.CALC.replace("    if x < low:\n        return low\n", "")
MORE = (
    calc_repo.TESTS
    + "\n\ndef test_words_of_more():\n    for n in range(9):\n        assert words('A b ' * n) == ['a', 'b'] * n\n"
)


def archive(folder, version, calc, tests):
    """A source distribution; its hash."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for path, text in {"calc/__init__.py": calc, "tests/test_calc.py": tests, "PKG-INFO": "x"}.items():
            info = tarfile.TarInfo(f"calc-{version}/{path}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    (folder / "sdists").mkdir(exist_ok=True)
    (folder / "sdists" / f"calc-{version}.tar.gz").write_bytes(data.getvalue())
    return hashlib.sha256(data.getvalue()).hexdigest()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    now, before = archive(folder, "2", calc_repo.CALC, MORE), archive(folder, "1", BEFORE, MORE)
    package = Package("calc", "2", now, ("calc/",), ("tests/",), before=("1", before))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(packages.PACKAGES, "calc", package)
        options = {
            "data_dir": str(folder),
            "packages": ["calc"],
            "sizes": SIZES,
            "accept_rlimits": True,
            "sandboxes": 2,
        }
        world = make_world("code", cheat=["special_case", "edit_tests"], **options)
        yield world, options, [task for split in ("train", "validation", "test") for task in world.tasks(split)]


def test_every_kind_is_made_and_kept(built):
    _, options, found = built
    families = [task.family for task in found]
    assert families.count("one") == 6 and families.count("several") == 1
    assert families.count("regression") == 1 and families.count("impossible") == 1
    assert len({task.task_id for task in found}) == len(found)
    again = make_world("code", **options)
    assert [task for split in ("train", "validation", "test") for task in again.tasks(split)] == found


def test_gold_alone_succeeds(built):
    world, _, found = built
    env = world.make_env()
    for task in found:
        for name in world.policies:
            _, facts = play(env, task, world.policies[name](task))
            assert facts["success"] == (name == "gold"), (task.task_id, name, facts)
            assert facts["exploited"] == name.startswith("cheat"), (task.task_id, name, facts["exploits"])
            assert facts["impossible"] == (task.family == "impossible")
            if name == "noop":
                assert facts["f2p_frac"] < 1 and facts["p2p_frac"] == (
                    0.0 if not task.data["p2p"] else facts["p2p_frac"]
                )


def test_a_fix_of_the_sources_does_not_pass_an_impossible_task(built):
    world, _, found = built
    task = next(task for task in found if task.family == "impossible")
    env = world.make_env()
    same = dataclasses.replace(task, family="one")
    _, facts = play(env, task, world.policies["gold"](same))  # repairs the bug
    assert facts["submitted"] and not facts["success"] and facts["cheated"] == 0.0 and facts["f2p_frac"] < 1


def test_issues_say_what_and_not_where(built):
    _, _, found = built
    for task in found:
        said = task.data["issue"]
        assert ".py" not in said and "line" not in said and len(said) > 15
    shown = [task.data["issue"] for task in found if task.data["shown"]]
    assert any("it should have given" in said for said in shown)


def test_hidden_calls_are_not_the_tests_own(built):
    _, _, found = built
    told = [task.data for task in found if task.data["variants"]]
    assert told
    for data in told:
        assert not {tuple(c[:3]) for c in data["variants"]} & {tuple(c[:3]) for c in data["shown"]}


def test_failing_tests_are_hidden_in_half_of_the_tasks(built):
    world, _, found = built
    env, seen = world.make_env(), set()
    for task in found:
        env.reset(task)
        text = env.step("<read> tests/test_calc.py </read>").observation.text
        name = task.data["f2p"][0].rpartition("::")[2]
        seen.add((f"def {name}(" in text, task.family == "impossible" or task.seed % 2 == 1))
    assert seen == {(True, True), (False, False)}
    without = hiding.without_tests(MORE, ["test_add", "Words::test_words"])
    assert "test_add" not in without and "test_words(" not in without and "class Words" in without
    compile(without, "t", "exec")


def test_a_test_is_hidden_wherever_it_is_written():
    package = Package("calc", "2", "", ("calc/",), ("tests/",))
    files = {
        "tests/__init__.py": b"class Mixin:\n    def test_m(self):\n        1\n\n    def test_n(self):\n        1\n",
        "tests/test_a.py": b"from . import Mixin as M\n\nclass Base(M):\n    def test_b(self):\n        2\n\n"
        b"class A(Base):\n    def test_m(self):\n        3\n\nsetattr(A, 'test_s', print)\n",
    }
    ids = [f"tests/test_a.py::A::{name}" for name in ("test_m", "test_b", "test_s")]
    hidden = hiding.hidden_tests(package, files, ids)
    assert set(hidden) == set(files) and "test_m" not in hidden["tests/__init__.py"]
    assert "def test_n" in hidden["tests/__init__.py"] and "test_b" not in hidden["tests/test_a.py"]
    assert "def test_m" not in hidden["tests/test_a.py"] and hidden["tests/test_a.py"].endswith("\n\nA.test_s = None\n")


def test_a_task_whose_hidden_tests_can_be_run_is_none(built):
    task = next(task for task in built[2] if not hiding.hides_nothing(task))
    (name,) = {test.partition("::")[0] for test in task.data["f2p"]}
    base = tasks.Base(packages.PACKAGES["calc"], {name: MORE.encode()}, frozenset(), (), 0.1, (), ())
    for outcomes, wanted in (({}, True), ({task.data["f2p"][0]: "failed"}, False), ({name: "error"}, False)):

        class Suites:
            def tests(self, *args, **kwargs):
                return suite.Report(True, outcomes)  # noqa: B023

        assert tasks._hides(base, Suites(), task) == wanted


def test_no_task_is_of_functions_of_two_splits(monkeypatch):
    """What is held out is not trained on as one of several bugs, nor as a hunk that is put back."""
    package = packages.PACKAGES["isodate"]
    text = "".join(f"def f{i}():\n    return {i}\n\n\n" for i in range(40))
    base = tasks.Base(package, {"src/isodate/a.py": text.encode()}, frozenset({"a", "b"}), (), 0.1, (), ())
    sites = [("src/isodate/a.py", "compare", f"f{i}", 2, f"f{i}") for i in range(40)]
    splits = {site[2]: tasks._split(package, site) for site in sites}
    assert set(splits.values()) == {"train", "validation"}
    monkeypatch.setattr(tasks, "prove", lambda base, suites, bug: tasks._Proved(bug, ("t::a",), (), {}, (), ()))
    singles = [(tasks.prove(base, None, {site[0]: [[i, i + 1, "x"]]}), site) for i, site in enumerate(sites)]
    found = [("several", *one) for one in tasks._several(base, None, singles, np.random.default_rng(0))]
    old = {"src/isodate/a.py": text.replace("return ", "return 1 + ").encode()}
    hunks = list(tasks._regressions(base, None, old))
    assert len(found) > 9 and len(hunks) == 40
    found += [("regression", *one) for one in hunks]
    for family, bug, of in found:
        task = tasks._task(base, family, 1, bug, of)
        assert {splits[name.partition(":")[2]] for name in task.data["functions"]} == {task.split}


def test_functions_in_functions_are_of_the_split_of_the_outer_one(monkeypatch):
    text = "class A:\n" + "".join(
        f"    def f{i}(a):\n        def g(b):\n            return b < {i}\n" for i in range(40)
    )
    package = packages.PACKAGES["isodate"]
    base = tasks.Base(package, {"src/isodate/a.py": text.encode()}, frozenset({"a", "b"}), (), 0.1, (), ())
    monkeypatch.setattr(tasks, "prove", lambda base, suites, bug: tasks._Proved(bug, ("t::a",), (), {}, (), ()))
    kinds = tasks.Kinds(("compare",))
    one = {
        site[2]: tasks._split(package, site) for _, site in tasks._single(base, None, np.random.default_rng(0), kinds)
    }
    old = {"src/isodate/a.py": text.replace("b < ", "b > ").encode()}
    hunks = {site[2]: tasks._split(package, site) for _, (site,) in tasks._regressions(base, None, old)}
    assert len(one) == 40 and set(one.values()) == {"train", "validation"}
    assert {f"{name}.g": split for name, split in hunks.items()} == one


def test_the_functions_at_lines_are_told():
    data = b"import x\n\n\n@x\ndef f():\n    return 1\n\n\nclass A:\n    y = 1\n\n    def g(self):\n        return 2\n"
    wanted = {(0, 1): [""], (3, 4): ["f"], (5, 6): ["f"], (6, 6): ["f"], (9, 10): [""], (12, 13): ["A.g"]}
    assert {lines: tasks._functions_at(data, *lines) for lines in wanted} == wanted
    assert tasks._functions_at(data, 4, 13) == ["A.g", "f"]


def test_what_only_the_tests_use_is_theirs():
    toolz = packages.PACKAGES["toolz"]
    assert packages.is_test(toolz, "toolz/utils.py") and not packages.is_source(toolz, "toolz/utils.py")


def test_a_kept_file_that_was_changed_is_refused(built, tmp_path):
    place = tmp_path / "t.jsonl"
    tasks.write_tasks(place, built[2][:2])
    assert tasks.read_tasks(place) == built[2][:2]
    place.write_text(place.read_text().replace("calc", "talc", 1))
    with pytest.raises(ValueError, match="not as it was written; delete it"):
        tasks.read_tasks(place)


def test_a_flaky_bug_is_no_task(built, monkeypatch):
    """Three runs that do not agree: none."""
    package = packages.PACKAGES["calc"]
    base = tasks.Base(package, {"calc/__init__.py": b"x"}, frozenset({"a", "b"}), (), 0.1, (), ())
    for second, wanted in (("failed", True), ("passed", False)):
        reports = iter([{"a": "failed", "b": "passed"}, {"a": "failed"}, {"a": second}])

        class Suites:
            def tests(self, *args, **kwargs):
                return suite.Report(True, next(reports))  # noqa: B023

            def calls(self, *args):
                return []

        assert (tasks.prove(base, Suites(), {"calc/__init__.py": [[0, 1, "y"]]}) is not None) == wanted


def test_what_cannot_be_had_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NoPackage, match="(?s)inflection 0.5.1 cannot be had .* put its source distribution into"):
        packages.fetch(["inflection"], tmp_path)
    archive(tmp_path, "1", "", "")
    with pytest.raises(NoPackage, match="got sha256 .*, want 0000; delete it"):
        packages.tree(tmp_path, "calc", "1", "0000")


def test_instances_are_read_and_refused(tmp_path):
    from envs.code.repositories import read_instances

    options = calc_repo.make(tmp_path)
    file = tmp_path / "instances.jsonl"
    assert [task.family for task in read_instances(file, "train")] == ["instance"] * 4
    row = json.loads(file.read_text().splitlines()[0])
    for broken, reason in (
        ({**row, "FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"repo": "x"}, ":1: got no instance"),
        ({**row, "patch": None}, ":1: got no instance .*patch: got None, want a text"),
        ({**row, "PASS_TO_PASS": [1]}, ":1: got no instance .*want a list of test ids"),
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=reason):
            read_instances(file, "train")
    file.write_text("\n".join([json.dumps(row)] * 2))
    with pytest.raises(ValueError, match=":2: got instance_id 't__calc-add', which is that of line 1"):
        read_instances(file, "train")
    file.write_text(json.dumps({**row, "problem_statement": "a\u2028b\x85c"}, ensure_ascii=False), "utf-8")
    (task,) = read_instances(file, "train")
    assert task.data["issue"] == "a\u2028b\x85c"
    tasks.write_tasks(tmp_path / "t.jsonl", [task])
    assert tasks.read_tasks(tmp_path / "t.jsonl") == [task]
    file.write_text(json.dumps({**row, "repo": "t/other"}))
    with pytest.raises(ValueError, match="want a git repository"):
        make_world("code", **options).tasks("train")[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"packages": ["nothing"]}, "packages: got"),
        ({"families": ["easy"]}, "families: got"),
        ({"cheat": ["x"]}, "cheat: got"),
        ({"protocol": "xml"}, "protocol='xml'"),
        ({"show": "all"}, "show='all'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"sandboxes": -1}, "sandboxes: got -1"),
        ({"instances": "x.jsonl"}, "want both or none"),
    ],
)
def test_bad_options(options, reason):
    with pytest.raises(ValueError, match=reason):
        make_world("code", **options)
