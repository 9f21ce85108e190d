"""Episodes survive the disk exactly, damage is told, and metrics add."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.types import Max, Mean, Row, Status, Trajectory, TrajectoryBatch


def row(tokens=(5, 6, 7), mask=(0, 1, 1)):
    mask = np.array(mask, bool)
    return Row(
        tokens=np.array(tokens, np.int32),
        turn=np.zeros(len(tokens), np.int32),
        action_mask=mask,
        behavior_logp=np.where(mask, -0.1, 0).astype(np.float32),
        version=np.where(mask, 3, -1).astype(np.int32),
    )


def trajectory(**changes):
    facts = {
        "success": True, "f1": 0.1 + 0.2, "nan": float("nan"), "answer": None, "text": "é<|end|>\x00", "big": 2**63,
        "pair": (1, [2, (3,)]), "np": np.float32(0.1), "flag": np.bool_(False), "f64": np.float64(1) / 3,
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3), "raw": b"\x00\xff", "by_int": {1: "a"},
    }  # fmt: skip
    kwargs = dict(task_id="t-1", ticket=4, member=2, status=Status.TURN_LIMIT, rows=(row(), row((1, 2), (0, 1))),
                  facts=facts, scores={"outcome": 0.0, "judge": float("nan")},
                  images={"shot-1": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)})  # fmt: skip
    return Trajectory(**kwargs | changes)


def same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        [same(a[k], b[k]) for k in a]
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        [same(x, y) for x, y in zip(a, b, strict=True)]
    elif dataclasses.is_dataclass(a):
        [same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b or (a != a and b != b)


@pytest.mark.parametrize("changes", [{}, {"images": None}, {"rows": ()}, {"rows": (row((), ()),)}, {"facts": {}}])
def test_round_trip_is_exact(changes):
    before = trajectory(**changes)
    after = Trajectory.from_bytes(before.to_bytes())
    same(before, after)
    assert before.to_bytes() == after.to_bytes()


def test_an_empty_text_of_numpy_comes_back():
    for empty in (np.array(["", "x"])[0], np.array([b"", b"x"])[0], np.array(["", ""]), np.zeros((0, 3))):
        after = Trajectory.from_bytes(trajectory(facts={"gold": empty}).to_bytes())
        same(empty, after.facts["gold"])


def test_every_damaged_byte_is_told():
    data = trajectory(images=None).to_bytes()
    for i in range(len(data)):
        with pytest.raises(ValueError, match="episode record"):
            Trajectory.from_bytes(data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :])
    for cut in (0, 3, 7, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="episode record"):
            Trajectory.from_bytes(data[:cut])


def test_a_fact_that_is_not_data_is_refused_by_name():
    with pytest.raises(TypeError, match="got set, want plain data"):
        trajectory(facts={"seen": {1}}).to_bytes()


def test_status():
    assert {s for s in Status if not s.scored} == {Status.ENV_ERROR, Status.CANCELLED} and len(Status) == 8


def test_row_refuses_what_it_does_not_mean():
    good = {f.name: getattr(row(), f.name) for f in dataclasses.fields(Row)}
    with pytest.raises(ValueError, match="Row.tokens: got int64.*want a 1-d array of int32"):
        Row(**good | {"tokens": np.array([1, 2, 3])})
    with pytest.raises(ValueError, match="Row.turn: got 2 entries, want 3"):
        Row(**good | {"turn": np.zeros(2, np.int32)})
    with pytest.raises(ValueError, match="nothing precedes the first token"):
        Row(**good | {"action_mask": np.ones(3, bool)})
    with pytest.raises(ValueError, match="version -1 wherever"):
        Row(**good | {"version": np.full(3, 3, np.int32)})


def test_means_and_maxima_add():
    both = Mean(10.0, 5) + Mean(12.0, 1)  # 22 / 6, not (2 + 12) / 2
    assert both.value == pytest.approx(22 / 6)
    assert np.isnan(Mean(0.0, 0).value)
    assert (Max(1.0) + Max(-2.0)).value == 1.0
    m = Mean(jnp.float32(3), jnp.float32(2))
    assert jax.tree.map(float, m + m.identity()) == Mean(3.0, 2.0)
    peak = Max(jnp.float32(-5))
    assert float((peak + peak.identity()).value) == -5.0
    assert jnp.isnan(jax.jit(lambda m: m.value)(Mean(jnp.float32(0), jnp.float32(0))))
    # a gradient through an empty mean is 0, not NaN
    grad = jax.grad(lambda x: jnp.nan_to_num(Mean(x, jnp.float32(0)).value))(jnp.float32(2))
    assert float(grad) == 0.0


def test_batch_is_a_pytree_with_room_for_absent_fields():
    x = jnp.zeros((2, 3))
    batch = TrajectoryBatch(x, x, x, x, x, x, x, x)
    assert len(jax.tree.leaves(batch)) == 8
    filled = dataclasses.replace(batch, ref_logp=x)
    assert len(jax.tree.leaves(jax.jit(lambda b: b)(filled))) == 9
