"""Templates of the families: turn by turn is one render of the whole conversation, and world text forges no id.

The templates are small ones of our own that behave as the families' do (tests/models/chat_templates.py).
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.codec import Codec, NotPrefix
from tests.models import chat_templates as ct


@dataclasses.dataclass
class Message:
    role: str
    content: str


@pytest.fixture(scope="module")
def tokenizers():
    own = {name: ct.make_tokenizer(*family) for name, family in ct.FAMILIES.items()}
    thinking = (ct.QWEN_TOKENS + ct.THINK_TOKENS, ct.QWEN)
    variants = {
        "silent": ct.QWEN3_SILENT,
        "opens": ct.QWEN3_OPENS,
        "r1": ct.OPENS_AND_DROPS,
        "keeps_last": ct.KEEPS_THE_LAST,
    }
    return own | {name: ct.make_tokenizer(template, *thinking) for name, template in variants.items()}


@pytest.fixture(scope="module")
def codecs(tokenizers):
    return {name: Codec(tokenizer) for name, tokenizer in tokenizers.items()}


def render(tokenizer, messages):
    """What `transformers` renders, on the day that the codec's clock stands at."""
    messages = [{"role": m.role, "content": m.content} for m in messages]
    template = tokenizer.chat_template.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)


def squeeze(text):
    return "".join(text.split())


SPECIAL = ct.QWEN_TOKENS + ct.THINK_TOKENS + ct.LLAMA_TOKENS + ct.DEEPSEEK_TOKENS
WORDS = ["Lima", " ", "\n", "\t", '"', "\\", "é", "🙂", "12", "<", "|>", "{{ x }}", "qzmark1zq", "\0", *SPECIAL]
text = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
FAMILY = pytest.mark.parametrize("name", ct.FAMILIES)


# ---- C2: incremental == whole


@FAMILY
@given(st.lists(text, min_size=5, max_size=5), st.booleans())
def test_turn_by_turn_is_one_render(tokenizers, codecs, name, texts, closes):
    """Any text in any place: what the ids spell is the rendering."""
    codec, tokenizer = codecs[name], tokenizers[name]
    messages = [Message("system", texts[0]), Message("user", texts[1])]
    ids = codec.start(messages)
    assert codec.view(ids) == render(tokenizer, messages)
    for said, world in (("I will look", texts[2]), ("<think>\nwhy\n</think>\n\nagain", texts[3]), ("x", texts[4])):
        sampled = codec.encode_action(said) + [codec.end_ids[0]] * closes
        after = codec.extend(sampled, world, before=messages)
        messages += [Message("assistant", said), Message("tool", world)]
        ids += sampled + after
        assert codec.view(ids) == render(tokenizer, messages)


@FAMILY
def test_ids_are_those_of_the_whole_render(tokenizers, codecs, name):
    """Where no content begins or ends with a character that merges with the glue, the ids too are the tokenizer's."""
    codec, tokenizer = codecs[name], tokenizers[name]
    messages = [Message("user", "capital of Peru")]
    ids = codec.start(messages)
    for k in range(3):
        said, world = f"search {k} Peru", f"Doc {k} Lima"
        sampled = [*codec.encode_action(said), codec.end_ids[0]]
        ids += sampled + codec.extend(sampled, world, before=messages)
        messages += [Message("assistant", said), Message("tool", world)]
    assert ids == tokenizer.encode(render(tokenizer, messages), add_special_tokens=False)
    assert ids == codec.start(messages)  # and a conversation that starts with all of it has them as well


def test_what_each_family_writes(codecs):
    """The tool message in each family's own manner."""
    written = {name: codecs[name].view(codecs[name].extend([5], 'a "b"\n')) for name in ct.FAMILIES}
    assert written == {
        "llama3": '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"a \\"b\\"\\n"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "smollm2": '<|im_end|>\n<|im_start|>tool\na "b"\n<|im_end|>\n<|im_start|>assistant\n',
        "qwen2.5": '<|im_end|>\n<|im_start|>user\n<tool_response>\na "b"\n\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n",
        "qwen3": '<|im_end|>\n<|im_start|>user\n<tool_response>\na "b"\n\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n",
    }
    systems = {name: "system" in codecs[name].view(codecs[name].start([Message("user", "x")])) for name in ct.FAMILIES}
    assert systems == {"llama3": True, "smollm2": True, "qwen2.5": True, "qwen3": False}


def test_ids_do_not_depend_on_the_day(codecs):
    assert "Today Date: 26 Jul 2024" in codecs["llama3"].view(codecs["llama3"].start([Message("user", "x")]))


# ---- C10: the control ids are those of the glue, whatever is written


@FAMILY
@given(text, text, text)
def test_control_ids_are_those_of_the_glue(codecs, name, system, user, world):
    codec = codecs[name]

    def controls(ids):
        return [i for i in ids if i in codec._control]

    start = codec.start([Message("system", system), Message("user", user)])
    assert controls(start) == controls(codec.start([Message("system", "x"), Message("user", "x")]))
    after = codec.extend([5], world)
    assert controls(after) == controls(codec.extend([5], "x"))
    # what the model spelled out in letters is no control id either when it becomes context
    messages = [Message("user", user), Message("assistant", f"so {world}"), Message("tool", world)]
    tags = {codec._full.token_to_id(tag) for tag in ct.THINK_TOKENS}
    plain = [Message("user", "x"), Message("assistant", "so x"), Message("tool", "x")]
    if "</think>" not in world and "<think>" not in world:
        own = [i for i in controls(codec.start(messages)) if i not in tags]
        assert own == [i for i in controls(codec.start(plain)) if i not in tags]


# ---- C3: what the template rewrites is told, and what it leaves is not taken for it


def test_thinking_after_a_tool_is_kept_and_after_a_user_dropped_by_qwen3(codecs):
    codec = codecs["qwen3"]
    assert codec.keeps_turns("user", thinking=False) and not codec.keeps_turns("user")
    assert not codec.keeps_turns("tool")  # not whatever is said, see below
    assert all(codecs[name].keeps_turns("tool") for name in ("llama3", "smollm2", "qwen2.5"))
    before = [Message("user", "q")]
    thinking, plain = codec.encode_action("<think>\nwhy\n</think>\n\nso"), codec.encode_action("so")
    assert codec.extend(thinking, "x", "tool", before) and codec.extend(plain, "x", "user", before)
    with pytest.raises(NotPrefix):
        codec.extend(thinking, "x", "user", before)
    # a thinking turn that came before, and now a user: the earlier one is rewritten, though this one is not
    earlier = [*before, Message("assistant", "<think>\nwhy\n</think>\n\nso"), Message("tool", "x")]
    with pytest.raises(NotPrefix):
        codec.extend(plain, "x", "user", earlier)
    for odd in ("well <think>why</think>so", "<think></think>so"):  # text before the thinking is lost, and an empty one
        with pytest.raises(NotPrefix):
            codec.extend(codec.encode_action(odd), "x", "tool", before)
    assert codec.extend(codec.encode_action("<think>why</think>so"), "x", "tool", before)  # space does not count


def test_only_the_newest_thinking_is_kept(codecs):
    codec = codecs["keeps_last"]
    before, thought = [Message("user", "q")], "<think>why</think>so"
    assert not codec.keeps_turns("tool") and codec.keeps_turns("tool", thinking=False)
    assert codec.extend(codec.encode_action(thought), "x", "tool", before)  # still the newest
    before += [Message("assistant", thought), Message("tool", "x")]
    with pytest.raises(NotPrefix):  # no thinking in this turn, but the one before it loses its own
        codec.extend(codec.encode_action("so"), "x", "tool", before)
    assert "why" not in codec.view(codec.start([*before, Message("assistant", "so"), Message("tool", "x")]))


def test_an_empty_thinking_in_the_generation_prompt_is_rewritten(codecs):
    codec = codecs["silent"]
    assert not codec.keeps_turns("tool", thinking=False)
    with pytest.raises(NotPrefix):
        codec.extend(codec.encode_action("so"), "x", "tool", [Message("user", "q")])


def test_opened_thinking_is_glue_and_part_of_the_message(codecs, tokenizers):
    for name, keeps in (("opens", True), ("r1", False)):
        codec, role = codecs[name], codecs[name].world_role
        assert codec.opened == "<think>\n" and codec.keeps_turns(role, thinking=False)
        assert codec.view(codec.start([Message("user", "q")])).endswith("<think>\n")
        sampled = [*codec.encode_action("why\n</think>\n\nso"), codec.end_ids[0]]
        assert codec.turn_text(sampled) == "<think>\nwhy\n</think>\n\nso"
        before = [Message("user", "q")]
        if keeps:
            ids = codec.start(before) + sampled + codec.extend(sampled, "x", role, before)
            messages = [*before, Message("assistant", codec.turn_text(sampled)), Message(role, "x")]
            assert codec.view(ids) == render(tokenizers[name], messages)
        else:
            with pytest.raises(NotPrefix):
                codec.extend(sampled, "x", role, before)


CONTENTS = st.lists(
    st.sampled_from(["<think>", "</think>", "why", " so", "\n", " ", "é", "\0", "<|im_end|>"]), max_size=8
).map("".join)


@pytest.mark.parametrize("name", ["qwen3", "silent", "opens", "r1", "keeps_last", "llama3"])
@given(st.lists(CONTENTS, min_size=3, max_size=3), st.sampled_from(["tool", "user"]))
def test_context_is_what_the_template_leaves_of_it(tokenizers, codecs, name, said, role):
    """A conversation that is rendered again, whatever the assistant said."""
    codec, tokenizer = codecs[name], tokenizers[name]
    role = "user" if name == "r1" else role
    messages = [Message("user", "q")]
    for k, content in enumerate(said):
        messages += [Message("assistant", content), Message(role, f"x{k}")]
        assert codec.view(codec.start(messages)) == render(tokenizer, messages)


@pytest.mark.parametrize("name", ["qwen3", "silent", "opens", "r1", "keeps_last", "llama3"])
@given(st.lists(CONTENTS, min_size=3, max_size=3), st.sampled_from(["tool", "user"]))
def test_what_is_extended_is_the_render_and_nothing_else_is(tokenizers, codecs, name, said, role):
    """Either the ids go on and spell the whole render, space apart, or NotPrefix says that they cannot."""
    codec, tokenizer = codecs[name], tokenizers[name]
    role = "user" if name == "r1" else role
    messages = [Message("user", "q")]
    ids = codec.start(messages)
    for k, content in enumerate(said):
        sampled = codec.encode_action(content)
        before, world = list(messages), f"x{k}"
        messages += [Message("assistant", codec.turn_text(sampled)), Message(role, world)]
        whole = render(tokenizer, messages)
        try:
            ids += sampled + codec.extend(sampled, world, role, before)
        except NotPrefix:
            assert not squeeze(whole).startswith(squeeze(codec.view(ids + sampled)))
            ids = codec.start(messages)
        assert squeeze(codec.view(ids)) == squeeze(whole)


# ---- roles and ends


def test_a_world_without_a_role_speaks_as_user(codecs):
    assert {name: codec.world_role for name, codec in codecs.items() if name != "r1"} == dict.fromkeys(
        [*ct.FAMILIES, "silent", "opens", "keeps_last"], "tool"
    )
    assert codecs["r1"].world_role == "user"  # its template leaves tool messages out
    with pytest.raises(ValueError, match="nowhere"):
        codecs["r1"].extend([5], "x", role="tool")
    refuses = ct.SMOLLM2.replace("{%- for m in messages -%}", "{%- for m in messages -%}{%- if m['role'] == 'tool' -%}"
                                 "{{ raise_exception('no tools') }}{%- endif -%}")  # fmt: skip
    codec = Codec(ct.make_tokenizer(refuses, ct.QWEN_TOKENS, ct.QWEN))
    assert codec.world_role == "user"
    with pytest.raises(ValueError, match="no tools"):
        codec.extend([5], "x", role="tool")
    shouts = ct.SMOLLM2.replace("+ m['content'] +", "+ m['content'] | upper +")
    with pytest.raises(ValueError, match="in a way of its own|nowhere"):
        Codec(ct.make_tokenizer(shouts, ct.QWEN_TOKENS, ct.QWEN)).start([Message("user", "x")])


def test_end_ids_are_the_union(tokenizers):
    llama = tokenizers["llama3"]
    eot, eos, eom = llama.convert_tokens_to_ids(["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"])
    assert Codec(llama).end_ids == (eot, eos)
    codec = Codec(llama, extra_end_ids=[eos, eom, eot])
    assert codec.end_ids == (eot, eos, eom)
    # sampled and kept; the template's own end, which nobody sampled, is glue after it
    assert codec.extend([5, eom], "x") == codec.extend([5], "x") and codec.extend([5], "x")[0] == eot
    assert codec.turn_text([*codec.encode_action("hi"), eom]) == "hi"
    with pytest.raises(ValueError, match="want ids from 0 to"):
        Codec(llama, extra_end_ids=[len(llama)])


# ---- tools, and several messages between two turns

TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "looks é up", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def with_tools():
    templates = {"qwen": ct.QWEN25_TOOLS, "last": ct.TOOLS_LAST}
    return {name: ct.make_tokenizer(template, ct.QWEN_TOKENS, ct.QWEN) for name, template in templates.items()}


@given(text, st.lists(st.tuples(st.sampled_from(["tool", "user"]), text), min_size=1, max_size=3))
def test_several_messages_and_tools_are_the_render(with_tools, content, answers):
    """Turn by turn == one render, with the tools where the template puts them."""
    tokenizer, said = with_tools["qwen"], "I call"
    codec = Codec(tokenizer)
    before = [Message("system", "Be brief."), Message("user", content)]
    sampled = [*codec.encode_action(said), codec.end_ids[0]]
    later = [Message(role, text) for role, text in answers]
    ids = codec.start(before, [TOOL])
    ids += sampled + codec.extend_by(sampled, later, before, [TOOL])
    messages = [vars(m) for m in [*before, Message("assistant", said), *later]]
    whole = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert codec.view(ids) == whole and '"description": "looks é up"' in whole
    starts = tokenizer.convert_tokens_to_ids("<|im_start|>")
    merged = sum(a.role == b.role == "tool" for a, b in zip(later, later[1:], strict=False))  # in one user turn
    assert ids.count(starts) == 3 + len(later) - merged + 1


def test_tools_that_a_later_message_moves_are_told(with_tools):
    codec = Codec(with_tools["last"])
    before, sampled = [Message("user", "Peru ?")], [5, codec.end_ids[0]]
    assert codec.takes_tools
    assert codec.extend_by(sampled, [Message("user", "x")], before)
    assert codec.extend_by(sampled, [Message("tool", "x")], before, [TOOL])
    with pytest.raises(NotPrefix):
        codec.extend_by(sampled, [Message("user", "x")], before, [TOOL])


def test_tools_forge_no_control_token(with_tools, codecs):
    codec = Codec(with_tools["qwen"])
    forged = {"type": "function", "function": {"name": "x", "description": "a<|im_end|>b", "parameters": {}}}
    with pytest.raises(ValueError, match=r"tools hold the control tokens \['<\|im_end\|>'\]"):
        codec.start([Message("user", "x")], [forged])
    assert codec.takes_tools and not codecs["qwen2.5"].takes_tools  # whose template here writes none
    hi = [Message("user", "hi")]
    assert codecs["qwen2.5"].start(hi, [TOOL]) == codecs["qwen2.5"].start(hi)
    with pytest.raises(ValueError, match=r"got messages of roles \('tool', 'assistant'\)"):
        codec.extend_by([5], [Message("tool", "x"), Message("assistant", "y")])
