"""A packed batch is its episodes, token for token, in any order of arrival; padding stays low."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.rollout.batcher import assign, pack
from rl.types import Row, Status, Trajectory


def row(n, actions, version=3, first=100):
    mask = np.zeros(n, bool)
    mask[list(actions)] = True
    return Row(
        tokens=np.arange(first, first + n, dtype=np.int32),
        turn=np.zeros(n, np.int32),
        action_mask=mask,
        behavior_logp=np.where(mask, -0.5, 0).astype(np.float32),
        version=np.where(mask, version, -1).astype(np.int32),
    )


def episode(ticket, member, *rows, status=Status.DONE):
    return Trajectory(f"task-{ticket}", ticket, member, status, rows, {"success": True}, {})


SHAPE = {"rows": 4, "length": 8, "micro_rows": 2, "version": 5, "pad_id": 9}


def test_worked_example():
    # lengths 5, 3, 4 in rows of 8: the 5 opens row 0, the 4 row 1, the 3 fills row 0; two rows used, 12 of 16 places
    episodes = [episode(0, 0, row(3, [1, 2], first=10)), episode(0, 1, row(5, [2, 4], version=4, first=20)),
                episode(1, 0, row(4, [3], version=5, first=30))]  # fmt: skip
    advantage = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.5}
    reward = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.25}
    batch, stats = pack(episodes, advantage, reward, **SHAPE)
    np.testing.assert_array_equal(batch.tokens[:2], [[20, 21, 22, 23, 24, 10, 11, 12], [30, 31, 32, 33, 9, 9, 9, 9]])
    np.testing.assert_array_equal(batch.segment[:2], [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.position[:2], [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.action_mask[:2], [[0, 0, 1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.staleness[:2], [[0, 0, 1, 0, 1, 0, 2, 2], [0] * 8])  # 5 - 4, 5 - 3, 5 - 5
    np.testing.assert_array_equal(batch.advantages[:2], [[0, 0, -2, 0, -2, 0, 1, 1], [0, 0, 0, 0.5, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.rewards[:2], [[0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0.25, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.behavior_logp[:2] != 0, batch.action_mask[:2])
    assert (batch.tokens[2:] == 9).all() and not batch.segment[2:].any() and not batch.action_mask[2:].any()
    assert stats == {"rows": 2, "micro_batches": 1, "episodes": 3, "tokens": 12, "action_tokens": 5, "pad_frac": 0.25}


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(2, 40), min_size=0, max_size=30))
    actions = [sorted(draw(st.sets(st.integers(1, n - 1), min_size=1))) for n in lengths]
    return [episode(i // 4, i % 4, row(n, actions[i], version=i % 6, first=i * 50)) for i, n in enumerate(lengths)]


@given(batches(), st.randoms())
def test_every_token_is_there_once_and_order_does_not_matter(episodes, random):
    numbers = {(t.ticket, t.member): float(t.ticket + 10 * t.member + 1) for t in episodes}
    shape = {"rows": 32, "length": 40, "micro_rows": 4, "version": 7, "pad_id": 0}
    batch, stats = pack(episodes, numbers, numbers, **shape)
    shuffled = list(episodes)
    random.shuffle(shuffled)
    again, _ = pack(shuffled, numbers, numbers, **shape)
    for name in ("tokens", "segment", "position", "action_mask", "behavior_logp", "staleness", "rewards", "advantages"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(again, name))
    # take the batch apart again
    found = {}
    for b in range(32):
        numbered = batch.segment[b]
        assert sorted(set(numbered) - {0}) == list(range(1, numbered.max() + 1))
        for s in range(1, numbered.max() + 1):
            (at,) = np.nonzero(numbered == s)
            assert (np.diff(at) == 1).all()
            np.testing.assert_array_equal(batch.position[b, at], np.arange(len(at)))
            found[int(batch.tokens[b, at[0]])] = (b, at)
    assert len(found) == len(episodes)
    for t in episodes:
        (r,), (b, at) = t.rows, found[int(t.rows[0].tokens[0])]
        mask, number = r.action_mask, numbers[t.ticket, t.member]
        np.testing.assert_array_equal(batch.tokens[b, at], r.tokens)
        np.testing.assert_array_equal(batch.action_mask[b, at], mask)
        np.testing.assert_array_equal(batch.behavior_logp[b, at], r.behavior_logp)
        np.testing.assert_array_equal(batch.staleness[b, at], np.where(mask, 7 - r.version, 0))
        np.testing.assert_array_equal(batch.advantages[b, at], np.where(mask, np.float32(number), 0))
        assert batch.rewards[b, at].sum() == np.float32(number) and batch.rewards[b, at[np.nonzero(mask)[0][-1]]] != 0
    valid = batch.segment > 0
    filled = valid.any(1)
    assert not filled[stats["rows"] :].any() and (np.diff(filled.astype(int)) <= 0).all()  # the used rows come first
    assert stats["rows"] - filled.sum() < 4
    assert stats["tokens"] == valid.sum() and stats["action_tokens"] == batch.action_mask.sum()


@pytest.mark.parametrize("length, micro_rows", [(384, 4), (512, 4), (384, 8)])
def test_padding_of_a_real_batch(length, micro_rows):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        episodes = [episode(i // 8, i % 8, row(int(rng.integers(60, 251)), [5, 9])) for i in range(120)]
        zero = {(t.ticket, t.member): 0.0 for t in episodes}
        _, stats = pack(episodes, zero, zero, rows=96, length=length, micro_rows=micro_rows, version=3, pad_id=0)
        assert stats["pad_frac"] <= 0.15, stats


@pytest.mark.parametrize("minibatches, micro_rows", [(2, 1), (3, 2), (4, 2), (4, 8)])
def test_each_minibatch_is_a_like_share_of_the_batch(minibatches, micro_rows):
    """Of as many episodes, and about as long ones, each in one of them alone; 2 of 100 are left out."""
    rng = np.random.default_rng(minibatches)
    lengths = np.clip((80 * np.exp(0.8 * rng.standard_normal(100))).astype(int), 4, 500)
    status = [Status.ENV_ERROR if i in (5, 50) else Status.DONE for i in range(100)]
    episodes = [episode(3 + i // 8, i % 8, row(n, [1]), row(4, [2]), status=status[i]) for i, n in enumerate(lengths)]
    zero = {(t.ticket, t.member): 0.0 for t in episodes}
    shape = {"rows": 192, "length": 512, "micro_rows": micro_rows, "version": 3, "pad_id": 0, "chains": True}
    batch, stats = pack(episodes, zero, zero, **shape, minibatches=minibatches)
    again, _ = pack(episodes[::-1], zero, zero, **shape, minibatches=minibatches)
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    of = np.arange(192) // micro_rows % minibatches  # as the learner takes them
    own = [set(batch.episode[of == part][batch.segment[of == part] > 0].tolist()) for part in range(minibatches)]
    assert stats["episodes"] == 98 == sum(map(len, own)) == len(set.union(*own))
    assert max(map(len, own)) - min(map(len, own)) <= 1
    tokens = [(batch.segment[of == part] > 0).sum() for part in range(minibatches)]
    assert max(tokens) < 1.6 * min(tokens), tokens  # longest first they would be 3 to 6 times
    assert not batch.segment[stats["rows"] :].any()


def test_processes_with_few_episodes_do_not_begin_with_the_same_minibatch():
    zero = {(ticket, 0): 0.0 for ticket in (4, 5, 6, 7)}
    shape = {"rows": 8, "length": 8, "micro_rows": 2, "version": 3, "pad_id": 0, "minibatches": 4}
    packed = [pack([episode(ticket, 0, row(4, [1]))], zero, zero, **shape)[0] for ticket in (4, 5, 6, 7)]
    assert [int(np.nonzero(batch.segment.any(1))[0][0]) for batch in packed] == [0, 2, 4, 6]


def test_best_fit_uses_no_more_rows_than_needed():
    row_of, start_of = assign(np.array([6, 5, 4, 3, 2]), 10)  # 6+4, 5+3+2
    assert row_of.tolist() == [0, 1, 0, 1, 1]
    assert start_of.tolist() == [0, 0, 6, 5, 8]


def test_what_adds_no_loss_is_left_out():
    numbers = {(0, 0): 1.0, (0, 1): -1.0}
    episodes = [
        episode(0, 0, row(4, [2])),
        episode(0, 1, row(4, [])),
        episode(0, 2, row(4, [1]), status=Status.ENV_ERROR),
        episode(0, 3, status=Status.CANCELLED),
    ]
    batch, stats = pack(episodes, numbers, numbers, **SHAPE)
    assert stats["episodes"] == 1 and stats["tokens"] == 4 and batch.action_mask.sum() == 1


def test_a_token_older_than_the_bound_is_a_broken_gate():
    numbers = {(0, 0): 0.0}
    episodes = [episode(0, 0, row(4, [1, 2], version=3))]
    pack(episodes, numbers, numbers, **SHAPE)  # unchecked
    pack(episodes, numbers, numbers, **SHAPE, max_staleness=2)
    with pytest.raises(AssertionError, match="2 versions old at version 5, want at most max_staleness=1"):
        pack(episodes, numbers, numbers, **SHAPE, max_staleness=1)
    pack([], {}, {}, **SHAPE, max_staleness=0)


def test_an_episode_of_two_rows_has_its_reward_once():
    batch, stats = pack([episode(0, 0, row(4, [2]), row(3, [1, 2]))], {(0, 0): 2.0}, {(0, 0): 1.0}, **SHAPE)
    assert batch.rewards.sum() == 1 and batch.advantages.sum() == 6 and stats["episodes"] == 1


def test_rows_of_an_episode_are_segments_that_share_it():
    episodes = [episode(0, 0, row(4, [2], first=10), row(3, [1, 2], first=20), row(3, [], first=30)),
                episode(0, 1, row(5, [4], first=40))]  # fmt: skip
    numbers = {(0, 0): 1.0, (0, 1): 2.0}
    batch, stats = pack(episodes, numbers, numbers, **SHAPE)
    # lengths 4, 3, 5 in rows of 8: 5 + 3 and 4; the row without an action is left out
    np.testing.assert_array_equal(batch.tokens[:2], [[40, 41, 42, 43, 44, 20, 21, 22], [10, 11, 12, 13, 9, 9, 9, 9]])
    np.testing.assert_array_equal(batch.segment[:2], [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]])
    third = np.float32(1) / 3  # of the three actions of episode (0, 0)
    np.testing.assert_array_equal(
        batch.episode_share[:2], [[0, 0, 0, 0, 1, 0, third, third], [0, 0, third, 0, 0, 0, 0, 0]]
    )
    assert batch.episode_share.dtype == np.float32 and not batch.episode_share[2:].any()
    assert stats["episodes"] == 2 and stats["tokens"] == 12 and stats["action_tokens"] == 4
    one = pack([episodes[1]], numbers, numbers, **SHAPE)[0]
    assert one.episode_share is None  # as it was before there were such episodes: nothing else is compiled
    assert pack([episodes[1]], numbers, numbers, **SHAPE, shares=True)[0].episode_share.sum() == 1


def test_an_advantage_a_turn_and_what_a_critic_follows():
    """Turns go on over the rows of an episode; an episode has one number in all its rows."""
    first, second = (dataclasses.replace(row(4, a), turn=np.array(t, np.int32)) for a, t in (
        ([1, 3], [-1, 0, 0, 1]), ([3], [-1, -1, -1, 2])))  # fmt: skip
    episodes = [episode(0, 0, first, second), episode(3, 1, row(3, [2], first=10))]
    advantage = {(0, 0): np.array([1.0, -2, 4]), (3, 1): 0.5}
    batch, _ = pack(episodes, advantage, {(0, 0): 1.0, (3, 1): 0.0}, **SHAPE, chains=True)
    np.testing.assert_array_equal(batch.advantages[:2], [[0, 1, 0, -2, 0, 0, 0, 4], [0, 0, 0.5, 0, 0, 0, 0, 0]][:2])
    np.testing.assert_array_equal(batch.turn[:2], [[-1, 0, 0, 1, -1, -1, -1, 2], [0] * 8])
    number = 3 * 2**16 + 1
    np.testing.assert_array_equal(batch.episode[:2], [[0] * 8, [number] * 3 + [0] * 5])
    assert batch.turn.dtype == batch.episode.dtype == np.int32
    plain = pack(episodes, advantage, {(0, 0): 1.0, (3, 1): 0.0}, **SHAPE)[0]
    assert plain.turn is None and plain.episode is None
    with pytest.raises(ValueError, match=r"episode \(0, 0\): got advantages of shape \(2,\), want one number, or 3"):
        pack(episodes, advantage | {(0, 0): np.zeros(2)}, {(0, 0): 1.0, (3, 1): 0.0}, **SHAPE)


def test_nothing_to_train_is_an_empty_batch():
    batch, stats = pack([], {}, {}, **SHAPE)
    assert batch.tokens.shape == (4, 8) and stats["rows"] == 0 and stats["pad_frac"] == 0


@pytest.mark.parametrize(
    "episodes, change, message",
    [
        ([episode(0, 0, row(9, [1]))], {}, "got an episode with a row of 9 tokens, want at most 8"),
        (
            [episode(0, i, row(8, [1])) for i in range(5)],
            {},
            "in 5 rows of 5 episodes, which fill 6 packed rows of 8, want at most 4",
        ),
        ([episode(0, 0, row(4, [1]))] * 2, {}, r"two episodes of \(ticket, member\) \(0, 0\)"),
        ([episode(7, 0, row(4, [1]))], {}, r"episode \(7, 0\) \(DONE\) has no advantage"),
        ([episode(0, 0, row(4, [1], version=6))], {}, "sampled at version 6, want at most the learner's 5"),
        ([], {"micro_rows": 3}, "want rows to be a multiple of micro_rows"),
    ],
)
def test_errors(episodes, change, message):
    numbers = {(0, i): 0.0 for i in range(5)}
    with pytest.raises(ValueError, match=message):
        pack(episodes, numbers, numbers, **SHAPE | change)
