"""Trained ids == prompt ids + sampled ids + world ids, in order; sum(action_mask) == sampled tokens; none is glue."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.base import EnvSpec, Message, Observation, Step, Task
from models.codec import Codec
from models.tokenizer import train_tokenizer
from rl.rollout.batcher import pack
from rl.rollout.worker import run_episode, transcribe
from rl.types import Turn

CORPUS = ["What is the capital of Peru ? <think> I will search </think> Doc 1(Title: Peru) capital: Lima; Chad\n"] * 3
STOP = ("</search>", "</answer>")
WORDS = [
    "Peru",
    " Lima",
    "\n",
    "<",
    "|end|>",
    "<|end|>",
    "<|user|>",
    "</search>",
    "<information>",
    " ",
    "é",
    "🙂",
    "12",
]


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return Codec(train_tokenizer(CORPUS, 300, tmp_path_factory.mktemp("tokenizer")))


class Sampler:
    """Samples any ids at all, also some that no encoder would give, and ends a turn as the engine does."""

    def __init__(self, codec, turns):
        self.codec, self.turns, self.consumed, self.sampled = codec, list(turns), [], []

    def generate(self, new_ids, *, max_tokens, stop, deadline_s=None, constraint=None):
        self.consumed += new_ids
        ids, reason = [], "length"
        for i in self.turns.pop(0)[:max_tokens]:
            ids.append(i)
            if i in self.codec.end_ids:
                reason = "stop"
            elif any(s in self.codec.view(ids) for s in stop):
                reason = "stop"
            if reason != "length":
                break
        self.consumed += ids
        self.sampled.append(ids)
        first = sum(map(len, self.sampled)) - len(ids)
        return Turn(ids, [-1.0 - k for k in range(first, first + len(ids))], [7] * len(ids), reason)


class World:
    spec = EnvSpec("words", STOP, max_turns=4)

    def __init__(self, texts):
        self.texts, self.said, self.heard = list(texts), [], []

    def reset(self, task):
        return Observation("")

    def step(self, action):
        self.heard.append(action)
        self.said.append(self.texts.pop(0))
        return Step(Observation(self.said[-1]), not self.texts, {"success": not self.texts})

    def close(self):
        pass


texts = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
END = 289  # <|end|>: 284 bytes and merges, pad, four roles
turn = st.lists(st.integers(0, 299), max_size=25)
turns = st.lists(turn | turn.map(lambda ids: [*ids, END]), min_size=4, max_size=4)


@settings(max_examples=200)
@given(texts, turns, st.lists(texts, min_size=2, max_size=4), st.integers(1, 30), st.integers(30, 400))
def test_trained_ids_are_what_was_consumed_and_sampled(codec, prompt, sampled, said, max_turn_tokens, max_tokens):
    task = Task("t", "f", "train", 0, (Message("system", "Be brief."), Message("user", prompt)), {})
    sampler, world = Sampler(codec, sampled), World(said)
    limits = {"max_turn_tokens": max_turn_tokens, "max_tokens": max_tokens, "call_deadline_s": 60.0}
    trajectory = run_episode(world, task, codec, sampler, ticket=0, member=0, **limits)
    if not sampler.sampled:
        assert trajectory.rows == ()
        return
    (row,) = trajectory.rows
    # prompt, then turn by turn: what was sampled, and what the codec appends for the world's words
    want = codec.start(task.prompt)
    for k, ids in enumerate(sampler.sampled):
        want += ids
        if k + 1 < len(sampler.sampled):
            want += codec.extend(ids, world.said[k])
    assert row.tokens.tolist() == want == sampler.consumed
    flat = [i for ids in sampler.sampled for i in ids]
    assert row.action_mask.sum() == len(flat)
    assert row.tokens[row.action_mask].tolist() == flat
    np.testing.assert_array_equal(row.behavior_logp[row.action_mask], -1.0 - np.arange(len(flat)))  # each its own
    assert (row.version[row.action_mask] == 7).all() and len(row.tokens) <= max_tokens
    # no glue: what is off the mask and is a control id was never sampled, and each turn opens with one
    opens = codec.start(task.prompt)[-1]
    assert sum(i == opens for i in row.tokens[~row.action_mask].tolist()) == len(sampler.sampled)
    # every message closes once, by a sampled end or by glue: the prompt's two, each earlier turn and the world's answer
    assert codec.end_ids == (END,)
    closed = 2 + 2 * (len(sampler.sampled) - 1) + (sampler.sampled[-1][-1:] == [END])
    assert row.tokens.tolist().count(END) == closed
    # and the packed batch has these tokens, this mask, and an advantage on nothing else
    shape = {"rows": 1, "length": 400, "micro_rows": 1, "version": 7, "pad_id": codec.pad_id}
    batch, _ = pack([trajectory], {(0, 0): 2.0}, {(0, 0): 1.0}, **shape)
    n = len(want) if flat else 0
    assert batch.tokens[0, :n].tolist() == want[:n] and (batch.segment[0] > 0).sum() == n
    np.testing.assert_array_equal(batch.advantages[0] != 0, batch.action_mask[0])
    assert batch.action_mask.sum() == len(flat)


def test_masked_text_is_the_sampled_text(codec):
    sampled = [codec.encode_action("<search> Peru </search>"), codec.encode_action("<answer> Lima </answer>")]
    sampler, world = Sampler(codec, sampled), World(["Doc 1(Title: Peru)", "ok"])
    task = Task("t", "f", "train", 0, (Message("user", "capital of Peru ?"),), {})
    trajectory = run_episode(
        world, task, codec, sampler, ticket=0, member=0, max_turn_tokens=40, max_tokens=200, call_deadline_s=60.0
    )
    (row,) = trajectory.rows
    assert codec.view(row.tokens[row.action_mask].tolist()) == "<search> Peru</search><answer> Lima</answer>"
    assert codec.view(row.tokens.tolist()) == (
        "<|user|> capital of Peru ?<|end|><|assistant|><search> Peru</search><|end|>"
        "<|tool|> Doc 1(Title: Peru)<|end|><|assistant|><answer> Lima</answer>"
    )
    assert world.heard == ["<search> Peru</search>", "<answer> Lima</answer>"]


def test_demonstration_has_the_ids_that_a_perfect_policy_would_sample(codec):
    first = ("<think> I will search </think><search> Peru </search>", "Doc 1(Title: Peru)")
    turns = [first, ("<answer> Lima </answer>", "ok")]
    task = Task("t", "f", "train", 0, (Message("user", "capital of Peru ?"),), {})
    demo = transcribe(codec, task, turns, {"success": True}, stop=STOP)
    sampler = Sampler(codec, [codec.encode_action(action) for action, _ in turns])
    live = run_episode(
        World([text for _, text in turns]), task, codec, sampler,
        ticket=0, member=0, max_turn_tokens=40, max_tokens=200, call_deadline_s=60.0,
    )  # fmt: skip
    for name in ("tokens", "turn", "action_mask"):
        np.testing.assert_array_equal(getattr(demo.rows[0], name), getattr(live.rows[0], name))


# ---- a tokenizer for which the world's tags are plain text, several tokens each


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """In the manner of SmolLM2: two control tokens, no tags; ">\\n" and "></" are tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    control = ["<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=control
    )
    backend.train_from_iterator([">\n", "></", "search", "</"] * 50, trainer)
    return Codec(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, eos_token=control[1]))


@pytest.mark.parametrize("after", ["\n", "</", "", "\n and more"])
def test_a_tag_of_several_tokens_ends_a_turn_and_its_crossing_token_is_trained(plain, after):
    action = "<think> Peru </think><search> Peru </search>"
    ids = plain._plain.encode(action + after, add_special_tokens=False).ids
    assert not any("</search>" in plain.view([i]) for i in ids)
    end = next(n for n in range(1, len(ids) + 1) if "</search>" in plain.view(ids[:n]))
    sampler = Sampler(plain, [ids, plain.encode_action("<answer> Lima </answer>")])
    world = World(["Doc 1(Title: Peru)", "ok"])
    task = Task("t", "f", "train", 0, (Message("user", "capital of Peru ?"),), {})
    trajectory = run_episode(
        world, task, plain, sampler, ticket=0, member=0, max_turn_tokens=60, max_tokens=300, call_deadline_s=60.0
    )
    (row,) = trajectory.rows
    assert world.heard[0] == action
    first = row.action_mask & (row.turn == 0)
    assert row.tokens[first].tolist() == ids[:end]  # as sampled, what crosses the string included
    assert plain.view(ids[:end]).startswith(action)
    assert row.tokens.tolist() == sampler.consumed
    # and the world's answer follows in a turn of its own, the sampled one closed by glue
    assert plain.view(row.tokens.tolist()).count("<|im_end|>") == 3
