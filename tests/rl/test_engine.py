"""The engine's turns end where they should, its rows are never leaked, and no caller waits for ever."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import Sampling
from rl.rollout.engine import CapacityError, EngineError, request_key
from rl.rollout.weights import snapshot
from tests.models.weights import drawn
from tests.rl.engines import CONFIG, GREEDY, PROMPT, greedy_by_apply, in_thread, key, make_engine, slow, view


@pytest.fixture(scope="module")
def params():
    return drawn(CONFIG)


@pytest.fixture
def engine(params):
    engine = make_engine(params)
    yield engine
    engine.close()


@pytest.mark.parametrize("member", [0, 3, 2**31 + 1])
@pytest.mark.parametrize("ticket", [0, 17, 2**32 - 1])
def test_request_key_is_the_fold_in_chain(ticket, member):
    want = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), np.uint32(ticket)), np.uint32(member))
    np.testing.assert_array_equal(request_key(5, ticket, member), jax.random.key_data(want))


def test_greedy_equals_the_uncached_forward_over_turns(engine, params):
    session = engine.open(key(0), GREEDY)
    turn = session.generate(PROMPT, max_tokens=6)
    ids = greedy_by_apply(params, PROMPT, 6)
    assert (PROMPT + turn.ids, turn.reason, len(turn.logp), turn.version) == (ids, "length", 6, [0] * 6)
    turn = session.generate([1, 2, 3], max_tokens=9)
    assert session.ids == greedy_by_apply(params, ids + [1, 2, 3], 9)
    assert session.generate([], max_tokens=2).ids == greedy_by_apply(params, session.ids[:-2], 2)[-2:]


@pytest.mark.parametrize("prompt_tokens, max_tokens", [(40, 7), (40, 8), (40, 9), (46, 5), (47, 1)])
def test_capacity_ends_with_length_and_never_overwrites(engine, params, prompt_tokens, max_tokens):
    """CASES D7: prompt + max_tokens = capacity - 1, capacity, capacity + 1 and more."""
    prompt = [i * 7 % 61 for i in range(prompt_tokens)]
    session = engine.open(key(0), GREEDY)
    turn = session.generate(prompt, max_tokens=max_tokens)
    assert len(turn.ids) == min(max_tokens, 48 - prompt_tokens) and turn.reason == "length"
    assert session.ids == greedy_by_apply(params, prompt, len(turn.ids))


def test_over_long_prompt_is_refused_and_leaves_the_session_as_it_was(engine, params):
    session = engine.open(key(0), GREEDY)
    with pytest.raises(CapacityError, match="48 ids leave no room .*capacity"):
        session.generate([1] * 48, max_tokens=1)
    session.generate(PROMPT, max_tokens=3)
    with pytest.raises(CapacityError):
        session.generate([1] * 40, max_tokens=1)
    assert session.generate([1], max_tokens=2).ids == greedy_by_apply(params, session.ids[:-2], 2)[-2:]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 2, 4, 6])
def test_stop_string_keeps_the_crossing_token_and_forgets_the_rest(engine, params, at, width):
    """The string may lie inside a round, across two, or begin the turn; the session goes on as if nothing followed."""
    free = engine.open(key(3), Sampling(temperature=1.5)).generate(PROMPT, max_tokens=12)
    stop = view(free.ids[at : at + width])
    n = next(n for n in range(1, 13) if stop in view(free.ids[:n]))
    session = engine.open(key(3), Sampling(temperature=1.5))
    turn = session.generate(PROMPT, max_tokens=12, stop=("never seen", stop))
    assert (turn.ids, turn.reason) == (free.ids[:n], "stop")
    np.testing.assert_array_equal(turn.logp, free.logp[:n])
    # A stop string counts in the turn's own text alone: it is not found in what came before.
    session.sampling = GREEDY
    assert (session.generate([1], max_tokens=4).ids) == greedy_by_apply(params, PROMPT + free.ids[:n] + [1], 4)[-4:]


def test_end_id_is_kept_and_ends_the_turn(params):
    free = make_engine(params)
    ids = free.open(key(3), Sampling()).generate(PROMPT, max_tokens=12).ids
    free.close()
    engine = make_engine(params, end_ids=(ids[5],))
    n = ids.index(ids[5]) + 1
    turn = engine.open(key(3), Sampling()).generate(PROMPT, max_tokens=12, stop=(view([ids[5]]),))
    assert (turn.ids, turn.reason) == (ids[:n], "stop")
    engine.close()


def test_group_members_differ_under_flat_logits(params):
    """CASES D3: 64 equal logits, 8 members, 20 tokens: two equal ones would be chance 64^-20."""
    engine = make_engine(jax.tree.map(jnp.zeros_like, params), residents=8)
    sessions = [engine.open(request_key(0, 0, member), Sampling()) for member in range(8)]
    assert len({tuple(s.generate(PROMPT, max_tokens=20).ids) for s in sessions}) == 8
    engine.close()


def test_fork_continues_as_its_parent_would(engine):
    parent = engine.open(key(1), Sampling())
    parent.generate(PROMPT, max_tokens=3)
    before = engine.stats()["tokens_prefilled"]
    twin, other = parent.fork(2, keys=[key(1), key(2)])
    turns = [s.generate([4, 4], max_tokens=8) for s in (parent, twin, other)]
    assert turns[0] == turns[1] and turns[0].ids != turns[2].ids
    assert engine.stats()["tokens_prefilled"] - before == 3 * 2  # the last sampled token and 4: no prompt again
    with pytest.raises(TimeoutError, match="3 of 4 sessions are open after 0.01 s, no place for 2 more"):
        twin.fork(2, timeout_s=0.01)
    parent.close()
    a, b = (s.generate([1], max_tokens=8).ids for s in twin.fork(2))
    assert a != b


def test_sessions_beyond_the_residents_lend_rows_and_go_on_as_if_they_had_stayed(params):
    """The one that was idle for longest gives its row up, and its KV is computed again before its next token."""
    engine = make_engine(params, lanes=2, residents=2, sessions=5)
    try:
        sessions = [engine.open(key(i), GREEDY) for i in range(5)]
        ids = [[7 * i + j for j in range(3)] for i in range(5)]
        for turn in range(3):
            for session, own in zip(sessions, ids, strict=True):
                own += [turn, 1, *session.generate([*(own if turn == 0 else []), turn, 1], max_tokens=4).ids]
        assert [s.ids for s in sessions] == ids
        for own in ids:
            assert own == grown(params, own)
        assert engine.stats()["evictions"] == 13 and engine.stats()["free_rows"] == 0
        assert [s.row is not None for s in sessions] == [False] * 3 + [True] * 2
    finally:
        engine.close()


def grown(params, ids):
    """The ids of an episode of the test above, from its prompt of three: greedy after [turn, 1] thrice."""
    own = ids[:3]
    for turn in range(3):
        own = greedy_by_apply(params, [*own, turn, 1], 4)
    return own


def test_turns_that_begin_together_share_their_programs(params, monkeypatch):
    """Sessions that ask at once, and again when they are answered at once, are never each other's next program."""
    monkeypatch.setattr("rl.rollout.engine.ASKING_S", 1.0)
    engine = make_engine(params, prefill_rows=4, lanes=4)
    try:
        engine.warm_up(truncated=False)
        sessions = [engine.open(key(i), GREEDY) for i in range(3)]

        def talk(session, i):
            for _ in range(2):
                session.generate([*PROMPT, i], max_tokens=4)

        calls = [in_thread(lambda s=s, i=i: talk(s, i)) for i, s in enumerate(sessions)]
        for thread, out in calls:
            thread.join(60)
            assert out == [None]
        stats = engine.stats()
        assert (stats["prefills"], stats["rounds"], stats["tokens_kept"]) == (2, 2, 24)
    finally:
        engine.close()


def test_members_of_a_group_share_one_prefill_of_their_prompt(params, monkeypatch):
    prompt = [i * 11 % 61 for i in range(20)]

    def ran(prompts, residents):
        engine = make_engine(params, lanes=3, residents=residents, sessions=max(residents, 6))
        gate = threading.Event()
        hold, _ = in_thread(
            lambda: engine._commands.run(lambda: gate.wait(30))
        )  # all calls arrive before the first plan
        sessions = [engine.open(key(i), Sampling()) for i in range(6)]
        calls = [
            in_thread(lambda s=s, p=p: s.generate(p, max_tokens=9)) for s, p in zip(sessions, prompts, strict=True)
        ]
        while engine.stats()["requests"] < 6:
            time.sleep(0.001)
        gate.set()
        for thread in (hold, *(thread for thread, _ in calls)):
            thread.join(60)
        stats = engine.stats()
        late = engine.open(key(0), Sampling(), timeout_s=1) if residents > 6 else None
        again = late.generate(prompts[0], max_tokens=9) if late else calls[0][1][0]
        assert again == calls[0][1][0]  # a latecomer finds the leader's row, which has gone on
        late = stats["tokens_prefilled"] if late is None else engine.stats()["tokens_prefilled"]
        engine.close()
        return [out[0] for _, out in calls], stats, late

    turns, stats, after = ran([prompt] * 6, 7)
    assert (stats["tokens_prefilled"], stats["tokens_copied"], stats["copies"], after) == (19, 5 * 19, 5, 19)
    other, apart, _ = ran([prompt[:19] + [i] if i else prompt for i in range(6)], 7)
    assert apart["copies"] == 5  # they differ in the last id alone, which is not cached before it is sampled after
    assert turns[0] == other[0] and len({tuple(t.ids) for t in turns}) == 6
    alone, none, _ = ran([prompt, *([i, *prompt[1:]] for i in range(1, 6))], 6)
    assert none["copies"] == 0 and alone[0] == turns[0]
    few, _, _ = ran([prompt] * 6, 3)  # some find no row at first
    assert few == turns


def test_deadline_ends_the_turn_with_what_there_is(engine, monkeypatch, params):
    session = engine.open(key(0), GREEDY)
    session.generate(PROMPT, max_tokens=2)
    with monkeypatch.context() as patch:
        slow(engine, patch, 0.2)
        turn = session.generate([1, 2], max_tokens=20, deadline_s=0.3)
        none = session.generate([], max_tokens=20, deadline_s=0.05)
    assert (turn.reason, none.reason, none.ids) == ("time", "time", []) and len(turn.ids) in (0, 4, 8)
    assert session.ids == greedy_by_apply(params, [*session.ids[:9]], len(turn.ids))
    assert session.generate([3], max_tokens=5).ids == greedy_by_apply(params, session.ids[:-5], 5)[-5:]


def test_a_cancelled_turn_keeps_its_tokens_and_its_session(engine, monkeypatch, params):
    with monkeypatch.context() as patch:
        slow(engine, patch, 0.05)
        session = engine.open(key(0), GREEDY)
        thread, out = in_thread(lambda: session.generate(PROMPT, max_tokens=40))
        while not engine.stats()["rounds"]:
            time.sleep(0.001)
        session.cancel()
        thread.join(5)
    assert out[0].reason == "cancelled" and 0 < len(out[0].ids) < 40
    session.cancel()  # nothing in flight: nothing happens
    assert session.generate([3], max_tokens=5).ids == greedy_by_apply(params, session.ids[:-5], 5)[-5:]


def test_forked_children_keep_what_they_were_given(params):
    """A child that waits for its world is no longer idle than its parent."""
    engine = make_engine(params, lanes=2, residents=4, sessions=8)
    try:
        old = [engine.open(key(i), GREEDY) for i in range(3)]
        for session in old:
            session.generate(PROMPT, max_tokens=2)
        parent = engine.open(key(5), GREEDY)
        parent.generate(PROMPT * 2, max_tokens=2)
        children = parent.fork(3)
        assert all(child.row is not None and child._cached for child in children)
        assert [s.row for s in old] == [None] * 3 and parent.row is not None
    finally:
        engine.close()


def test_a_session_closed_by_another_thread_ends_its_call(engine, monkeypatch, params):
    slow(engine, monkeypatch)
    session = engine.open(key(0), GREEDY)
    thread, out = in_thread(lambda: session.generate(PROMPT, max_tokens=40))
    while not engine.stats()["rounds"]:
        time.sleep(0.001)
    session.close()
    thread.join(5)
    assert out[0].reason == "cancelled" and engine.stats()["free_rows"] == 4
    new = engine.open(key(0), GREEDY)  # its row is used again at once, whatever a late round still writes
    assert new.generate([3, 1], max_tokens=9).ids == greedy_by_apply(params, [3, 1], 9)[2:]


def test_a_command_that_raises_leaves_no_caller_waiting(params):
    """The one that queued it, those behind it, and those that come later."""
    engine = make_engine(params)
    started, go = threading.Event(), threading.Event()

    def hold():
        started.set()
        go.wait(10)

    def fail():
        raise FloatingPointError("chip on fire")

    first, first_out = in_thread(lambda: engine._commands.run(hold))
    started.wait(10)
    before = len(engine._commands)
    callers = [in_thread(lambda c=c: engine._commands.run(c)) for c in (fail, fail, fail)]
    while len(engine._commands) < before + 3:
        time.sleep(0.001)
    go.set()
    first.join(5)
    for thread, out in callers:
        thread.join(5)
        assert not thread.is_alive() and isinstance(out[0], EngineError) and "chip on fire" in str(out[0])
    with pytest.raises(EngineError):
        engine.warm_up()
    engine.close()


def test_what_is_planned_after_publish_has_its_weights(engine, params):
    """Weights that come while the thread is busy with commands are those of the next round."""
    session, callers = engine.open(key(0), GREEDY), []

    def command():
        callers.append(in_thread(lambda: session.generate([5], max_tokens=3)))  # one id: no prefill before its round
        while not engine.stats()["requests"]:
            time.sleep(0.001)
        engine.publish(params, 1)

    engine._commands.run(command)
    thread, out = callers[0]
    thread.join(30)
    assert out[0].version == [1, 1, 1]


def test_a_dead_thread_reaches_every_caller(params, monkeypatch):
    engine = make_engine(params)
    sessions = [engine.open(key(i), GREEDY) for i in range(4)]
    blocked, opened = in_thread(lambda: engine.open(key(8), GREEDY))

    def broken(*args, **kwargs):
        raise FloatingPointError("chip on fire")

    monkeypatch.setattr(engine._rounds.device, "decode", broken)
    callers = [in_thread(lambda s=s: s.generate(PROMPT, max_tokens=4)) for s in sessions]
    for thread, out in [*callers, (blocked, opened)]:
        thread.join(5)
        assert isinstance(out[0], EngineError) and "chip on fire" in str(out[0])
    for call in (
        lambda: engine.open(key(0), GREEDY),
        lambda: engine.publish(params, 1),
        lambda: sessions[0].generate([1], max_tokens=1),
        engine.warm_up,
    ):
        with pytest.raises(EngineError, match="FloatingPointError: chip on fire"):
            call()
    engine.close()
    assert engine.stats()["sessions"] == 0


def test_errors_name_got_and_wanted(engine, params):
    session = engine.open(key(0), GREEDY)
    for message, call in {
        "max_tokens=0": lambda: session.generate([1], max_tokens=0),
        "from 3 to 64, want 0 to 63": lambda: session.generate([3, 64], max_tokens=1),
        "no ids for an empty session": lambda: session.generate([], max_tokens=1),
        "non-empty": lambda: session.generate([1], max_tokens=1, stop=("",)),
        "want uint32": lambda: engine.open(np.zeros(3, np.uint32), GREEDY),
        "got version 0, want more than 0": lambda: engine.publish(params, 0),
        "contexts=": lambda: make_engine(params, contexts=(16, 32)),
        "lanes=5": lambda: make_engine(params, lanes=5),
        "sessions=3": lambda: make_engine(params, sessions=3),
        "waiting=-1": lambda: make_engine(params, waiting=-1),
        "kv_on_update='keeps'": lambda: make_engine(params, kv_on_update="keeps"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_snapshot_survives_the_donation_of_its_source():
    params = {"w": jnp.arange(4.0), "n": jnp.arange(3)}
    kept = snapshot(params, 3)
    jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(params)
    np.testing.assert_array_equal(kept.params["w"], [0, 1, 2, 3])
    assert kept.params["n"].dtype == jnp.int32 and kept.version == 3
