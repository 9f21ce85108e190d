"""Credit of episodes: what stands before a turn, how a reward is dealt to turns, and that it reaches the tokens."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rl import credit
from rl.rewards.compose import RewardTerm
from rl.rewards.milestones import milestones_term
from rl.rollout.batcher import pack
from rl.types import Row, Status, Trajectory


def row(*spans):
    """Of spans (turn, sampled, ids)."""
    tokens = np.concatenate([ids for *_, ids in spans]).astype(np.int32)
    turn, mask = (np.repeat([span[i] for span in spans], [len(span[2]) for span in spans]) for i in (0, 1))
    return Row(
        tokens=tokens,
        turn=turn.astype(np.int32),
        action_mask=mask.astype(bool),
        behavior_logp=np.where(mask, -0.5, 0).astype(np.float32),
        version=np.where(mask, 0, -1).astype(np.int32),
    )


def episode(member, *rows, ticket=0):
    return Trajectory("t", ticket, member, Status.DONE, rows, {"success": True}, {})


PROMPT = (-1, False, [1, 2])
# two turns; the world answers 7 8 to the first, after glue 5; the second begins with a forced token 6
LONG = row(PROMPT, (0, True, [10, 11]), (0, False, [5, 7, 8]), (1, False, [6]), (1, True, [12]))
ALIKE = row(PROMPT, (0, True, [13]), (0, False, [5, 7, 8]), (1, True, [14]))
SHORT = row(PROMPT, (0, True, [15, 16]))


def ids(*numbers):
    return np.array(numbers, np.int32).tobytes()


def test_an_anchor_is_what_was_read_since_the_last_action():
    assert credit.anchors(episode(0, LONG)) == [ids(1, 2), ids(5, 7, 8)]
    assert credit.anchors(episode(0, ALIKE)) == credit.anchors(episode(0, LONG))
    assert credit.anchors(episode(0)) == [] and episode(0).n_turns == 0
    # in a new row the prompt is the whole conversation
    again = row((-1, False, [1, 2, 10, 7]), (1, True, [12]))
    assert credit.anchors(episode(0, SHORT, again)) == [ids(1, 2), ids(1, 2, 10, 7)]
    assert episode(0, SHORT, again).n_turns == 2


def test_gigpo_of_episodes_reaches_the_tokens_of_its_turns():
    """Outcomes 1, 0, 0, no discount, ω 1: A^E = 2/3, -1/3, -1/3; prompts are shared by all, the second state by two."""
    episodes, rewards = [episode(0, LONG), episode(1, ALIKE), episode(2, SHORT)], [1.0, 0.0, 0.0]
    got = credit.by_anchor(episodes, rewards, discount=1.0, weight=1.0, scale="none")
    assert_allclose(got[0, 0], [4 / 3, 2 / 3 + 1 / 2])
    assert_allclose(got[0, 1], [-2 / 3, -1 / 3 - 1 / 2])
    assert_allclose(got[0, 2], [-2 / 3])
    rewards = {(0, i): r for i, r in enumerate(rewards)}
    batch, _ = pack(episodes, got, rewards, rows=3, length=9, micro_rows=1, version=0, pad_id=0)
    found = {10: 4 / 3, 11: 4 / 3, 12: 7 / 6, 13: -2 / 3, 14: -5 / 6, 15: -2 / 3, 16: -2 / 3}
    want = np.vectorize(lambda token: found.get(token, 0.0))(batch.tokens)
    assert_allclose(batch.advantages, np.where(batch.action_mask, want, 0), rtol=1e-6)


def test_by_group():
    episodes = [episode(0, SHORT), episode(1, SHORT), episode(0, SHORT, ticket=1), episode(1, SHORT, ticket=1)]
    keys = [(0, 0), (0, 1), (1, 0), (1, 1)]
    got = credit.relative(episodes, [1.0, 0, 3, 5], scale="none")
    assert list(got) == keys and list(got.values()) == [0.5, -0.5, -1, 1]
    assert list(credit.leave_one_out(episodes, [1.0, 0, 3, 5]).values()) == [1, -1, -2, 2]
    assert credit.of_critic(episodes, [1.0, 0, 3, 5]) == dict.fromkeys(keys, 0.0)


def test_a_reward_is_dealt_to_turns_and_none_is_lost():
    term = RewardTerm("tidy", 0.5, "turn", lambda t: [0.2] * t.n_turns)
    whole = RewardTerm("outcome", 1.0, "episode", lambda t: 1.0)
    assert_allclose(credit.turn_rewards([episode(0, LONG)], [1.2], [whole, term]), [[0.1, 1.1]])
    assert_array_equal(credit.turn_rewards([episode(0, LONG)], [1.0]), [[0, 1]])
    assert credit.turn_rewards([episode(0)], [0.0])[0].shape == (0,)
    got = credit.by_process([episode(0, LONG), episode(1, SHORT)], [1.0, 0.1], scale="none", terms=[term])
    # steps .1, .9 and .1, mean 11/30
    assert_allclose(got[0, 0], [1.0 - 22 / 30, 0.9 - 11 / 30])
    assert_allclose(got[0, 1], [0.1 - 11 / 30])
    # a term may stop at the last turn that it pays
    found = dataclasses.replace(episode(0, LONG), facts={"success": True, "milestones": {"found": 0, "gold": None}})
    assert_allclose(credit.turn_rewards([found], [1.05], [whole, milestones_term(0.1)]), [[0.05, 1.0]])
    with pytest.raises(ValueError, match=r"'odd': got \(3,\) scores of 2 turns, want one for each turn"):
        credit.turn_rewards([episode(0, LONG)], [1.0], [RewardTerm("odd", 1.0, "turn", lambda t: [0.0] * 3)])
