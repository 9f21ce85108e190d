"""Laws of the heads: packed equals one a row, padding and other segments change nothing, and the caller alone decides
whether the trunk learns. Worked numbers first.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models import heads, lora, transformer
from models.config import HEADS, Lora, ModelConfig
from models.sharding import make_mesh, shardings

CONFIG = ModelConfig(vocab_size=40, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)


def test_a_value_is_that_of_the_state_before_the_token():
    head = {"weight": jnp.array([1.0, -2.0]), "bias": jnp.array(0.5)}
    hidden = jnp.array([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [3.0, 0.0], [9.0, 9.0]]])
    segment = jnp.array([[1, 1, 1, 2, 0]])
    # w·h + b = 1.5, -1.5, -1.5, ...: each one token later; nothing stands before the first token of a segment
    assert_array_equal(heads.value(head, hidden, segment), [[0.0, 1.5, -1.5, 0.0, 0.0]])


def test_an_outcome_is_the_logit_difference_at_the_last_token():
    head = {"weight": jnp.array([[1.0, 0.5], [0.0, 2.0]]), "bias": jnp.array([0.25, 1.0])}
    hidden = jnp.array([[[9.0, 9.0], [2.0, 1.0], [4.0, 0.0], [9.0, 9.0]]])
    logit, last = heads.orm(head, hidden, jnp.array([[1, 1, 2, 0]]))
    # yes 2 + .25, no 1 + 2 + 1: -1.75;  yes 4.25, no 3: 1.25
    assert_array_equal(logit, [[0.0, -1.75, 1.25, 0.0]])
    assert_array_equal(last, [[False, True, True, False]])
    p_yes = jax.nn.softmax(hidden[0, 1] @ head["weight"] + head["bias"])[0]
    assert_allclose(jax.nn.sigmoid(logit[0, 1]), p_yes, rtol=1e-6)


def test_a_turn_is_judged_at_its_last_sampled_token():
    # prompt 2, turn 0: sampled 3, world 2; turn 1: sampled, forced, sampled, glue | prompt, turn 0: sampled 2 | padding
    segment = jnp.array([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    turn = jnp.array([[-1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, 0, 0, 0, 0]])
    sampled = jnp.array([[0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0]])
    want = np.array([[0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]])
    assert_array_equal(heads.turn_ends(segment, turn, sampled == 1), want == 1)
    head = {"weight": jnp.array([[1.0, 3.0]]), "bias": jnp.zeros(2)}
    logit, ends = heads.prm(head, jnp.arange(16.0).reshape(1, 16, 1), segment, turn, sampled == 1)
    assert_array_equal(ends, want == 1)
    assert_array_equal(logit, -2.0 * np.arange(16) * want)


LENGTHS = (5, 2, 7)


@jax.jit
def every_head(hidden, segment, turn, sampled):
    value_head = {"weight": jax.random.normal(jax.random.key(1), (16,)), "bias": jnp.array(0.3)}
    answers = heads.init_answers(CONFIG, jax.random.key(2))
    return (
        heads.value(value_head, hidden, segment),
        *heads.orm(answers, hidden, segment),
        *heads.prm(answers, hidden, segment, turn, sampled),
    )


def judged(rows, length, seed=0, dirty=False):
    """Every head over the three episodes laid out as `rows` says: by episode, values and both kinds of logits."""
    rng = np.random.default_rng(seed)
    of = [(rng.normal(size=(n, 16)), rng.random(n) < 0.6, np.sort(rng.integers(-1, 3, n))) for n in LENGTHS]
    hidden = np.full((len(rows), length, 16), 7.0 if dirty else 0.0)
    segment, turn = np.zeros((2, len(rows), length), int)
    sampled = np.full((len(rows), length), dirty)
    places = {}
    for b, members in enumerate(rows):
        begin = 0
        for number, i in enumerate(members, start=1):
            places[i] = b, slice(begin, begin + LENGTHS[i])
            hidden[places[i]], sampled[places[i]], turn[places[i]] = of[i]
            segment[places[i]] = number
            begin += LENGTHS[i]
    out = every_head(hidden, segment, turn, sampled)
    elsewhere = segment == 0
    assert all(not np.any(np.asarray(x)[elsewhere]) for x in out) and {str(x.dtype) for x in out} == {"float32", "bool"}
    return [[np.asarray(x)[places[i]] for x in out] for i in range(3)]


@pytest.mark.parametrize(
    ("rows", "length", "dirty"),
    [([[0, 1, 2], [], []], 20, False), ([[2, 0], [1], []], 20, False), ([[1], [], [0, 2]], 20, True)],
)
def test_packed_equals_one_a_row_and_padding_changes_nothing(rows, length, dirty):
    want = judged([[0], [1], [2]], 20)
    got = judged(rows, length, dirty=dirty)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


@pytest.mark.parametrize("cut", [False, True])
def test_the_caller_decides_whether_the_trunk_learns(cut):
    one = jnp.ones((1, 5), int)
    head = heads.init_answers(CONFIG, jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (1, 5, 16))

    @jax.jit
    @jax.grad
    def gradients(both):
        hidden = x @ both["trunk"]
        hidden = jax.lax.stop_gradient(hidden) if cut else hidden
        return jnp.sum(heads.prm(both["head"], hidden, one, one, one == 1)[0])

    grads = gradients({"trunk": jnp.eye(16), "head": head})
    assert np.any(grads["head"]["weight"]) and bool(np.any(grads["trunk"])) is not cut


@pytest.mark.parametrize("tied", [True, False])
def test_the_language_model_has_a_yes_and_a_no(tied):
    table = jax.random.normal(jax.random.key(0), (40, 16))
    params = {"embed": table} if tied else {"embed": 0 * table, "lm_head": table.T}
    hidden = jax.random.normal(jax.random.key(1), (1, 3, 16))
    logits = transformer.head_logits(params, hidden, None)
    logit, _ = heads.orm(heads.answers_of_tokens(params, 7, 9), hidden, jnp.ones((1, 3), int))
    assert_allclose(logit[0, 2], logits[0, 2, 7] - logits[0, 2, 9], rtol=1e-5)


def test_a_fresh_value_is_nothing_and_every_axis_has_a_name():
    made = heads.add({}, CONFIG, HEADS, jax.random.key(0))
    assert not np.any(heads.value(made["value_head"], jnp.ones((2, 4, 16)), jnp.ones((2, 4), int)))
    assert not np.allclose(made["orm_head"]["weight"], made["prm_head"]["weight"])
    assert heads.AXES.keys() == made.keys() == set(HEADS)
    jax.device_put(made, shardings(made, heads.AXES, make_mesh(1, 2, 2)))
    # heads are new: with adapters they are trained, the trunk is not
    adapted = jax.eval_shape(
        lambda key: lora.add(transformer.init(CONFIG, key), CONFIG, Lora(2, 4.0), key), jax.random.key(0)
    )
    params = adapted | made
    trained, frozen = lora.partition(params)
    assert trained.keys() == {"blocks", *made} and frozen.keys() == {"blocks", "embed", "final_norm"}
    with pytest.raises(ValueError, match=r"heads: got \['value_head', 'critic'\] for .* want of .* what is not there"):
        heads.add(made, CONFIG, ("value_head", "critic"), jax.random.key(0))
