"""Laws of giving episodes up: it is a failure whatever the world said; who is audited plays what it would have played;
the decision knows texts and an address and nothing else; who is left out changes nothing for the others but by absence.
"""

import contextlib
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.defaults import defaults
from launch import build
from launch.plan import make_plan
from launch.worlds import Placed
from models import heads, transformer
from rl import loop
from rl.credit import leave_one_out, relative
from rl.rewards.compose import RewardTerm, reward
from rl.rewards.outcome import success
from rl.rewards.terms import make_terms
from rl.rollout.abandon import NEVER, Abandonment, SoFar, audit, repeats, valued_below
from rl.rollout.values import Critic
from rl.types import Status
from tests.laws import test_learner as learning
from tests.rl.test_loop import draw, group
from tests.rl.test_reward_terms import episode
from tests.rl.test_worker import Env, Script, play, step

EXCLUDED = (Status.ABANDONED,)
# what is said and answered turn by turn, of few texts: they come again
TURNS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), min_size=1, max_size=7)


def played(turns, abandonment=NEVER, *, ends=True, clock=None, **options):
    """An episode of these actions and answers, in a world that claims success all along."""
    last = len(turns) - 1
    answers = [step(answer, done=ends and i == last, success=True) for i, (_, answer) in enumerate(turns)]
    script = Script(*(f"{action}$" for action, _ in turns))
    now = itertools.count() if clock is None else clock
    return play(
        Env(*answers, max_turns=len(turns)), script, abandonment=abandonment, clock=lambda: float(next(now)), **options
    )


def rules(k=2, share=0.0, seed=0):
    return Abandonment({"repeats": repeats(k)}, audit(seed, share))


@given(TURNS, st.integers(2, 3))
def test_what_was_given_up_is_a_failure_whatever_the_world_said(turns, k):
    trajectory = played(turns, rules(k))
    if trajectory.status is not Status.ABANDONED:
        assert trajectory.status is Status.DONE and trajectory.facts["success"] is True
        return
    assert trajectory.facts["success"] is False and success(trajectory) == 0
    assert trajectory.status.scored and trajectory.n_turns == trajectory.facts["abandonment"]["turns"] < len(turns)


@given(TURNS, st.integers(2, 3), st.booleans())
def test_audited_an_episode_is_what_it_would_have_been(turns, k, ends):
    """Ids, mask, logp, versions and status; only its facts say that it would have ended, and what that cost."""
    whole, audited, ended = (
        played(turns, how, ends=ends, call_deadline_s=99) for how in (NEVER, rules(k, share=1.0), rules(k))
    )
    assert audited.status is whole.status and audited.facts["success"] == whole.facts["success"]
    for got, want in zip(audited.rows, whole.rows, strict=True):
        for name in ("tokens", "turn", "action_mask", "behavior_logp", "version"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert ("abandonment" in audited.facts) == (ended.status is Status.ABANDONED)
    if ended.status is Status.ABANDONED:
        found = audited.facts["abandonment"]
        assert found["turns"] == ended.n_turns
        assert found["tokens"] == whole.n_actions - ended.n_actions == 2 * (len(turns) - ended.n_turns)
        assert found["s"] == 2 * (len(turns) - ended.n_turns)  # two readings of the clock a call, and one between
    assert "abandonment" not in whole.facts


@given(TURNS, st.integers(0, 20), st.integers(0, 3), st.integers(0, 5))
@settings(max_examples=50)
def test_the_decision_knows_texts_and_the_address_alone(turns, ticket, member, seed):
    """Not how long anything took: one clock runs even, the other stands still and leaps."""
    at = {"ticket": ticket, "member": member, "call_deadline_s": 1e9}
    how = rules(2, share=0.5, seed=seed)
    even, leaping = (
        played(turns, how, clock=clock, **at) for clock in (itertools.count(), itertools.cycle([0, 0, 1e6]))
    )
    assert even.status is leaping.status
    without = [{k: v for k, v in t.facts.get("abandonment", {}).items() if k != "s"} for t in (even, leaping)]
    assert without[0] == without[1]


def test_the_audit_is_a_share_of_the_members_addressed_by_seed_ticket_and_member():
    addresses = list(itertools.product(range(200), range(8)))
    found = {seed: [audit(seed, 0.25)(*at) for at in addresses] for seed in (0, 1)}
    assert found[0] == [audit(0, 0.25)(*at) for at in addresses] != found[1]
    for own in found.values():
        assert np.mean(own) == pytest.approx(0.25, abs=0.04)
        assert 20 < sum(len(set(own[i : i + 8])) > 1 for i in range(0, 1600, 8))  # not the whole group alike
    assert not any(audit(0, 0.0)(*at) for at in addresses) and all(audit(0, 1.0)(*at) for at in addresses)
    more = [audit(0, 0.5)(*at) for at in addresses]
    assert all(later or not now for now, later in zip(found[0], more, strict=True))


TERMS = make_terms(
    {"success": 1.0, "kimi_length": 0.05, "repetition": 0.05}, {}, {"repetition": {"ngram": 1}}, leader="success"
)
MEMBERS = st.lists(
    st.tuples(st.sampled_from([Status.DONE, Status.ABANDONED, Status.TURN_LIMIT]), st.booleans(), st.integers(1, 4)),
    min_size=2,
    max_size=6,
)


def members(played):
    return [episode([[1, 2, 1][:n]] * n, status, m, success=won) for m, (status, won, n) in enumerate(played)]


@given(MEMBERS)
def test_who_is_left_out_changes_nothing_for_the_others(played):
    everybody = members(played)
    others = [t for t in everybody if t.status not in EXCLUDED]
    seen = []
    judged, alone = (
        loop.judge(
            loop.Group(0, draw(0), tuple(own), False, 0),
            terms=TERMS,
            excluded=EXCLUDED,
            admit=lambda given: bool(seen.append([t.member for t in given]) or True),
        ).group.trajectories
        for own in (everybody, others)
    )
    assert len(judged) == len(everybody)
    compared = [t for t in judged if np.isfinite(reward(t))]
    assert [t.member for t in compared] == [t.member for t in others]
    for how in (leave_one_out, lambda *given: relative(*given, scale="std")):
        if len(others) > 1:
            assert how(compared, [reward(t) for t in compared]) == how(list(alone), [reward(t) for t in alone])
    assert all(own == [t.member for t in others] for own in seen)  # nor does the gate of the curriculum see them


@given(MEMBERS)
def test_a_group_is_compared_by_two_or_dropped(played):
    everybody = tuple(members(played))
    left = sum(t.status not in EXCLUDED for t in everybody)
    judged = loop.judge(loop.Group(0, draw(0), everybody, False, 0), terms=TERMS, excluded=EXCLUDED)
    assert judged.admitted == (not judged.group.dropped) == (left >= 2)
    assert not loop.judge(loop.Group(0, draw(0), everybody, False, 0), terms=TERMS).group.dropped  # as failures
    means = loop.group_means([judged.group], TERMS)
    if left < len(everybody):
        assert means["reward/success/not_judged_frac"].total == len(everybody) - left


@pytest.mark.parametrize("judged", [0, 1, 2, 4])
def test_whom_no_term_could_judge_is_nobody_to_be_compared_with(judged):
    """As where its world failed: a group of less than two takes no place in a batch."""
    everybody = tuple(episode(member=m) for m in range(4))
    asked = RewardTerm("judge", 1.0, "episode", lambda t: 1.0 if t.member < judged else np.nan)
    found = loop.judge(loop.Group(0, draw(0), everybody, False, 0), terms=[asked])
    assert found.admitted == (not found.group.dropped) == (judged >= 2)


def test_the_loop_refills_the_place_of_a_group_that_too_few_are_left_of():
    from tests.rl.test_loop import FakePool, run

    gone = group(0, [1.0, 0.0], statuses=[Status.DONE, Status.ABANDONED])
    whole = [group(t, [1.0, 0.0]) for t in (1, 2)]
    pool = FakePool([gone, *whole].__getitem__)
    _, _, [(trained, *_)], metrics = run(pool, excluded=EXCLUDED)
    assert [(t.ticket, t.member) for t in trained] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert metrics[1]["status/abandoned"].total == 1


def test_evaluation_gives_nothing_up(monkeypatch):
    """It has a pool of its own wherever training's may give episodes up."""
    made = []

    def pool(*given, **options):
        made.append(options)
        return SimpleNamespace(close=lambda: None, make_env=None, calls=None)

    monkeypatch.setattr(build, "Pool", pool)
    place, how = Placed(None, None), rules()
    config = defaults()
    for k in (0, 2):
        config.rollout.abandon.repeats = k
        plan = make_plan(config)
        training = build.build_pool(plan, None, place, None, abandonment=how)
        with build.evaluating(plan, None, training, None, None) as own:
            assert (own is training) == (k == 0)
    assert [options["abandonment"] for options in made] == [how, how, NEVER]


def test_an_evaluation_of_its_own_is_adapted_like_training(monkeypatch):
    adapted = []

    def adapting(engine, pool, **bounds):
        adapted.append((pool, bounds))
        return contextlib.nullcontext()

    monkeypatch.setattr(build, "Pool", lambda *given, **options: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(build, "adapting", adapting)
    training = SimpleNamespace(make_env=None, calls=None)
    config = defaults()
    config.rollout.abandon.repeats = 2
    for config.rollout.adaptive in (False, True):
        plan = make_plan(config)
        with build.evaluating(plan, None, training, None, None) as own:
            pass
    assert adapted == [(own, {"lanes": plan.engine.lanes, "cap": plan.rollout.threads})]


def test_scores_of_who_is_left_out_are_no_number_and_survive_storage():
    term = RewardTerm("one", 1.0, "episode", lambda t: 1.0)
    everybody = (episode(member=0), episode(status=Status.ABANDONED, member=1), episode(member=2))
    judged = loop.judge(loop.Group(0, draw(0), everybody, False, 0), terms=[term], excluded=EXCLUDED)
    again = type(everybody[0]).from_bytes(judged.group.trajectories[1].to_bytes())
    assert np.isnan(reward(again)) and again.status is Status.ABANDONED and judged.admitted


def test_the_state_that_a_critic_judges_is_what_the_next_turn_goes_on_from():
    """Its V is the learner's of the first token of that turn, in any padding and company, of the weights published."""
    states = []

    def value(asked):
        states.extend(asked)
        return [1.0] * len(asked)

    trajectory = played([("a", "x"), ("b", "y"), ("a", "x")], Abandonment({"value": valued_below(0.5, value)}))
    (row,) = trajectory.rows
    starts = [int(np.argmax(row.turn == k)) for k in (1, 2)]  # of a turn: its tokens precede the world's
    assert states == [row.tokens[:at].tolist() for at in starts] and row.action_mask[starts].all()

    tokens = np.random.default_rng(0).integers(1, 64, 24)
    for key in (0, 1):
        params = learning.params() | {"value_head": random_head(key)}
        hidden = transformer.apply(
            params, learning.CONFIG, tokens[None], np.ones((1, 24), np.int32), np.arange(24)[None]
        )
        want = np.asarray(heads.value(params["value_head"], hidden, np.ones((1, 24), np.int32)))[0]
        if key == 0:
            critic = Critic(learning.CONFIG, params, 1, after=1, lengths=(12, 24), rows=2, pad_id=0)
        else:
            critic.publish(params, 2)
        asked = [tokens[:n].tolist() for n in (5, 23, 3, 11, 12, 24)]
        np.testing.assert_allclose(critic(asked), [want[n] for n in (5, 23, 3, 11, 12)] + [np.nan], rtol=1e-4)
        np.testing.assert_allclose(critic(asked[:1]), want[5], rtol=1e-4)
    with pytest.raises(ValueError, match="want a value_head"):
        Critic(learning.CONFIG, learning.params(), 0, after=0, lengths=(12,), rows=2, pad_id=0)


def test_a_critic_that_has_not_been_trained_gives_nothing_up():
    """A head of zeros is below every threshold: believed at once, it would end every episode, and learn from that."""
    params = learning.params() | {"value_head": random_head(0)}
    critic = Critic(learning.CONFIG, params, 0, after=2, lengths=(12,), rows=2, pad_id=0)
    ends = valued_below(np.inf, critic)
    spoken = []
    for version in (0, 1, 2, 3):
        critic.publish(params, version)
        spoken.append(ends(SoFar([("a", "x")], episode, lambda: [3, 4, 5])))
    assert spoken == [False, False, True, True]


def random_head(key):
    weight = jax.random.normal(jax.random.key(key), (learning.CONFIG.d_model,))
    return {"weight": weight, "bias": jnp.ones(())}
