"""Law: no label reaches what learns. Whatever the world knows of the answers, the same episodes make the same batch, to
the bit: through the terms, the gate, the credit and the packer of launch/ttrl.py's own launch. What compares with the
truth is in the record alone.
"""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from configs import ttrl_arith
from envs.arith import ask
from envs.play import play
from launch import build, draws, policy, reinforce, ttrl
from launch.plan import make_plan
from rl import loop
from rl.rollout.pool import Group
from rl.rollout.worker import transcribe
from rl.types import Mean

# By ticket what each member says: the right answer, a wrong one, or nothing. Six vote, the first four are trained on.
SAID = (
    ("right", "right", "wrong", "right", "", "wrong"),
    ("right", "wrong", "right", "wrong", "", ""),  # a tie
    ("", "", "", "wrong", "", "wrong"),  # silence is the most frequent, and no candidate
)


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """The plan of configs/ttrl_arith.py in small, and its codec."""
    c = ttrl_arith.get_config()
    c.world.options.levels = {"sum": (1,)}
    c.world.options.sizes = {"train": 60, "validation": 8, "test": 40}
    c.tokenizer.vocab_size = 300
    c.rl.groups_per_batch, c.rl.group_size, c.reward.options.majority.train_first = len(SAID), 6, 4
    c.batch.rows, c.batch.length, c.ttrl.n = 18, 128, 8
    plan = make_plan(c)
    codec = policy.build_codec(plan, build.build_world(plan), tmp_path_factory.mktemp("ttrl") / "tokenizer")
    return plan, codec


class ScriptedPool:
    """Plays the real world with SAID, which knows the question and not its label."""

    def __init__(self, plan, codec, world):
        self.levels, self.codec, self.world, self.ended = plan.world_options["levels"], codec, world, []

    def submit_group(self, ticket, task, size):
        env, episodes = self.world.make_env(), []
        for member in range(size):
            answer = ask(task.seed, self.levels)[2].answer
            answer = {"right": answer, "wrong": f"1{answer}", "": " "}[SAID[ticket][member]]
            turns, facts = play(env, task, lambda _, answer=answer: f"<answer> {answer} </answer>")
            how = {"stop": env.spec.stop, "ticket": ticket, "member": member}
            episodes.append(transcribe(self.codec, task, turns, facts, **how))
        env.close()
        self.ended.append(Group(ticket, task, tuple(episodes), False, 0))

    def next_group(self, timeout_s=None):
        return self.ended.pop()


class Watching:
    """A learner that remembers what it was to train on."""

    params, batch = None, None

    def prepare(self, state, ref, batch):
        self.batch = batch
        return batch

    def train_step(self, state, batch):
        return state, {"optim/skipped": Mean(0.0, 1)}


def trained(plan, codec, world):
    """(batch, credit by (ticket, member), the record) of one step on `world`."""
    curriculum = draws.build_curriculum(plan, ttrl.adapted_tasks(plan, world))
    options = reinforce.loop_options(plan, codec, world, curriculum, build.build_terms(plan))
    learner, credits, records, pack = Watching(), [], [], options["pack"]

    def watched(episodes, credit, rewards, **how):
        credits.append(credit)
        return pack(episodes, credit, rewards, **how)

    loop.train(
        learner, learner, None, ScriptedPool(plan, codec, world), build.build_gate(plan, 0), loop.Progress(),
        **{**options, "pack": watched, "save_every": 0},
        publish=lambda params, version: None, keep_episodes=lambda step, episodes: None,
        log=lambda step, record: records.append(record), evaluate=None, save=lambda state, progress, score: None,
        steps=1, eval_every=0,
    )  # fmt: skip
    return learner.batch, credits[0], records[0]


def with_answers(world, answers):
    def tasks(split):
        return [dataclasses.replace(task, data={"answers": answers}) for task in world.tasks(split)]

    return dataclasses.replace(world, tasks=tasks)


def test_the_batch_knows_no_label(there):
    plan, codec = there
    world = build.build_world(plan)
    unlabelled = build.build_world(dataclasses.replace(plan, world_options={**plan.world_options, "labels": False}))
    of = partial(trained, plan, codec)
    batch, credit, record = of(world)
    # (r - mean) / std of the four, ddof 1: [1 1 0 1], [0 0 0 0] and [0 0 0 1]; DESIGN section 4 and SPECS section 6
    want = [0.5, 0.5, -1.5, 0.5, *[0] * 4, -0.5, -0.5, -0.5, 1.5]
    assert list(credit) == [(ticket, member) for ticket in range(3) for member in range(4)]
    np.testing.assert_allclose(list(credit.values()), want, atol=1e-5)
    assert batch.action_mask.any() and np.unique(batch.advantages[batch.action_mask]).size > 3
    assert record["majority/label_accuracy"].value == pytest.approx(1 / 3)
    assert record["majority/tie_frac"].value == pytest.approx(1 / 3)
    assert record["majority/ratio"].value == pytest.approx((3 / 6 + 0 + 2 / 6) / 3)
    for other, label_accuracy in ((with_answers(world, ["none"]), 0), (unlabelled, np.nan)):
        again, _, told = of(other)
        for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(again), strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
        np.testing.assert_equal(told["majority/label_accuracy"].value, label_accuracy)
        assert told["majority/ratio"] == record["majority/ratio"]
