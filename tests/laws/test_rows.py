"""Laws of episodes of several rows: whatever the template rewrites, nothing sampled is lost or trained twice.

Σ action_mask over the rows == sampled tokens · each row is the rendering of the conversation where it begins, then what
was sampled and given · engine logp == learner logp in every row · a demonstration has the rows of the live episode ·
the sequence mean counts an episode once, however many rows it has and however they are cut into micro-batches.
"""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from envs.base import EnvSpec, Message, Observation, Step, Task
from models import transformer
from models.codec import Codec
from models.config import ModelConfig
from models.logprobs import token_logp
from models.sampling import Sampling
from rl.losses import recipes
from rl.metrics.episodes import describe
from rl.rollout.batcher import pack
from rl.rollout.engine import Engine, request_key
from rl.rollout.worker import run_episode, transcribe
from rl.types import Row, Scored, Status, Trajectory, Turn
from tests.laws import test_learner as learning
from tests.models import chat_templates as ct
from tests.models import weights

TASK = Task("t", "f", "train", 0, (Message("system", "Be brief."), Message("user", "capital of Peru ?")), {})
TOKENS = ct.QWEN_TOKENS + ct.THINK_TOKENS
TEMPLATES = {"qwen3": ct.QWEN3, "silent": ct.QWEN3_SILENT, "opens": ct.QWEN3_OPENS, "keeps_last": ct.KEEPS_THE_LAST}


@cache
def tokenizer(name):
    return ct.make_tokenizer(TEMPLATES[name], TOKENS, ct.QWEN)


@cache
def codec(name):
    return Codec(tokenizer(name))


class Script:
    """A session that samples given ids: up to an end of turn, or to what might be a stop string.

    `rows` holds what each of its rows consumed and sampled, `spans` the row of each turn and where it begins there.
    """

    def __init__(self, codec, turns):
        self.codec, self.turns = codec, list(turns)
        self.sampled, self.rows, self.spans, self.restarts = [], [[]], [], []

    def restart(self, turn):
        self.rows.append([])
        self.restarts.append(turn)

    def generate(self, new_ids, *, max_tokens, stop, deadline_s=None, constraint=None):
        said = self.turns.pop(0)
        ids, reason = said[:max_tokens], "length" if len(said) > max_tokens else "stop"
        ends = [k for k, i in enumerate(ids) if i in self.codec.end_ids]
        if ends:
            ids, reason = ids[: ends[0] + 1], "stop"
        first = sum(map(len, self.sampled))
        self.sampled.append(ids)
        self.spans.append((len(self.rows) - 1, len(self.rows[-1]) + len(new_ids)))
        self.rows[-1] += [*new_ids, *ids]
        return Turn(ids, [-1.0 - k for k in range(first, first + len(ids))], [7] * len(ids), reason)


class World:
    def __init__(self, texts):
        self.spec = EnvSpec("words", (), max_turns=len(texts))
        self.texts, self.said = list(texts), []

    def reset(self, task):
        return Observation("")

    def step(self, action):
        self.said.append(self.texts.pop(0))
        return Step(Observation(self.said[-1]), not self.texts, {"success": not self.texts})

    def close(self):
        pass


def play(codec, session, world, role=None, **limits):
    limits = {"max_turn_tokens": 60, "max_tokens": 4000, "call_deadline_s": 60.0} | limits
    return run_episode(world, TASK, codec, session, ticket=0, member=0, role=role, **limits)


def render(name, messages):
    messages = [{"role": m.role, "content": m.content} for m in messages]
    return tokenizer(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def squeeze(text):
    return "".join(text.split())


WORDS = ["Peru", " Lima", "\n", "<|im_end|>", "<|im_start|>", "</think>", "<think>", "</tool_response>", " ", "é", "🙂"]
texts = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
spoken = st.lists(st.sampled_from(WORDS), max_size=8).map("".join).map(lambda text: ("text", text))
wild = st.lists(st.integers(0, 299), max_size=12).map(lambda ids: ("ids", ids))  # also what no encoder would give
turns = st.lists(st.tuples(spoken | wild, st.booleans()), min_size=3, max_size=5)


def ids_of(codec, turn):
    (kind, said), closes = turn
    ids = codec.encode_action(said) if kind == "text" else [i for i in said if i < codec.vocab_size]
    return [*ids, codec.end_ids[0]] if closes else ids


@pytest.mark.parametrize(("name", "role"), [("qwen3", "user"), ("silent", "tool"), ("opens", "user"),
                                            ("keeps_last", "tool")])  # fmt: skip
@settings(max_examples=60)
@given(turns, st.lists(texts, min_size=5, max_size=5))
def test_every_sampled_token_is_an_action_once_and_every_row_is_what_the_policy_saw(name, role, turns, said):
    own = codec(name)
    session, world = Script(own, [ids_of(own, turn) for turn in turns]), World(said[: len(turns)])
    trajectory = play(own, session, world, role)
    assert trajectory.status is Status.DONE and len(session.sampled) == len(turns)
    # each row is what its session consumed and sampled, in order
    assert [row.tokens.tolist() for row in trajectory.rows] == session.rows
    # every sampled token is an action once: all of them, in order, each with its own numbers
    flat = [i for ids in session.sampled for i in ids]
    assert sum(int(row.action_mask.sum()) for row in trajectory.rows) == len(flat)
    assert [i for row in trajectory.rows for i in row.tokens[row.action_mask].tolist()] == flat
    logp = np.concatenate([row.behavior_logp[row.action_mask] for row in trajectory.rows])
    assert_array_equal(logp, -1.0 - np.arange(len(flat)))
    # turns are counted over the rows; a row begins at the turn at which its session was started again
    numbers = [row.turn[row.action_mask] for row in trajectory.rows]
    assert_array_equal(np.concatenate(numbers), np.repeat(np.arange(len(turns)), [len(s) for s in session.sampled]))
    # what stands before a turn is the template's own rendering of all that was said, space within turns apart
    messages = list(TASK.prompt)
    for k, (ids, (row, start)) in enumerate(zip(session.sampled, session.spans, strict=True)):
        seen = own.view(session.rows[row][:start])
        assert squeeze(seen) == squeeze(render(name, messages))
        assert seen == render(name, messages) or k not in (0, *session.restarts)
        messages += [Message("assistant", own.turn_text(ids)), Message(role, world.said[k])]
    # the disk keeps it
    assert [r.tokens.tolist() for r in Trajectory.from_bytes(trajectory.to_bytes()).rows] == session.rows


def test_thinking_is_trained_where_it_was_thought_and_gone_from_the_next_row():
    """The worked example: three turns under a template that drops earlier thinking."""
    own = codec("qwen3")
    said = ["<think>\nwhich ?\n</think>\n\nPeru", "Lima ?", "<think>\nsure\n</think>\n\nLima"]
    session = Script(own, [[*own.encode_action(text), own.end_ids[0]] for text in said])
    trajectory = play(own, session, World(["no", "well", "yes"]), role="user")
    begin = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\ncapital of Peru ?<|im_end|>\n"
    opens = "<|im_start|>assistant\n"
    assert [own.view(row.tokens.tolist()) for row in trajectory.rows] == [
        f"{begin}{opens}<think>\nwhich ?\n</think>\n\nPeru<|im_end|>",
        # the second turn holds no thinking: the third goes on in its row
        f"{begin}{opens}Peru<|im_end|>\n<|im_start|>user\nno<|im_end|>\n{opens}Lima ?<|im_end|>\n"
        f"<|im_start|>user\nwell<|im_end|>\n{opens}<think>\nsure\n</think>\n\nLima<|im_end|>",
    ]
    trained = [own.view(row.tokens[row.action_mask].tolist()) for row in trajectory.rows]
    assert trained == [f"{said[0]}<|im_end|>", f"{said[1]}<|im_end|>{said[2]}<|im_end|>"]
    assert session.restarts == [1]
    # one episode of three turns, whatever its rows
    assert describe(trajectory)["turns"] == 3 and describe(trajectory)["tokens"] == sum(map(len, session.sampled))
    # the same template keeps what was thought before a tool message: one row
    session = Script(own, [[*own.encode_action(text), own.end_ids[0]] for text in said])
    assert len(play(own, session, World(["no", "well", "yes"])).rows) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_demonstration_has_the_rows_of_the_live_episode(name):
    own = codec(name)
    said = ["<think> which ? </think> Peru", "Lima ?", "<think> sure </think> Lima"]
    script = transcribe(own, TASK, list(zip(said, ["no", "well", "yes"], strict=True)), {"success": True}, role="user")
    tags = own.opened.rstrip()
    session = Script(own, [[*own.encode_action(text.removeprefix(tags)), own.end_ids[0]] for text in said])
    live = play(own, session, World(["no", "well", "yes"]), role="user")
    assert len(live.rows) == len(script.rows) > 1
    for a, b in zip(script.rows, live.rows, strict=True):
        for field in ("tokens", "turn", "action_mask"):
            assert_array_equal(getattr(a, field), getattr(b, field))


def test_budgets_bound_each_row():
    """A row that is rendered again counts again, and one that leaves no room ends the episode as TOKEN_LIMIT."""
    own = codec("silent")
    prompt = len(own.start(TASK.prompt))
    said = [[7] * 20, [8] * 20, [9] * 20]
    whole = play(own, Script(own, said), World(["x", "x", "x"]))
    lengths = [len(row.tokens) for row in whole.rows]
    assert lengths == sorted(lengths) and len(lengths) == 3 and lengths[0] == prompt + 20
    cut = play(own, Script(own, said), World(["x", "x", "x"]), max_tokens=lengths[2] - 5)
    assert cut.status is Status.TOKEN_LIMIT and [len(row.tokens) for row in cut.rows] == [*lengths[:2], lengths[2] - 5]
    none = play(own, Script(own, said), World(["x", "x", "x"]), max_tokens=lengths[1])
    assert none.status is Status.TOKEN_LIMIT and [len(row.tokens) for row in none.rows] == lengths[:2]


# ---- engine and learner


MODEL = ModelConfig(
    vocab_size=300, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, qk_norm=True, key_shift=True
)


def test_engine_logp_is_learner_logp_in_every_row():
    """A session that starts again is an empty one with its own key: no KV, id or draw of the row before is left."""
    own, params, length = codec("silent"), weights.drawn(MODEL), 256
    engine = Engine(
        MODEL, params, version=0, lanes=2, residents=2, capacity=length, view=own.view, end_ids=own.end_ids,
        round_tokens=4, prefill_rows=2, prefill_chunk=32, contexts=(length,),
    )  # fmt: skip
    try:
        with engine.open(request_key(0, 0, 0), Sampling()) as session:
            trajectory = play(own, session, World(["x", "y", "z"]), max_turn_tokens=9, max_tokens=length)
        with pytest.raises(ValueError, match="restart: got turn=0"):
            session.restart(0)
        # the address of a row's draws is (request, turn): the last row alone, and what other turns would have drawn
        prompt = trajectory.rows[2].tokens[: int(np.argmax(trajectory.rows[2].action_mask))].tolist()
        drawn = {}
        with engine.open(request_key(0, 0, 0), Sampling()) as alone:
            for turn in (1, 2, 3):
                alone.restart(turn)
                drawn[turn] = prompt + alone.generate(prompt, max_tokens=9).ids
        assert drawn[2] == trajectory.rows[2].tokens.tolist() and len({tuple(ids) for ids in drawn.values()}) == 3
    finally:
        engine.close()
    assert len(trajectory.rows) == 3 and len({row.tokens[-9:].tobytes() for row in trajectory.rows}) == 3
    batch, _ = pack(
        [trajectory], {(0, 0): 1.0}, {(0, 0): 1.0}, rows=3, length=length, micro_rows=1, version=0, pad_id=0
    )  # fmt: skip

    @jax.jit
    def score(params, tokens, segment, position):
        hidden = transformer.apply(params, MODEL, tokens, segment, position)
        return token_logp(params, hidden, tokens, temperature=1.0, chunk=64)[0]

    logp = np.asarray(score(params, batch.tokens, batch.segment, batch.position))
    assert batch.action_mask.sum() == 27
    assert_allclose(batch.behavior_logp[batch.action_mask], logp[batch.action_mask], atol=1e-4, rtol=0)


def rows_of(episode, cuts):
    """The episode as rows that begin anew at `cuts`: what was sampled before is context, and no action there."""
    rows, begin = [], 0
    for end in [*cuts, len(episode["tokens"])]:
        mask = episode["action_mask"][:end] & (np.arange(end) >= begin)
        rows.append(
            Row(
                tokens=episode["tokens"][:end].astype(np.int32),
                turn=np.zeros(end, np.int32),
                action_mask=mask,
                behavior_logp=np.where(mask, episode["behavior_logp"][:end], 0).astype(np.float32),
                version=np.where(mask, 0, -1).astype(np.int32),
            )
        )
        begin = end
    return tuple(rows)


def batch_of(cuts, rows=8, length=24):
    """Five episodes, cut into rows as told, with credit of their own."""
    episodes = learning.episodes()
    trajectories = [
        Trajectory(f"t{i}", i, 0, Status.DONE, rows_of(e, cuts.get(i, ())), {"success": True}, {})
        for i, e in enumerate(episodes)
    ]
    credit = {(i, 0): (-1.0) ** i * (1 + i) for i in range(len(episodes))}
    batch, _ = pack(trajectories, credit, credit, rows=rows, length=length, micro_rows=1, version=0, pad_id=0)
    return dataclasses.replace(batch, ref_logp=np.where(batch.action_mask, np.float32(-4.2), 0))


CUTS = {0: (4,), 2: (3, 5, 8), 3: (2,)}


def test_an_episode_counts_once_however_many_rows_it_has():
    """The same actions after the same contexts: the same loss, gradient and metrics, in one row or in four, which lie
    in different micro-batches.
    """
    one, several = batch_of({}), batch_of(CUTS)
    assert one.episode_share is None and several.action_mask.sum() == one.action_mask.sum()
    grads, metrics = learning.gradients_and_metrics(one, micro_rows=1)
    grads_of_rows, metrics_of_rows = learning.gradients_and_metrics(several, micro_rows=1)
    assert metrics["loss"].count == 5
    assert_allclose(metrics_of_rows["loss"].count, 5, rtol=1e-6)  # parts of an episode, added
    scale = max(float(np.max(np.abs(g))) for g in jax.tree.leaves(grads))
    for a, b in zip(jax.tree.leaves(grads_of_rows), jax.tree.leaves(grads), strict=True):
        assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)
    for name, want in metrics.items():
        got = metrics_of_rows[name]
        assert_allclose(got.value, want.value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gspo_has_a_ratio_for_each_row():
    """Row ratios (.2 - .6) / 2 and .9: each of its own row, weighed by its share of the episode's three actions."""
    rows = [
        Row(np.array([1, 2, 3], np.int32), np.zeros(3, np.int32), np.array([False, True, True]),
            np.array([0, -1, -1], np.float32), np.array([-1, 0, 0], np.int32)),
        Row(np.array([1, 4], np.int32), np.zeros(2, np.int32), np.array([False, True]),
            np.array([0, -1], np.float32), np.array([-1, 0], np.int32)),
    ]  # fmt: skip
    trajectory = Trajectory("t", 0, 0, Status.DONE, tuple(rows), {}, {})
    numbers = {(0, 0): 1.0}
    batch, _ = pack([trajectory], numbers, numbers, rows=1, length=5, micro_rows=1, version=0, pad_id=0)
    logp = np.array([[0, -0.8, -1.6, 0, -0.1]], np.float32)  # log-ratios .2, -.6 | .9
    loss, _ = recipes.gspo(clip_low=10.0, clip_high=10.0)(Scored(logp, np.zeros_like(logp)), batch)
    assert float(loss.count) == pytest.approx(1.0)
    assert float(loss.total) == pytest.approx(-(2 * np.exp(-0.2) + np.exp(0.9)) / 3, rel=1e-6)
