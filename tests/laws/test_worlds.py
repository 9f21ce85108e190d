"""Law, for every world in WORLDS: same task, same episode; instances share nothing; a snapshot goes on as if never
taken; close frees everything; gold scores 1 on every task, and doing nothing, being wrong and cheating score 0.

Here on a small subset; `python -m launch.check --world=W` plays every task. The last tests show that each check can
fail.
"""

import dataclasses
import json
import threading

import pytest

from envs import SPLITS, WORLDS, checks, make_world, variants
from envs.base import EnvSpec, Message, Observation, Step, Task, World
from envs.play import play
from tests.envs import calc_repo


def options(name, folder):
    if name == "search":
        return {"data_dir": str(folder), "sizes": {"train": 60, "validation": 20, "test": 20}}
    if name == "arith":
        return {"sizes": {"train": 60, "validation": 20, "test": 20}}
    if name == "chaos":
        return {"options": {"sizes": {"train": 60, "validation": 20, "test": 20}}, "faults": ("slow",), "slow_s": 0.0}
    if name == "credit":
        return {}
    if name == "code":
        return {**calc_repo.make(folder), "cheat": ["edit_tests", "os_exit"]}
    rows = [{"question": f"{i} + 1 = ?", "answers": [str(i + 1)]} for i in range(60)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"file": str(folder / "sums.jsonl")}


FORMS = [
    ("search", 0),
    ("search", 1),
    ("qa", 0),
    ("arith", 0),
    ("credit", 0),
    ("code", 0),
    ("chaos", 0),
]  # a world, and which of its variants: 1 is under invented names


@pytest.fixture(scope="module", params=FORMS)
def form(request, tmp_path_factory):
    name, i = request.param
    how, splits = variants(name, options(name, tmp_path_factory.mktemp(name)))[i]
    return make_world(name, **how), splits


@pytest.fixture
def world(form):
    return form[0]


@pytest.fixture
def splits(form):
    return form[1]


def test_every_form_of_every_world_is_tried(tmp_path):
    assert FORMS == [(name, i) for name in WORLDS for i in range(len(variants(name, options(name, tmp_path))))]


def test_the_world_has_the_policies_that_prove_it(world):
    assert {"gold", "noop", "wrong"} <= set(world.policies) and any(
        name.startswith("cheat:") for name in world.policies
    )
    assert world.name in WORLDS


@pytest.mark.parametrize("law", checks.LAWS)
def test_law(world, splits, law):
    tasks = [task for split in splits for task in world.tasks(split)[:4]]
    assert checks.LAWS[law](world, tasks) == []


def test_gold_one_and_everything_else_zero(world, splits):
    for split in splits:
        tasks = world.tasks(split)
        assert len(tasks) > 0 and all(task.split == split for task in tasks)
        for policy in world.policies:
            assert checks.score(world, policy, split, tasks).failures == (), policy


def test_search_by_tool_calls_is_the_same_game(tmp_path):
    """The same play in JSON calls has the same observations and facts, and keeps every law."""
    tags, calls = (make_world("search", protocol=name, **options("search", tmp_path)) for name in ("tags", "json"))
    for split in SPLITS:
        tasks = calls.tasks(split)[:8]
        for name in calls.policies:
            assert checks.score(calls, name, split, tasks).failures == (), name
        for task in tasks:
            for policy in ("gold", "wrong"):
                seen = [play(w.make_env(), task, w.policies[policy](task)) for w in (tags, calls)]
                (turns, facts), (called, facts_of_calls) = seen
                assert [o for _, o in turns] == [o for _, o in called] and str(facts) == str(facts_of_calls)
                assert all("<tool_call>" in action and "</search>" not in action for action, _ in called)
    for law in checks.LAWS.values():
        assert law(calls, calls.tasks("train")[:4]) == []


def test_tasks_are_random_access_and_unique(world, splits):
    ids = [task.task_id for split in splits for task in world.tasks(split)]
    assert len(set(ids)) == len(ids)
    train = world.tasks("train")
    assert train[len(train) - 1] == train[-1] and train[2:4] == [train[2], train[3]]
    assert [task.task_id for task in train] == [task.task_id for task in world.tasks("train")]


def test_unknown_worlds_and_options_list_what_there_is():
    with pytest.raises(ValueError, match="got 'serach', want one of search, qa, arith, credit"):
        make_world("serach")
    with pytest.raises(ValueError, match=r"got options \['kk'\], want some of \[.*'max_turns'"):
        make_world("search", kk=3)


# --- the checks themselves: each finds the fault that it is for -----------------------------------


class Toy:
    """Counts to three; "yes" then succeeds. Subclasses break one law each."""

    spec = EnvSpec("toy", (), 5)

    def reset(self, task):
        self.n = 0
        return Observation("")

    def step(self, action):
        self.n += 1
        return Step(Observation(str(self.n)), self.n == 3, {"success": action == "yes" and self.n == 3})

    def snapshot(self):
        return b"%d" % self.n

    def restore(self, snapshot):
        self.n = int(snapshot)

    def close(self): ...


class Unequal(Toy):
    count = 0

    def reset(self, task):
        super().reset(task)
        Unequal.count += 1
        return Observation(str(Unequal.count))


class Shared(Toy):
    state = {"n": 0}

    def reset(self, task):
        self.state["n"] = 0
        return Observation("")

    def step(self, action):
        self.state["n"] = self.n = self.state["n"]
        step = super().step(action)
        self.state["n"] = self.n
        return step


class Forgets(Toy):
    def restore(self, snapshot):
        self.n = 0


class Leaks(Toy):
    stop = threading.Event()

    def reset(self, task):
        threading.Thread(target=self.stop.wait, name="leak").start()
        return super().reset(task)


def toy(env, **policies):
    policies = {"gold": lambda task: lambda seen: "yes", "noop": lambda task: lambda seen: "no"} | policies
    return World("toy", env, lambda split: TASKS, policies, lambda: [])


TASKS = [Task(f"t/{i}", "toy", "train", i, (Message("user", "?"),), {}) for i in range(3)]


def test_the_checks_pass_what_is_right():
    for law in checks.LAWS.values():
        assert law(toy(Toy), TASKS) == []


@pytest.mark.parametrize(
    ("env", "law", "match"),
    [
        (Unequal, "same seed, same episode", "differ"),
        (Shared, "8 instances share nothing", "state is shared"),
        (Forgets, "snapshot, restore, go on", "restored at each turn"),
        (Leaks, "close frees everything", "grow by round"),
    ],
)
def test_each_check_finds_its_fault(env, law, match):
    policies = {}
    if env is Unequal:  # what it reads must decide what it does
        policies["gold"] = lambda task: lambda seen: "yes" + seen[0]
    try:
        found = checks.LAWS[law](toy(env, **policies), TASKS)
    finally:
        if env is Leaks:
            Leaks.stop.set()
    assert found and match in found[0]


def test_scores_name_the_first_failures():
    bad = toy(Toy, gold=lambda task: lambda seen: "no", noop=lambda task: lambda seen: "yes")
    for policy, wanted in (("gold", 1), ("noop", 0)):
        score = checks.score(bad, policy, "train", TASKS)
        assert len(score.failures) == 3 and f"{policy} on t/0: success {1 - wanted}, want {wanted}" in score.failures[0]
    untyped = dataclasses.replace(toy(Toy), make_env=lambda: _Untyped())
    with pytest.raises(TypeError, match="want a bool"):
        checks.score(untyped, "noop", "train", TASKS)


class _Untyped(Toy):
    def step(self, action):
        return dataclasses.replace(super().step(action), facts={"success": 1.0})
