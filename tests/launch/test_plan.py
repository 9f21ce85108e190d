"""Law: what cannot run is refused by the plan, in one sentence that names the key; an unknown key is refused too."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.defaults import defaults
from launch.cli import ConfigError
from launch.plan import make_plan, on_one_device
from launch.plan_checks import check_processes

ROOT = Path(__file__).resolve().parents[2]

AT_LEAST_1 = (
    "mesh.data mesh.fsdp mesh.tensor batch.rows batch.micro_rows batch.logp_chunk sft.micro_rows "
    "engine.lanes engine.round_tokens "
    "engine.prefill_rows engine.prefill_chunk rollout.threads rollout.processes rollout.max_turn_tokens demos.n "
    "sft.steps sft.rows "
    "rft.rounds rft.tasks rft.per_task rft.steps rm.steps rm.roll_ins curriculum.steps hints.steps "
    "ttrl.n ttrl.samples ttrl.queries ttrl.steps rl.steps rl.groups_per_batch eval.n eval.final_n eval.final_samples"
).split()
AT_LEAST_0 = (
    "seed rollout.retries rollout.group_retries rollout.data_retries rollout.calls_at_once "
    "sft.warmup_steps sft.eval_every sft.save_every rm.episodes rl.warmup_steps rl.save_every "
    "rl.ref_every eval.every"
).split()
POSITIVE = (
    "rollout.call_deadline_s sft.learning_rate rm.learning_rate rl.learning_rate rl.clip_norm rl.temperature "
    "rl.value_clip rl.kl_horizon"
).split()
NOT_NEGATIVE = (
    "sft.weight_decay rl.weight_decay rl.kl_coef rl.entropy_coef rl.value_coef credit.weight reward.max_shaping "
    "rl.kl_target rl.is_cap"
).split()


def tree(**changes):
    """The defaults as a plain tree, with some leaves or sections (dotted names, "/" for ".") set."""
    config = defaults().to_dict()
    for name, value in changes.items():
        *parents, last = name.split("/")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return config


def check_refused(message: str, **changes) -> None:
    with pytest.raises(ConfigError) as err:
        make_plan(tree(**changes))
    assert message in str(err.value), err.value
    assert "\n" not in str(err.value) or "nothing reads" in str(err.value)


def at(name: str) -> str:
    return name.replace(".", "/")


def test_where_the_worlds_are():
    check_refused("rollout.worlds='actors': wanted one of threads, processes, ray", **{"rollout/worlds": "actors"})
    check_refused("rollout.ray_address='auto' with rollout.worlds='threads'", **{"rollout/ray_address": "auto"})
    make_plan(tree(**{"rollout/worlds": "ray", "rollout/ray_address": "auto"}))


# Plans that pass, each until one more key is wrong.
BY_CRITIC = {"rl/recipe": "ppo", "rollout/abandon/value_below": 0.2, "rollout/abandoned": "excluded"}
ALONE = {"rl/recipe": "reinforce_pp", "rl/group_size": 1}


@pytest.mark.parametrize("name", AT_LEAST_1)
def test_at_least_one(name):
    check_refused(f"{name}: got 0, wanted at least 1", **{at(name): 0})


@pytest.mark.parametrize("name", AT_LEAST_0)
def test_at_least_none(name):
    check_refused(f"{name}: got -1, wanted at least 0", **{at(name): -1})


@pytest.mark.parametrize("name", POSITIVE)
def test_more_than_zero(name):
    check_refused(f"{name}: got 0.0, wanted more than 0", **{at(name): 0.0})


@pytest.mark.parametrize("name", NOT_NEGATIVE)
def test_not_negative(name):
    check_refused(f"{name}: got -0.1, wanted at least 0", **{at(name): -0.1})


@pytest.mark.parametrize("name", [*POSITIVE, *NOT_NEGATIVE])
def test_finite(name):
    check_refused(f"config key {name}: got nan, want a finite number", **{at(name): float("nan")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl/b2": 1.0}, "rl.b2: got 1.0, wanted more than 0 and less than 1"),
        ({"rl/b2": 0.0}, "rl.b2: got 0.0"),
        ({"rl/clip_low": 1.1}, "wanted 0 <= low <= 1"),
        ({"rl/clip_high": -0.1}, "high >= 0"),
        ({"batch/length": 1}, "batch.length: got 1, wanted at least 2"),
        ({"batch/rows": 129}, "batch.rows=129 is not a multiple of batch.micro_rows=2"),
        ({"sft/rows": 6}, "sft.rows=6 is not a multiple of sft.micro_rows=4"),
        ({"sft/length": 1}, "sft.length: got 1, wanted at least 2"),
        ({"batch/rows": 124}, "batch.rows=124 < rl.groups_per_batch x rl.group_size = 128"),
        ({"mesh/data": 8}, "batch.micro_rows=2 cannot be sharded over mesh.data x mesh.fsdp = 8"),
        ({"engine/capacity": 1}, "engine.capacity: got 1, wanted at least 2"),
        ({"rollout/max_episode_tokens": 1}, "rollout.max_episode_tokens: got 1, wanted at least 2"),
        ({"batch/length": 383}, "rollout.max_episode_tokens=384 does not fit batch.length=383"),
        ({"engine/capacity": 383}, "rollout.max_episode_tokens=384 does not fit engine.capacity=383"),
        ({"engine/lanes": 129}, "engine.lanes=129 > engine.residents=128"),
        ({"engine/contexts": (192, 192, 384)}, "engine.contexts=(192, 192, 384) must rise"),
        ({"engine/contexts": (384, 192)}, "must rise"),
        ({"engine/contexts": (0, 384)}, "must rise from at least 1"),
        ({"engine/contexts": (192,)}, "end at engine.capacity=384"),
        ({"engine/contexts": ()}, "end at engine.capacity=384"),
        ({"engine/contexts": 384}, "engine.contexts: got 384, wanted a tuple of whole numbers"),
        ({"engine/contexts": (192.5, 384)}, "wanted a tuple of whole numbers"),
        ({"rl/max_staleness": -1}, "rl.max_staleness: got -1, wanted at least 0"),
        ({"rl/minibatches": 0}, "rl.minibatches: got 0, wanted at least 1"),
        ({"rl/minibatches": 3}, "rl.steps=100: not a multiple of rl.minibatches=3"),
        (
            {"rl/minibatches": 4, "rl/save_every": 0, "eval/every": 6},
            "eval.every=6: not a multiple of rl.minibatches=4",
        ),
        (
            {"rl/minibatches": 100, "rl/save_every": 0, "eval/every": 0},
            "100 mini-batches of rows by batch.micro_rows=2 may fill 200",
        ),
        (
            {"rl/minibatches": 200, "rl/steps": 200, "rl/save_every": 0, "eval/every": 0},
            "a batch has 128 episodes, of which each update wants its share",
        ),
        ({"rl/proximal": "none"}, "rl.proximal='none': wanted 'forward' or 'loglinear'"),
        ({"rl/proximal": "loglinear"}, "rl.proximal='loglinear' with rl.recipe='grpo': no proximal policy is read"),
        ({"rollout/abandon/repeats": 1}, "rollout.abandon.repeats: got 1, wanted 0 (off) or at least 2"),
        (
            {"rollout/abandon/prm_below": 0.1},
            "rollout.abandon.prm_below=0.1 with rollout.abandon.prm_path='': wanted b",
        ),
        ({"rollout/abandon/prm_path": "runs/prm"}, "rollout.abandon.prm_below=0.0 with rollout.abandon.prm_path='runs"),
        ({"rollout/abandon/prm_below": 1.5}, "rollout.abandon.prm_below: got 1.5, wanted 0 to 1"),
        ({"rollout/abandon/value_below": -0.1}, "rollout.abandon.value_below: got -0.1, wanted at least 0"),
        ({"rollout/abandon/value_below": 0.1}, "value_below=0.1 with credit.name='group': there is no critic"),
        ({"rollout/abandon/audit_frac": -0.1}, "rollout.abandon.audit_frac: got -0.1, wanted 0 to 1"),
        ({"rollout/abandoned": "drop"}, "rollout.abandoned='drop': wanted 'failure' or 'excluded'"),
        ({"rollout/abandoned": "excluded"}, "no rule of rollout.abandon is on"),
        ({**BY_CRITIC, "rollout/abandoned": "failure"}, "the critic would be taught its own verdicts; wanted 'exc"),
        ({**BY_CRITIC, "rollout/abandon/audit_frac": 0.0}, "the critic would be taught its own verdicts; wanted 'exc"),
        ({**BY_CRITIC, "rollout/abandon/value_after": 100}, "value_after=100: the run ends before; wanted fewer"),
        ({**BY_CRITIC, "rollout/abandon/value_after": 0}, "rollout.abandon.value_after=0: a critic begins at 0"),
        ({**BY_CRITIC, "rl/value_coef": 0.0}, "value_below=0.2 with rl.value_coef=0: the critic is never trained"),
        ({**BY_CRITIC, "credit/discount": 0.95}, "with credit.discount=0.95: what the critic expects then falls"),
        ({**BY_CRITIC, "ttrl/per_query": True}, "with ttrl.per_query: each query begins with a new critic"),
        (
            {"rollout/abandon/repeats": 3, "reward/leader": "orm"},
            "rollout.abandoned='failure' with reward.leader='orm': a model judges what there is",
        ),
        (
            {"rl/filter_overlong": True, "rl/recipe": "reinforce_pp"},
            "rl.filter_overlong with credit.name='returns': a filtered episode is in no batch",
        ),
        ({**ALONE, "rl/drop_equal_groups": True}, "rl.drop_equal_groups with rl.group_size=1: the rewards of one"),
        ({**ALONE, "curriculum/name": "plr"}, "curriculum.name='plr' with rl.group_size=1: it goes by the spread"),
        (
            {"rl/kl_coef": 0.04, "rl/kl_target": 0.05, "rl/kl_horizon": 25.6},
            "rl.kl_horizon=25.6: one update can take all of the coefficient",
        ),
        (
            {"ttrl/per_query": True, "rl/drop_equal_groups": True},
            "ttrl.per_query with rl.drop_equal_groups: the groups",
        ),
        (
            {"ttrl/per_query": True, "rl/kl_coef": 0.1, "rl/ref_every": 5},
            "ttrl.per_query with ttrl.steps=8, rl.ref_every=5: the second query's reference",
        ),
        ({"rl/recipe": "prm"}, "rl.recipe='prm': wanted one of grpo, dapo"),
        ({"rl/recipe": "ppo", "credit/name": "group"}, "with credit.name='group': the value head is ppo's"),
        ({"rl/recipe": "cispo"}, "rl.clip_high: got none for cispo"),
        ({"credit/name": "turn"}, "rl.recipe='grpo' with credit.name='turn'"),
        ({"credit/name": "step"}, "credit.name='step': wanted one of group, others, anchor, process, returns, token"),
        ({"rm/kind": "both"}, "rm.kind='both': wanted orm or prm"),
        ({"rm/held_out": 1.0}, "rm.held_out: got 1.0, wanted more than 0 and less than 1"),
        ({"credit/discount": 1.1}, "credit.discount: got 1.1, wanted 0 to 1"),
        ({"rl/recipe": "rloo"}, "rl.loss_tokens=0: rloo divides an episode's sum by it; wanted at least 1"),
        ({"rl/kl_kind": "k4"}, "rl.kl_kind='k4': wanted k1, k2 or k3"),
        ({"rl/kl_in": "both"}, "rl.kl_in='both': wanted loss or reward"),
        ({"rl/kl_in": "reward"}, "rl.kl_in='reward' with rl.kl_coef=0: there is no penalty and no reference"),
        ({"rl/kl_target": 0.1}, "rl.kl_target=0.1 with rl.kl_coef=0"),
        ({"rl/ref_every": 10}, "rl.ref_every=10 with rl.kl_coef=0"),
        ({"rl/ref_every": 10, "rl/kl_coef": 0.1, "lora/rank": 4}, "with lora.rank=4: the reference of adapters is"),
        ({"rl/kl_in": "reward", "rl/kl_coef": 0.1, "rl/kl_kind": "k3"}, "as a reward k1 alone has the gradient"),
        (
            {"rl/kl_in": "reward", "rl/kl_coef": 0.1, "rl/recipe": "gigpo"},
            "rl.kl_in='reward' with credit.name='anchor': the turns of a group are compared before",
        ),
        (
            {"rl/kl_in": "reward", "rl/kl_coef": 0.1, "rl/filter_overlong": True},
            "rl.kl_in='reward' with rl.filter_overlong and credit.name='group': a filtered episode is in no batch",
        ),
        (
            {"rl/train_on_world": True, "rl/max_staleness": 1},
            "rl.train_on_world with rl.max_staleness=1: nobody sampled",
        ),
        ({"rl/train_on_world": True, "rl/recipe": "ppo"}, "rl.train_on_world with credit.name='token' and rl.kl_in"),
        (
            {"rl/train_on_world": True, "rl/kl_coef": 0.1, "rl/kl_in": "reward"},
            "wanted credit of group, others, anchor, process and rl.kl_in='loss'",
        ),
        ({"rl/dual_clip": 1.0}, "rl.dual_clip=1.0: wanted a bound above 1 on the ratio, or 0"),
        ({"rl/group_size": 1}, "a group of one has advantage 0"),
        ({"rl/schedule": "step"}, "wanted constant, cosine or linear"),
        ({"rl/reduce": "fixed"}, "wanted sequence or token"),
        ({"rl/scale": "mad"}, "wanted std or none"),
        ({"curriculum/name": "random"}, "curriculum.name='random': wanted one of uniform, easy_to_hard, success_band"),
        ({"curriculum/epsilon": 0.0}, "curriculum.epsilon: got 0.0, wanted more than 0 and at most 1"),
        ({"curriculum/low": 0.9}, "curriculum.low=0.9, curriculum.high=0.8: wanted 0 <= low <= high <= 1"),
        ({"curriculum/admit_high": 1.5}, "wanted 0 <= low <= high <= 1"),
        ({"curriculum/temperature": 0.0}, "curriculum.temperature: got 0.0, wanted more than 0"),
        ({"curriculum/staleness": 1.5}, "curriculum.staleness: got 1.5, wanted 0 to 1"),
        ({"curriculum/target": 101.0}, "curriculum.target: got 101.0, wanted 0 to 100"),
        ({"hints/prob": 2.0}, "hints.prob: got 2.0, wanted 0 to 1"),
        ({"eval/split": "train"}, "wanted validation or test"),
        ({"reward/reach": {"searches": 4.0}}, "reward.reach: got ['searches'], wanted names of reward.terms: ['succ"),
        ({"reward/terms": {"success": "much"}}, "reward.terms.success: got 'much', want a finite number"),
        ({"model/n_kv_heads": 3}, "want n_kv_heads to divide n_heads"),
        ({"model/head_dim": 31}, "head_dim: got 31, want an even number"),
        ({"model/init": "zeros"}, "init: got 'zeros', want one of"),
        ({"model/dtype": "float64"}, "dtype: got 'float64'"),
        ({"model/remat": "some"}, "remat: got 'some'"),
        ({"model/init": "mimetic", "model/d_model": 64}, "got n_kv_heads x head_dim = 128, wanted at most"),
        ({"tokenizer/vocab_size": 0}, "vocab_size: got 0, want at least 1"),
        ({"lora/rank": -1}, "lora.rank: got -1, wanted at least 0"),
        ({"lora/rank": 4, "lora/alpha": 0.0}, "lora.alpha: got 0.0, want a finite number above 0"),
        ({"lora/rank": 4, "lora/targets": ("q",)}, "lora.targets: got ('q',), want one or more of"),
        ({"lora/rank": 4, "lora/targets": ()}, "lora.targets: got (), want one or more of"),
        ({"demos/without": "forks"}, "demos.without: got 'forks', wanted a tuple of names"),
        ({"lora/rank": 4, "lora/targets": "wq"}, "lora.targets: got 'wq', wanted a tuple of names"),
    ],
)
def test_impossible_combinations(changes, message):
    check_refused(message, **changes)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("rl.steps", 1.5, "whole number"),
        ("rl.steps", True, "whole number"),
        ("rl.drop_equal_groups", 1, "bool"),
        ("batch.rows", "128", "whole number"),
        ("sft.learning_rate", "fast", "finite number"),
        ("world.name", None, "string"),
        ("model.d_model", 128.0, "whole number"),
        ("model.tie_embeddings", "yes", "bool"),
        ("mesh.data", "one", "whole number"),
        ("lora.rank", 4.0, "whole number"),
        ("lora.alpha", float("inf"), "finite number"),
    ],
)
def test_a_leaf_of_another_type(name, value, kind):
    check_refused(f"config key {name}: got {value!r}, want a {kind}", **{at(name): value})


@pytest.mark.parametrize(
    "name",
    "mesh.data model.d_model lora.rank lora.targets batch.rows engine.contexts rollout.retries demos.n sft.rows rl.b2 "
    "reward.reach eval.n".split(),
)
def test_an_extra_key_of_a_section_and_a_missing_one(name):
    section, _, leaf = name.partition(".")
    check_refused(f"nothing reads; remove or rename:\n  {section}.extra", **{f"{section}/extra": 1})
    config = defaults().to_dict()
    del config[section][leaf]
    with pytest.raises(ConfigError, match=f"config has no (key|section) '{name}'"):
        make_plan(config)


def test_an_option_of_the_model_that_is_not_in_the_defaults():
    assert make_plan(tree(**{"model/rms_eps": 1e-5})).model["rms_eps"] == 1e-5
    assert "rms_eps" not in make_plan(tree()).model  # what a config file leaves out, the plan leaves to ModelConfig


def test_adapters_are_off_at_rank_0_whatever_the_rest():
    assert make_plan(tree()).lora is None
    assert make_plan(tree(**{"lora/alpha": -1.0, "lora/targets": ("wq",)})).lora is None
    lora = make_plan(tree(**{"lora/rank": 4, "lora/alpha": 8, "lora/targets": ["wq", "down"]})).lora
    assert (lora.rank, lora.scale, lora.targets) == (4, 2.0, ("wq", "down"))


def test_a_batch_is_dealt_to_the_processes():
    plan = make_plan(tree(**{"mesh/data": 2, "rl/groups_per_batch": 15}))
    check_processes(plan, 1)
    with pytest.raises(ConfigError, match="rl.groups_per_batch=15: not a multiple of 2 processes"):
        check_processes(plan, 2)
    with pytest.raises(ConfigError, match="mesh.data x mesh.fsdp = 1: not a multiple of 2 processes"):
        check_processes(on_one_device(plan), 2)
    check_processes(make_plan(tree(**{"mesh/fsdp": 2})), 2)
    with pytest.raises(ConfigError, match="engine.split=True: of several processes each has its engine on its first"):
        check_processes(make_plan(tree(**{"mesh/fsdp": 2, "engine/split": True})), 2)


def test_a_plan_needs_no_jax():
    code = "import sys, configs.defaults as d, launch.plan as p; p.make_plan(d.defaults()); print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert out.stdout == "False\n", out.stderr
