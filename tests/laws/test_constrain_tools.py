"""Law: under eval.constrain_tools every turn in a world with tools is one call that parses, whatever the policy;
without it a policy that knows nothing makes none. Training stays as it is.
"""

import dataclasses

import jax
import pytest

from configs.defaults import defaults
from envs import choose_tasks, tool_calls
from envs.search.actions import TOOLS
from launch import build, policy
from launch.cli import ConfigError
from launch.plan import make_plan
from models import transformer


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    c = defaults()
    c.tokenizer.vocab_size = 400
    c.world.options.data_dir = str(tmp_path_factory.mktemp("data"))
    c.world.options.sizes = {"train": 8, "validation": 8, "test": 8}
    c.world.options.protocol = "json"
    c.world.options.k, c.world.options.max_words, c.world.options.max_turns = 1, 10, 2
    c.model.d_model, c.model.n_layers, c.model.n_heads, c.model.n_kv_heads, c.model.head_dim = 16, 1, 2, 1, 8
    c.model.d_ff = 16
    c.engine.lanes, c.engine.residents, c.rollout.threads = 8, 8, 8
    c.engine.capacity, c.engine.contexts, c.batch.length = 1536, (1536,), 1536
    c.rollout.max_turn_tokens, c.rollout.max_episode_tokens = 400, 1536
    c.eval.n = c.eval.final_n = 8
    return make_plan(c)


@pytest.fixture(scope="module")
def parts(plan, tmp_path_factory):
    world = build.build_world(plan)
    codec = policy.build_codec(plan, world, tmp_path_factory.mktemp("run") / "tokenizer")
    model = policy.build_model(plan, codec.vocab_size, tmp_path_factory.mktemp("none"))
    return world, codec, model, transformer.init(model, jax.random.key(1))


def turns(codec, trajectories):
    """What was sampled in each turn, forced tokens included: they are in the row, and no action."""
    for trajectory in trajectories:
        (row,) = trajectory.rows
        for k in range(int(row.turn.max()) + 1):
            own = [int(i) for i, of in zip(row.tokens, row.turn, strict=True) if of == k]
            text = codec.view(own)
            yield text[: text.find("<|end|>")] if "<|end|>" in text else text


def test_an_untrained_policy_calls_tools_in_every_turn_or_in_none(plan, parts):
    world, codec, model, params = parts
    constrained = dataclasses.replace(plan, eval=dataclasses.replace(plan.eval, constrain_tools=True))
    tasks = choose_tasks(world, "validation", 8, 0)
    with build.serving(plan, model, params, 0, world, codec) as (engine, pool):
        played = {}
        for name, how in {"free": plan, "constrained": constrained}.items():
            with build.evaluating(how, engine, pool, world, codec) as evaluating:
                assert (evaluating is pool) is (name == "free")
                played[name] = []
                build.play_all(evaluating, tasks, keep=played[name])
        pool.submit_group(0, tasks[0], 2)  # still trains, as it did
        assert not pool.next_group(60).dropped
    free = [tool_calls.parse(text, TOOLS).calls for text in turns(codec, played["free"])]
    said = [tool_calls.parse(text, TOOLS).calls for text in turns(codec, played["constrained"])]
    assert len(free) >= 8 and not any(free)
    assert len(said) >= 8 and all(len(calls) == 1 and isinstance(calls[0], tool_calls.Call) for calls in said), said
    assert all(t.facts["malformed"] == 0 for t in played["constrained"])
    assert all(t.facts["malformed"] > 0 for t in played["free"] if "malformed" in t.facts)


def test_a_world_without_tools_is_refused(plan):
    options = {**plan.world_options, "protocol": "tags"}
    wrong = dataclasses.replace(plan, world_options=options, eval=dataclasses.replace(plan.eval, constrain_tools=True))
    with pytest.raises(ValueError, match="eval.constrain_tools: the world 'search' gives no tools"):
        build.check_data(wrong, demonstrations=False)


def test_training_under_a_constraint_is_refused_by_the_plan():
    c = defaults()
    c.rollout.constrain_tools = True
    with pytest.raises(ConfigError, match="rollout.constrain_tools=True: .*set eval.constrain_tools instead"):
        make_plan(c)
