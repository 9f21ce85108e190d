"""Faults come by seed, at the call and in the share that was asked; without any a world is as it was."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs import chaos, make_world
from envs.base import Observation, Step
from envs.chaos import EXIT_CODE, KINDS, Faults, wrapped

OPTIONS = {"sizes": {"train": 60, "validation": 20, "test": 20}}
ARITH = make_world("arith", **OPTIONS)
ACTION = "<answer> 1 </answer>"


def test_a_share_of_the_resets_is_faulted_by_seed_and_the_next_reset_draws_anew():
    tasks = [ARITH.tasks("train")[i] for i in range(60)]

    def drawn(seed):
        faults = Faults(KINDS, 0.2, 0.1, 3, seed)
        return [[faults.draw(task) for task in tasks] for _ in range(50)], [faults.is_broken(task) for task in tasks]

    resets, broken = drawn(7)
    assert (resets, broken) == drawn(7) and resets != drawn(8)[0] and resets[0] != resets[1]
    kinds = Counter(kind for reset in resets for kind, _, _ in reset)
    n = 50 * 60  # of 3,000 draws of probability .2 the standard deviation is 22, of .04 it is 11
    assert abs(n - kinds.pop("") - 600) < 5 * 22 and all(abs(kinds[kind] - 120) < 5 * 11 for kind in KINDS)
    assert {call for reset in resets for kind, call, _ in reset if kind} == {0, 1, 2}
    assert 0 < sum(broken) < 20


@pytest.mark.parametrize("kind", ["raise", "hang", "garbage", "slow"])
def test_each_fault_comes_once_at_its_call(kind):
    faults = Faults((kind,), 1.0, 0.0, 2, 0)
    env = wrapped(ARITH, faults, hang_s=0.01, slow_s=0.01).make_env()
    ends = Counter()
    for i in range(40):
        task, got, at = ARITH.tasks("train")[i % 4], [], None
        try:
            got.append(env.reset(task))
            got.append(env.step(ACTION))
        except BaseException:
            at = len(got)
        whole = all(type(x) is want for x, want in zip(got, (Observation, Step), strict=False))
        ends[at if at is not None else "right" if whole else "wrong"] += 1
    assert sum(faults.injected.values()) == faults.injected[kind] == 40
    if kind == "raise":
        assert ends[0] + ends[1] == 40 and min(ends[0], ends[1]) > 5
    elif kind == "garbage":
        assert ends["wrong"] + ends["right"] + ends[1] == 40 and ends["wrong"] > 20  # a Step with wrong facts is a Step
    else:
        assert ends == {"right": 40}


def test_a_broken_task_always_raises_the_same_and_others_never_do():
    faults = Faults(("raise",), 0.0, 0.3, 1, 1)
    env = wrapped(ARITH, faults).make_env()
    for i in range(20):
        task = ARITH.tasks("train")[i]
        for _ in range(2):
            if faults.is_broken(task):
                with pytest.raises(KeyError, match=f"the data of {task.task_id} lacks a row"):
                    env.reset(task)
            else:
                assert env.reset(task) == ARITH.make_env().reset(task)
    assert 0 < faults.injected["broken"] < 40 and set(faults.injected) == {"broken"}


def test_the_death_of_the_process_is_at_once():
    """In a process of its own: no handler, no `finally` and no exit function runs."""
    code = f"""
import atexit
from envs import make_world
atexit.register(print, "never")
world = make_world("chaos", options={OPTIONS!r}, faults=("exit",), share=1.0, calls=1)
try:
    world.make_env().reset(world.tasks("train")[0])
finally:
    print("never")
"""
    root = Path(chaos.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (EXIT_CODE, ""), done.stderr


@pytest.mark.parametrize("wrong", [{"faults": ("vanish",)}, {"faults": ()}, {"share": 1.5}, {"calls": 0}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="want some of raise, hang, garbage, slow, exit"):
        make_world("chaos", options=OPTIONS, **wrong)
