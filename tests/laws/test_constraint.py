"""Laws of constrained decoding: what is sampled matches, whatever the weights; its logp is that of the masked softmax;
nobody else notices; and none compiles once the engine is warm.
"""

import dataclasses
import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import transformer
from models.config import ModelConfig
from models.constraint import from_regex, from_strings
from models.sampling import Sampling
from rl.rollout.engine import Engine, request_key
from tests.models.weights import drawn

CAPACITY, END, END_TOO = 48, 62, 63
CONFIG = ModelConfig(
    vocab_size=70, n_ids=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, key_shift=True
)
# 62 pieces of text, two ends, and six rows of padding.
TEXTS = [*'{}":,_ 0123456789', *"abcdefghijklmnopqrstuvwxyz", "na", "me", '{"', '":', "query", "yes", "no", "\n"]
TEXTS += ["12", "aa", "open", "search", "ab", "ba", "th", "he", "in", "er", "an"]
PIECES = [text.encode() for text in TEXTS] + [None, None]
PATTERNS = {
    "call": r'\{"(?:name|query)": ?"(?:search|open)"\}',
    "number": r"0|[1-9][0-9]*",
    "words": r"[a-z]{2,6}(?: [a-z]+){0,2}",
    "one": "yes",
}
CONSTRAINTS = {name: from_regex(pattern, PIECES, [END, END_TOO]) for name, pattern in PATTERNS.items()}


def view(ids):
    return "".join(TEXTS[i] if i < len(TEXTS) else "" for i in ids)


def make_params(seed):
    """Half of them sure of themselves: what they want most is seldom allowed."""
    params = transformer.init(CONFIG, jax.random.key(seed))
    return params | {"embed": params["embed"] * (1 + 9 * (seed % 2))}


@pytest.fixture(scope="module")
def engine():
    engine = Engine(
        CONFIG, make_params(0), version=0, lanes=3, residents=4, capacity=CAPACITY, view=view,
        end_ids=(END, END_TOO), round_tokens=3, prefill_rows=2, prefill_chunk=16,
    )  # fmt: skip
    yield engine
    engine.close()


@jax.jit
def all_logits(params, row):
    """Right padding is invisible to a causal model."""
    hidden = transformer.apply(params, CONFIG, row, jnp.ones_like(row), jnp.arange(CAPACITY)[None])
    return transformer.unembed(params, CONFIG, hidden)[0]


def masked_logp(params, constraint, ids, first, temperature):
    """logp of ids[first:] by NumPy: softmax over the ids that each one's state allows, from an uncached pass."""
    logits = np.asarray(all_logits(params, jnp.array([ids + [0] * (CAPACITY - len(ids))])), np.float64)
    out = []
    for at in range(first, len(ids)):
        z = logits[at - 1, :64] / temperature
        mine = constraint.next_state[constraint.after(ids[first:at])] >= 0
        top = z[mine].max()
        out.append((z[ids[at]] - top - np.log(np.sum(np.exp(z[mine] - top))), int(mine.sum()) == 1))
    return np.array([logp for logp, _ in out]), tuple(i for i, (_, alone) in enumerate(out) if alone)


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(PATTERNS)),
    seed=st.integers(0, 3),
    how=st.sampled_from([Sampling(), Sampling(temperature=0.5), Sampling(temperature=3.0), Sampling(greedy=True)]),
    prompt=st.lists(st.integers(0, 61), min_size=1, max_size=6),
    max_tokens=st.integers(1, 30),
)
def test_whatever_the_weights_the_text_matches(engine, name, seed, how, prompt, max_tokens):
    params, constraint = make_params(seed), CONSTRAINTS[name]
    engine.publish(params, engine.stats()["version"] + 1)
    with engine.open(request_key(seed, len(prompt), 0), how) as session:
        turn = session.generate(prompt, max_tokens=max_tokens, constraint=constraint)
        ids = session.ids
    state = constraint.after(turn.ids)  # raises where an id was not allowed
    if turn.reason == "stop":
        assert turn.ids[-1] in (END, END_TOO) and re.fullmatch(PATTERNS[name], view(turn.ids[:-1]))
    else:  # cut: it could still have become a match
        assert turn.reason == "length" and (constraint.next_state[state] >= 0).any()
    logp, forced = masked_logp(params, constraint, ids, len(prompt), how.temperature)
    np.testing.assert_allclose(turn.logp, logp, atol=1e-4, rtol=1e-5)
    assert turn.forced == forced and all(turn.logp[i] == 0.0 for i in forced)


def test_an_end_is_allowed_exactly_where_the_text_matches():
    for name, constraint in CONSTRAINTS.items():
        for state, ways in enumerate(constraint.next_state):
            ends = {bool(ways[end] >= 0) for end in constraint.end_ids}
            assert len(ends) == 1, (name, state)
    number = CONSTRAINTS["number"]
    for text, matches in (("0", True), ("10", True), ("", False)):
        state = number.after([TEXTS.index(character) for character in text])
        assert bool(number.next_state[state, END] >= 0) is matches


def test_nobody_else_notices_and_every_session_has_its_own(engine):
    """Constrained and free sessions side by side draw what each draws alone, over rounds of three tokens."""
    requests = [("call", 0), (None, 1), ("words", 2), (None, 3), ("number", 4), ("call", 5)]

    def play(name, member):
        with engine.open(request_key(1, 9, member), Sampling(temperature=2.0)) as session:
            constraint = None if name is None else CONSTRAINTS[name]
            turns = [session.generate([1 + member], max_tokens=12, constraint=constraint) for _ in range(2)]
            return [(turn.ids, turn.logp, turn.forced) for turn in turns]

    alone = [play(*request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        together = list(threads.map(play, *zip(*requests, strict=True)))
    assert together == alone
    assert all(
        forced == () for (name, _), turns in zip(requests, alone, strict=True) if not name for *_, forced in turns
    )


def test_truncation_and_stop_strings_cut_a_constrained_turn(engine):
    with engine.open(request_key(2, 0, 0), Sampling(temperature=3.0, top_k=2, min_p=0.1)) as session:
        turn = session.generate([5], max_tokens=30, constraint=CONSTRAINTS["words"])
    assert re.fullmatch(PATTERNS["words"], view(turn.ids)) and turn.reason == "stop"
    with engine.open(request_key(2, 0, 0), Sampling()) as session:
        turn = session.generate([5], max_tokens=30, stop=('"}',), constraint=CONSTRAINTS["call"])
    assert turn.reason == "stop" and re.fullmatch(PATTERNS["call"], view(turn.ids))


def test_a_token_without_a_choice_is_forced(engine):
    """Of "zoo" every piece is a character, and there are two ends to choose from."""
    with engine.open(request_key(6, 0, 0), Sampling()) as session:
        turn = session.generate([5], max_tokens=9, constraint=from_strings(["zoo"], PIECES, [END, END_TOO]))
    assert view(turn.ids) == "zoo" and turn.forced == (0, 1, 2)
    assert turn.logp[:3] == [0.0] * 3 and turn.logp[3] < 0 and turn.reason == "stop"


def test_of_strings_one_is_said(engine):
    constraint = from_strings(["yes", "no", "none"], PIECES, [END])
    said = set()
    for member in range(12):
        with engine.open(request_key(3, 0, member), Sampling(temperature=3.0)) as session:
            turn = session.generate([7], max_tokens=9, constraint=constraint)
        assert turn.reason == "stop" and turn.ids[-1] == END
        said.add(view(turn.ids))
    assert said == {"yes", "no", "none"}


def test_a_constraint_of_another_vocabulary_is_refused(engine):
    with engine.open(request_key(4, 0, 0), Sampling()) as session:
        for constraint in (from_regex("a", [*PIECES, *[b"x"] * 9], [END]), from_regex("a", PIECES, [3])):
            with pytest.raises(ValueError, match="make it from this engine's codec"):
                session.generate([1], max_tokens=3, constraint=constraint)


def test_only_a_constraint_compiles_another_program(engine):
    with engine.open(request_key(5, 0, 0), Sampling()) as session:
        session.generate([1], max_tokens=3)
        before = engine.stats()["compiles"]
        session.generate([1], max_tokens=3)
        for name in ("number", "one"):  # of few states, both: one program, which an earlier test may have made
            session.generate([1], max_tokens=3, constraint=CONSTRAINTS[name])
    assert engine.stats()["compiles"] <= before + 1


def test_after_warm_up_nothing_compiles_whatever_is_asked_for_side_by_side():
    """Truncated or not, constrained or not, with any stops, of short and long sessions, forked, before and after new
    weights.
    """
    config = dataclasses.replace(CONFIG, n_layers=1)
    params = drawn(config)
    engine = Engine(
        config, params, version=0, lanes=2, residents=3, sessions=16, capacity=CAPACITY, view=view,
        end_ids=(END, END_TOO), round_tokens=3, prefill_rows=3, prefill_chunk=5, contexts=(20, CAPACITY),
    )  # fmt: skip
    samplings = [Sampling(), Sampling(greedy=True), Sampling(top_p=0.9), Sampling(top_k=3, min_p=0.1, temperature=2.0)]
    asked = list(itertools.product(samplings, [None, "number"], [(), ("a",), ("b", "th", "12")]))

    def play(i):
        sampling, name, stop = asked[i]
        how = {"stop": stop, "constraint": None if name is None else CONSTRAINTS[name]}
        with engine.open(request_key(7, i, 0), sampling) as session:
            session.generate([(3 * i + k) % 60 for k in range(4 + i % 20)], max_tokens=14, **how)
            if i == len(asked) // 2:
                engine.publish(params, 1)
            with session.fork(1)[0] as child:
                child.generate([1], max_tokens=6, **how)

    try:
        engine.warm_up(constraints=[CONSTRAINTS["number"]])
        compiles = engine.stats()["compiles"]
        assert compiles > 0
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(play, range(len(asked))))
        play(0)  # alone: nobody takes the row of the parent before its fork is copied from it
        stats = engine.stats()
        assert stats["compiles"] == compiles and stats["copies"] > 0 and stats["version"] == 1
    finally:
        engine.close()


def test_warm_up_leaves_out_what_it_is_told_to_and_wants_constraints_of_its_own_vocabulary(engine):
    ran = []

    class Device:
        def prefill(self, *args, **kwargs): ...
        def copy(self, *args, **kwargs): ...
        def decode(self, *args, truncated, constraint, **kwargs):
            ran.append((truncated, constraint))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._rounds, "device", Device())
        engine.warm_up(truncated=False, constraints=[CONSTRAINTS["one"]])
        assert ran == [(False, None), (False, CONSTRAINTS["one"])]
        with pytest.raises(ValueError, match="make it from this engine's codec"):
            engine.warm_up(constraints=[from_regex("a", PIECES, [3])])
