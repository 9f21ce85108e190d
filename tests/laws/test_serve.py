"""Law: what an agent does against a served policy is recorded as the engine consumed and sampled it.

Recorded rows are the engine's own ids; masks count exactly the sampled tokens, each once; a naive full forward gives
the recorded log-probabilities; a conversation goes on in its session without a token being read twice.
"""

import jax
import numpy as np
import openai
import pytest
from numpy.testing import assert_allclose

from envs.base import Message
from models import transformer
from models.codec import Codec
from models.config import ModelConfig
from models.logprobs import token_logp
from rl.episodes import read_episodes
from rl.rollout.engine import Engine
from rl.types import Status
from tests.launch.served import NAME, served, until
from tests.models import chat_templates as ct

MODEL = ModelConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, qk_norm=True)
CAPACITY = 512


@pytest.fixture(scope="module")
def params():
    return transformer.init(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def codecs():
    templates = {
        "qwen": (ct.QWEN25_TOOLS, ct.QWEN_TOKENS),
        "silent": (ct.QWEN3_SILENT, ct.QWEN_TOKENS + ct.THINK_TOKENS),
    }
    return {name: Codec(ct.make_tokenizer(*template, ct.QWEN)) for name, template in templates.items()}


class Watched(Engine):
    """Keeps its sessions, whose ids can still be read when they are closed."""

    def open(self, *args, **how):
        self.watched.append(super().open(*args, **how))
        return self.watched[-1]


@pytest.fixture(scope="module")
def one_engine(params, codecs):
    own = codecs["qwen"]
    engine = Watched(
        MODEL, params, version=5, lanes=4, residents=4, capacity=CAPACITY, view=own.view, end_ids=own.end_ids,
        round_tokens=4, prefill_rows=2, prefill_chunk=64, contexts=(CAPACITY,),
    )  # fmt: skip
    yield engine
    engine.close()


@pytest.fixture
def engine(one_engine):
    one_engine.watched = []
    return one_engine


class Agent:
    """Any agent: it keeps messages, and what it was told of tokens only so that the test can compare."""

    def __init__(self, client, **how):
        self.client, self.how, self.messages, self.replies = (
            client,
            how,
            [{"role": "system", "content": "Be brief."}],
            [],
        )

    def say(self, text, role="user", **how):
        self.messages.append({"role": role, "content": text, **({"tool_call_id": "x"} if role == "tool" else {})})
        reply = self.client.chat.completions.create(
            model=NAME, messages=self.messages, logprobs=True, max_tokens=12, **{**self.how, **how}
        )
        self.messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        self.replies.append(reply)
        return reply

    @property
    def sampled(self):
        return [i for reply in self.replies for i in reply.choices[0].token_ids]

    @property
    def logp(self):
        return [t.logprob for reply in self.replies for t in reply.choices[0].logprobs.content]


@jax.jit
def forward(params, tokens, segment, temperature):
    position = jax.numpy.arange(CAPACITY)[None]
    hidden = transformer.apply(params, MODEL, tokens, segment, position)
    return token_logp(params, hidden, tokens, temperature=temperature, chunk=64)[0]


def naive_logp(params, ids, temperature=1.0):
    tokens = np.pad(ids, (0, CAPACITY - len(ids)))[None]
    segment = (np.arange(CAPACITY) < len(ids)).astype(np.int32)[None]
    return np.asarray(forward(params, tokens, segment, temperature))[0, : len(ids)]


def check_rows(params, trajectory, temperature=1.0):
    for row in trajectory.rows:
        mask = row.action_mask
        assert_allclose(row.behavior_logp[mask], naive_logp(params, row.tokens, temperature)[mask], atol=1e-4, rtol=0)
        assert (row.version[mask] == 5).all() and (row.version[~mask] == -1).all()


def test_a_conversation_is_recorded_token_by_token(params, codecs, engine, tmp_path):
    already = engine.stats()["tokens_prefilled"]
    with served(engine, codecs["qwen"], record=tmp_path) as (client, _):
        one = Agent(client, temperature=0.8, seed=3, metadata={"task_id": "peru"})
        other = Agent(client)
        for k in range(4):  # one talks in streams with pauses of the other's
            one.say(f"question {k} <|im_end|> ?", role="tool" if k % 2 else "user")
            other.say("hm")
        prefilled = engine.stats()["tokens_prefilled"] - already
    first, second = sorted(read_episodes(tmp_path), key=lambda t: t.ticket)
    for trajectory, agent, session, how in (
        (first, one, engine.watched[0], 0.8),
        (second, other, engine.watched[1], 1.0),
    ):
        (row,) = trajectory.rows
        last = agent.replies[-1]
        assert row.tokens.tolist() == session.ids == last.prompt_token_ids + last.choices[0].token_ids
        assert row.tokens[row.action_mask].tolist() == agent.sampled and trajectory.facts["turns"] == 4
        assert_allclose(row.behavior_logp[row.action_mask], agent.logp, atol=1e-6)
        sizes = [len(reply.choices[0].token_ids) for reply in agent.replies]
        assert row.turn[row.action_mask].tolist() == np.repeat(range(4), sizes).tolist()
        check_rows(params, trajectory, how)
        assert trajectory.task_id == last.choices[0].conversation and trajectory.status is Status.DONE
        for before, after in zip(agent.replies, agent.replies[1:], strict=False):
            ids = before.prompt_token_ids + before.choices[0].token_ids
            assert after.prompt_token_ids[: len(ids)] == ids  # as sampled, though it is no text that encodes to them
            assert after.usage.prompt_tokens_details.cached_tokens == len(ids)
    # KV kept: what was sampled or given was read once (all but the newest token of a round, which decoding reads)
    assert prefilled <= sum(len(t.rows[0].tokens) for t in (first, second))
    assert first.facts["metadata"] == {"task_id": "peru"} and first.facts["sampling"]["temperature"] == 0.8
    starts = codecs["qwen"].start([Message("user", "")])[0]  # the one token of glue that opens a turn
    row = first.rows[0]
    assert row.tokens[~row.action_mask].tolist().count(starts) == 1 + 2 * 4 and "success" not in first.facts


def test_a_template_that_rewrites_turns_begins_rows(params, codecs, tmp_path, engine):
    with served(engine, codecs["silent"], record=tmp_path) as (client, _):
        agent = Agent(client)
        for text in ("a", "b", "c"):
            agent.say(text)
    (trajectory,) = read_episodes(tmp_path)
    assert len(trajectory.rows) == 3
    assert [i for row in trajectory.rows for i in row.tokens[row.action_mask].tolist()] == agent.sampled
    for row, reply in zip(trajectory.rows, agent.replies, strict=True):
        assert row.tokens.tolist() == reply.prompt_token_ids + reply.choices[0].token_ids
    check_rows(params, trajectory)


def test_what_was_sampled_is_an_action_once_wherever_conversations_part(params, codecs, engine, tmp_path):
    """Asked again from an earlier answer, sampled otherwise, or after its session had to go: the ids are as sampled."""
    with served(engine, codecs["qwen"], record=tmp_path, sessions=2) as (client, url):
        agent = Agent(client)
        agent.say("a")
        agent.say("b")
        again = Agent(client)
        again.messages, start = agent.messages[:3], agent.replies[0]
        again.say("other")
        again.say("cold", temperature=0)
        for _ in range(2):  # strangers take all the sessions
            Agent(client).say("hi")
        agent.say("c")
    ids = start.prompt_token_ids + start.choices[0].token_ids
    assert again.replies[0].prompt_token_ids[: len(ids)] == ids
    for one in (agent, again):
        for before, after in zip(one.replies, one.replies[1:], strict=False):
            ids = before.prompt_token_ids + before.choices[0].token_ids
            assert after.prompt_token_ids[: len(ids)] == ids
    trajectories = sorted(read_episodes(tmp_path), key=lambda t: t.ticket)
    assert len(trajectories) == 6  # a b | other | cold | hi | hi | c
    assert [t.facts["turns"] for t in trajectories] == [2, 1, 1, 1, 1, 1]
    own = [trajectories[0], trajectories[1], trajectories[2], trajectories[5]]
    recorded = [i for t in own for i in t.rows[0].tokens[t.rows[0].action_mask].tolist()]
    said = [agent.replies[0], agent.replies[1], *again.replies, agent.replies[2]]
    assert recorded == [i for reply in said for i in reply.choices[0].token_ids]
    for trajectory in trajectories:
        check_rows(params, trajectory)
    for session, trajectory in zip(engine.watched, trajectories, strict=True):
        assert session.ids == trajectory.rows[0].tokens.tolist()


def test_members_of_one_request_and_seeds(codecs, engine, tmp_path):
    with served(engine, codecs["qwen"], record=tmp_path, sessions=4) as (client, _):
        how = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 12}
        group = client.chat.completions.create(**how, n=4)
        seeded = [client.chat.completions.create(**how, seed=7).choices[0].token_ids for _ in range(2)]
    assert len({tuple(c.token_ids) for c in group.choices}) == 4 and seeded[0] == seeded[1]
    trajectories = list(read_episodes(tmp_path))
    assert sorted((t.ticket, t.member) for t in trajectories) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)]


def test_a_stream_is_the_same_request(codecs, engine):
    """Tokens do not depend on how they are read; a full conversation ends by length, one over it is refused."""
    with served(engine, codecs["qwen"]) as (client, _):
        how = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "seed": 1, "temperature": 2}
        reply = client.chat.completions.create(**how)
        whole = reply.choices[0]
        last = list(client.chat.completions.create(**how, stream=True))[-1].choices[0]
        assert last.token_ids == whole.token_ids and last.finish_reason == whole.finish_reason
        assert len(reply.prompt_token_ids + whole.token_ids) == CAPACITY and whole.finish_reason == "length"
        full = [*how["messages"], whole.message.model_dump(exclude_none=True), {"role": "user", "content": "y"}]
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**{**how, "messages": full})
        assert error.value.code == "context_length_exceeded"


def test_idle_conversations_end_and_can_be_read_while_the_server_runs(codecs, engine, tmp_path):
    with served(engine, codecs["qwen"], record=tmp_path, idle_s=0.2) as (client, _):
        agent = Agent(client)
        agent.say("a")
        until(lambda: any(tmp_path.glob("episodes/*.array_record")))
        (trajectory,) = read_episodes(tmp_path)
        assert trajectory.rows[0].tokens[trajectory.rows[0].action_mask].tolist() == agent.sampled
        agent.say("b")  # it still goes on, in the ids that were sampled
        ids = agent.replies[0].prompt_token_ids + agent.replies[0].choices[0].token_ids
        assert agent.replies[1].prompt_token_ids[: len(ids)] == ids
    assert engine.stats()["sessions"] == 0 and engine.stats()["free_rows"] == 4
