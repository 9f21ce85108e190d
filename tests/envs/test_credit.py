"""The world of known credit: what each step shows, which one decides, and that nothing else does."""

import dataclasses

import numpy as np
import pytest

from envs import make_world
from envs.credit import asked_in, random_policy, setting, true_credit
from envs.play import play

WORLD = make_world("credit", steps=4, switches=3)
TASK = dataclasses.replace(WORLD.tasks("train")[0], data={"steps": 4, "switches": 3, "deciding": 2, "asked": 3})


def played(*numbers):
    env, seen = WORLD.make_env(), []
    first = env.reset(TASK).text
    for number in numbers:
        step = env.step(setting(number))
        seen.append((step.observation.text, step.done, step.facts["success"]))
    return first, seen, step.facts


def test_what_an_episode_shows():
    first, seen, facts = played(1, 2, 3, 1)
    assert first == "Step 1 of 4. So far: nothing yet. Set any switch."
    assert seen == [
        ("Step 2 of 4. So far: 1. Set any switch.", False, False),
        ("Step 3 of 4. The panel is dark. Set switch 3.", False, False),
        ("Step 4 of 4. So far: 1 2 3. Set any switch.", False, False),
        ("", True, True),
    ]
    assert facts == {"success": True, "asked": True, "right": True, "malformed": 0}


@pytest.mark.parametrize("third", [1, 2, 3])
def test_one_action_alone_decides(third):
    """Whatever the other three are: 27 episodes of each answer."""
    ends = {played(a, b, third, d)[2]["success"] for a in (1, 2, 3) for b in (1, 2, 3) for d in (1, 2, 3)}
    assert ends == {third == 3}


@pytest.mark.parametrize("action", ["3", "<set> three </set>", "<set> 3 1 </set>", "<set> 0 </set>", "<set> 4 </set>"])
def test_no_switch_is_set_by_anything_else(action):
    env = WORLD.make_env()
    env.reset(TASK)
    for text in (setting(1), setting(1), action):
        step = env.step(text)
    assert (
        step.facts["malformed"] == 1
        and not step.facts["right"]
        and step.observation.text.endswith("1 1 -. Set any switch.")
    )


def test_the_text_counts_up_to_the_first_stop_string():
    env = WORLD.make_env()
    env.reset(TASK)
    for text in (setting(1), setting(1), "no <set> 3 </set> <set> 1 </set>"):
        step = env.step(text)
    assert step.facts["right"]


def test_the_policy_is_right_as_often_as_it_says_and_its_credit_is_known():
    policy = random_policy(0.25, 3, np.random.default_rng(0), ("hm", "so"))
    env, rights, all_set = WORLD.make_env(), [], set()
    for _ in range(2000):
        turns, facts = play(env, TASK, policy)
        rights.append(facts["success"])
        all_set |= {(step, action) for step, (action, _) in enumerate(turns)}
    assert np.mean(rights) == pytest.approx(0.25, abs=0.03)
    assert all_set == {(s, f"{t} <set> {n} </set>") for s in range(4) for t in ("hm", "so") for n in (1, 2, 3)}
    assert true_credit(TASK, True, 0.25).tolist() == [0, 0, 0.75, 0]
    assert true_credit(TASK, False, 0.25).tolist() == [0, 0, -0.25, 0]


def test_tasks_differ_and_errors_say_so():
    tasks = make_world("credit").tasks("train")
    assert len(tasks) == 400 and {t.data["deciding"] for t in tasks} == set(range(10))
    assert {t.data["asked"] for t in tasks} == {1, 2, 3, 4} and tasks[3] == tasks[3:4][0]
    assert asked_in("Step 2 of 9. So far: 1. Set any switch.") is None
    with pytest.raises(ValueError, match="got steps=0 and switches=4, want at least 1 step and 2 switches"):
        make_world("credit", steps=0)
    with pytest.raises(ValueError, match="want a task of this world's options"):
        WORLD.make_env().reset(tasks[0])
    with pytest.raises(RuntimeError, match=r"call reset\(task\) first"):
        WORLD.make_env().step("")
