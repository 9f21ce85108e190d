"""Rules that give an episode up, what several threads ask of one model at once, and the metrics' worked numbers."""

import threading

import numpy as np
import pytest

from rl.metrics.abandonment import abandonment_means
from rl.rollout.abandon import SoFar, audit, judged_below, repeats, valued_below
from rl.rollout.gather import Gathered
from rl.types import Mean, Status, Trajectory
from tests.rl.engines import in_thread
from tests.rl.test_reward_terms import episode


def so_far(text):
    """ "xa yb": after reading x it said a, after y it said b."""
    return SoFar([tuple(turn) for turn in text.split()], episode, lambda: [7])


@pytest.mark.parametrize(
    ("text", "k"),
    [("xa", 1), ("xa xa", 2), ("xa ya", 1), ("xa xb", 1), ("xa yb xa", 2), ("xa yb xa yb xa", 3), ("xa xa yb", 1)],
)
def test_repeats_counts_the_last_action_after_the_same_observation(text, k):
    assert [repeats(n)(so_far(text)) for n in (2, 3, 4)] == [k >= n for n in (2, 3, 4)]


def test_a_judge_gives_up_below_its_threshold_and_not_where_it_cannot_judge():
    said = [0.2, 0.3, np.nan, 0.29999]
    rule = judged_below(0.3, lambda asked: [np.array([0.9, said.pop(0)]) for _ in asked])
    assert [rule(so_far("xa")) for _ in range(4)] == [True, False, False, True]


def test_a_critic_gives_up_below_its_threshold_and_not_where_it_cannot_judge():
    said, asked = [0.2, 0.3, np.nan], []
    rule = valued_below(0.3, lambda states: [asked.append(ids) or said.pop(0) for ids in states])
    assert [rule(so_far("xa")) for _ in range(3)] == [True, False, False] and asked == [[7]] * 3


@pytest.mark.parametrize("call", [lambda: repeats(1), lambda: audit(0, 1.5)])
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError, match="want"):
        call()


def test_what_is_asked_while_a_call_runs_is_the_next_call():
    calls, go, running = [], threading.Event(), threading.Event()

    def of(items):
        calls.append(sorted(items))
        running.set()
        assert go.wait(10)
        if 7 in items:
            raise OSError("seven")
        return [10 * i for i in items]

    ask = Gathered(of)
    first = in_thread(lambda: ask(1))
    assert running.wait(10)
    others = [in_thread(lambda i=i: ask(i)) for i in (2, 3, 4)]
    while len(ask._waiting) < 3:
        threading.Event().wait(0.005)
    go.set()
    for thread, _ in (first, *others):
        thread.join(10)
    assert calls == [[1], [2, 3, 4]] and [out for _, out in (first, *others)] == [[10], [20], [30], [40]]
    with pytest.raises(OSError, match="seven"):
        ask(7)
    assert ask(5) == 50  # an error leaves nothing behind
    with pytest.raises(ValueError, match="got 0 answers, want 1"):
        Gathered(lambda items: [])(1)


def test_metrics():
    """Eight scored: five were judged hopeless, three of these are audited, of which one succeeds."""

    def one(member, status=Status.DONE, audited=None, won=False, **found):
        facts = {} if audited is None else {"abandonment": {"audited": audited, **found}}
        return episode(status=status, member=member, success=won, **facts)

    first = [
        one(0, won=True),
        one(1),
        one(2, Status.ABANDONED, False, rule="repeats", turns=2),
        one(3, Status.DONE, True, won=True, rule="repeats", turns=3, s=1.5, tokens=10),
        one(4, Status.ENV_ERROR, True, rule="prm", turns=9, s=9.0, tokens=99),
    ]
    second = [
        one(0, Status.ABANDONED, False, rule="prm", turns=1),
        one(1, Status.TURN_LIMIT, True, rule="repeats", turns=2, s=0.5, tokens=30),
        one(2, Status.DONE, True, rule="repeats", turns=4, s=1.0, tokens=5),
        one(3, won=True),
    ]
    means = abandonment_means([(first, False), (second, True)])
    assert {name: (mean.total, mean.count) for name, mean in means.items()} == {
        "abandon/frac": (5, 8),
        "abandon/prm_frac": (1, 5),
        "abandon/repeats_frac": (4, 5),
        "abandon/audited_frac": (3, 5),
        "abandon/turns": (12, 5),
        "abandon/success": (1, 3),
        "abandon/saved_s": (3.0, 3),
        "abandon/saved_tokens": (45, 3),
        "abandon/kept_success": (2, 3),
        "abandon/excluded_frac": (2, 8),  # of these nobody has judged any
        "abandon/dropped_groups_frac": (1, 2),
    }
    assert abandonment_means([([one(0)], False)]) == {} == abandonment_means([])


def test_metrics_of_a_world_that_says_no_success():
    """Whatever ended by itself is left out of both means; what met a limit has failed."""
    own = {"rule": "repeats", "turns": 2}
    members = [
        Trajectory("t", 0, 0, Status.DONE, (), {"answer": "x"}, {}),
        Trajectory("t", 0, 1, Status.ABANDONED, (), {"success": False, "abandonment": {**own, "audited": False}}, {}),
        Trajectory("t", 0, 2, Status.DONE, (), {"abandonment": {**own, "audited": True, "s": 1.0, "tokens": 3}}, {}),
        Trajectory("t", 0, 3, Status.TURN_LIMIT, (), {"success": False}, {}),
    ]
    means = abandonment_means([(members, False)])
    assert (means["abandon/frac"].value, means["abandon/saved_tokens"].value) == (0.5, 3)
    assert (means["abandon/success"].count, means["abandon/kept_success"]) == (0, Mean(0, 1))
