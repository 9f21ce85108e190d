"""Law: a roll-in from turn k has exactly the stored ids up to there, whatever the template rewrites on the way.

The policy's session reads those ids and no others before it samples; where it samples what was sampled then, the whole
episode is the stored one again; and where the world answers otherwise there is no label.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from rl.rollout.roll_in import RollIn, roll_in, starts_of, success_frac
from rl.types import Status, Trajectory
from tests.laws.test_rows import TASK, Script, World, codec, ids_of, play, texts, turns


@pytest.mark.parametrize(("name", "role"), [("qwen3", "user"), ("keeps_last", "tool")])
@settings(max_examples=12)
@given(turns, st.lists(texts, min_size=5, max_size=5))
def test_a_roll_in_has_exactly_the_stored_ids_and_then_goes_on(name, role, turns, said):
    own, said = codec(name), said[: len(turns)]
    ids = [ids_of(own, turn) or [own.end_ids[0]] for turn in turns]
    live = Script(own, ids)
    stored = play(own, live, World(said), role)
    assert starts_of(stored) == list(range(1, len(turns)))
    for n in starts_of(stored):
        session, world = Script(own, ids[n:]), World(said)
        again = play(own, RollIn(session, stored, n), world, role)
        # what it had read when it first sampled: the row so far, id by id
        (at, place), (row, then) = session.spans[0], live.spans[n]
        assert session.rows[at][:place] == stored.rows[row].tokens[:then].tolist() and place == then
        assert session.sampled == live.sampled[n:]  # it sampled the rest alone
        assert session.restarts == live.restarts[max(0, row - 1) :]  # and with the keys that it would have had
        assert again.status is Status.DONE and world.said == said
        for a, b in zip(again.rows, stored.rows, strict=True):
            for field in ("tokens", "turn", "action_mask"):
                assert_array_equal(getattr(a, field), getattr(b, field))


def test_another_answer_of_the_world_is_no_label():
    own = codec("silent")
    ids = [own.encode_action(text) + [own.end_ids[0]] for text in ("Peru", "Lima", "Lima")]
    stored = play(own, Script(own, ids), World(["a", "b", "c"]))
    session = Script(own, ids[2:])
    changed = play(own, RollIn(session, stored, 2), World(["a", "another", "c"]))
    assert changed.status is Status.ENV_ERROR and session.sampled == []
    assert "turn 2 reads other ids than it did" in changed.facts["error"]
    with pytest.raises(ValueError, match="roll-in: got 3 turns of an episode of 3, want 1 to all but one"):
        RollIn(session, stored, 3)
    # by ticket, as a pool asks for it
    limits = {"max_turn_tokens": 60, "max_tokens": 4000, "call_deadline_s": 60.0}
    episode = roll_in({5: (stored, 1), 6: (stored, 2)})
    again = episode(World(["a", "b", "c"]), TASK, own, Script(own, ids[2:]), ticket=6, member=3, **limits)
    assert (again.ticket, again.member, again.status) == (6, 3, Status.DONE)


def test_a_soft_label_is_the_share_of_what_was_scored():
    def ended(success, status=Status.DONE):
        return Trajectory("t", 0, 0, status, (), {"success": success}, {})

    some = [ended(True), ended(False), ended(True, Status.TURN_LIMIT), ended(True), ended(True, Status.ENV_ERROR)]
    assert success_frac(some) == 0.5
    assert success_frac([ended(True)]) == 1 and str(success_frac(some[-1:])) == "nan"
