"""What can be wrong with data, terms and starts is said before a workdir is made."""

import dataclasses
from types import SimpleNamespace

import pytest

from configs import qa_file, quickstart
from launch import build, runs, worlds
from launch.plan import make_plan
from models.codec import Codec
from models.config import Lora
from tests.models import chat_templates as ct


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    config = quickstart.get_config()
    config.world.options.data_dir = str(tmp_path_factory.mktemp("data"))
    config.world.options.sizes = {"train": 20, "validation": 8, "test": 8}
    config.eval.n = config.eval.final_n = 8
    return make_plan(config)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("qa") / "q.jsonl"
    file.write_text("".join(f'{{"prompt": "{i} ?", "answers": ["{i}"]}}\n' for i in range(100)))
    config = qa_file.get_config(f"file={file}")
    config.eval.n = config.eval.final_n = 8
    return make_plan(config)


SEARCHES = {"one_hop": {"good": 1.0}, "more_hops": {"good": 1.0}}  # demonstrations that all search


def test_what_is_right_passes(search, questions):
    build.check_data(search, demonstrations=True, held_out=True)
    build.check_data(questions, demonstrations=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eval": {"n": 9}}, "got n=9 tasks to choose, but split 'validation' of the world 'search' has 8"),
        ({"eval": {"final_n": 9}}, "got n=9 tasks to choose, but split 'test' of the world 'search' has 8"),
        ({"reward_terms": {"success": 1.0, "searches": 0.1}}, "searches"),
        (
            {"reward_terms": {"success": 1.0, "exact_macth": 0.1}, "reward_reach": {"exact_macth": 1.0}},
            r"reward.terms.exact_macth: reads \['exact_macth'\], which the world 'search' does not report",
        ),
        ({"reward_terms": {"success": 1.0, "soft_overlong": 0.3}}, "reward.options.soft_overlong: .*missing"),
        ({"reward_leader": "majority"}, "'majority' among them"),
        ({"tokenizer_path": "nowhere"}, "nowhere"),
        ({"lora": Lora(129, 16.0)}, "lora.rank: got 129, want at most 128, the smaller side of wq"),
    ],
)
def test_what_is_wrong_is_named(search, change, message):
    if "eval" in change:
        change = {"eval": dataclasses.replace(search.eval, **change["eval"])}
    with pytest.raises((ValueError, OSError), match=message):
        build.check_data(dataclasses.replace(search, **change), demonstrations=True, held_out=True)


def test_a_term_wants_the_facts_that_it_reads(questions):
    bonus = dataclasses.replace(questions, reward_terms={"success": 1.0, "search_bonus": 0.1})
    with pytest.raises(
        ValueError, match=r"reward.terms.search_bonus: reads \['repeated', 'searches'\], which the .*'qa'"
    ):
        build.check_data(bonus, demonstrations=False)
    votes = dataclasses.replace(questions, reward_terms={"majority": 1.0}, reward_leader="majority")
    build.check_data(votes, demonstrations=False)
    assert [term.name for term in build.build_terms(votes)] == ["majority"]


def test_a_world_without_demonstrator_has_no_warm_start(questions):
    with pytest.raises(ValueError, match="no demonstrator"):
        build.check_data(questions, demonstrations=True)


def test_a_start_that_broke_off_is_no_start_from_nothing(search, tmp_path):
    runs.check_start(search, tmp_path, None)
    runs.note_init(tmp_path / "warm", tmp_path)
    with pytest.raises(ValueError, match="broke off before --init=.*warm was copied"):
        runs.check_start(search, tmp_path, None)


def test_another_tokenizer_is_refused(tmp_path):
    for name in ("init", "mine"):
        (tmp_path / name / "tokenizer").mkdir(parents=True)
        (tmp_path / name / "tokenizer" / "tokenizer.json").write_text(name)
    with pytest.raises(ValueError, match="another tokenizer"):
        runs.copy_tokenizer(tmp_path / "init", tmp_path / "mine")


def test_demonstrations_that_fit_no_row_are_refused(search):
    world = build.build_world(search)
    plan = dataclasses.replace(search, n_demos=3, sft=dataclasses.replace(search.sft, length=8))
    demos = build.build_demonstrations(plan, world)
    from models.codec import Codec
    from models.tokenizer import train_tokenizer

    folder = search.world_options["data_dir"] + "/tokenizer"
    codec = Codec(train_tokenizer(world.texts(), 400, folder))
    with pytest.raises(ValueError, match="no example fits a row of sft.length=8"):
        build.pack_demonstrations(plan, codec, demos, world)


def test_demonstrations_without_forks_have_none(search):
    """A third of the calls fails; what is kept is whole, as many as asked for, and played by no other demonstrator."""
    options = {**search.world_options, "flaky_rate": 0.3, "flaky_kinds": ("error", "timeout", "empty", "misleading")}
    plan = dataclasses.replace(search, n_demos=20, world_options=options)
    some = build.build_demonstrations(plan, build.build_world(plan))
    none = build.build_demonstrations(dataclasses.replace(plan, demos_without=("forks",)), build.build_world(plan))
    assert sum(demo.facts["forks"] > 0 for demo in some) > 2 and len(none) == 20
    assert not any(demo.facts["forks"] for demo in none)
    assert [demo.steps for demo in some if not demo.facts["forks"]] == [demo.steps for demo in none][
        : sum(not demo.facts["forks"] for demo in some)
    ]
    options |= {"demonstrations": SEARCHES}
    for name, message in {
        "spoons": r"demos.without: got \['spoons'\], want of",
        "searches": "0 of 200 .* want 20",
    }.items():
        wrong = dataclasses.replace(plan, demos_without=(name,), world_options=options)
        with pytest.raises(ValueError, match=message):
            build.build_demonstrations(wrong, build.build_world(wrong))


def test_hinted_demonstrations_have_the_hint_where_there_is_one(search):
    """The page of the second hop is told, that of a question of one hop is in the question."""
    plan = dataclasses.replace(search, n_demos=20, demos_hinted=True)
    world = build.build_world(plan)
    plain = build.build_demonstrations(dataclasses.replace(plan, demos_hinted=False), world)
    told = build.build_demonstrations(plan, world)
    assert [demo.steps for demo in told] == [demo.steps for demo in plain]
    seen = set()
    for demo, same in zip(told, plain, strict=True):
        hint, hops = world.hint(same.task), len(same.task.data["chain"])
        prompt = same.task.prompt[-1].content
        assert demo.task.prompt[-1].content == (f"{prompt}\nHint: {hint}" if hint else prompt)
        seen.add((hops > 1, hint is not None))
    assert (True, True) in seen and (False, False) in seen and (False, True) not in seen


def test_the_rows_that_a_template_may_make_must_fit_a_batch(search):
    world = build.build_world(search)
    drops = Codec(ct.make_tokenizer(ct.KEEPS_THE_LAST, ct.QWEN_TOKENS + ct.THINK_TOKENS, ct.QWEN))
    episodes, turns = search.rl.groups_per_batch * search.rl.group_size, build.env_spec(world).max_turns
    few = dataclasses.replace(search, batch=dataclasses.replace(search.batch, rows=episodes * turns - 1))
    with pytest.raises(
        ValueError, match=f"< {episodes} episodes x {turns} turns.*rewrites earlier turns.*raise batch.rows"
    ):
        build.build_packer(few, drops, world)
    enough = dataclasses.replace(search, batch=dataclasses.replace(search.batch, rows=episodes * turns))
    assert build.build_packer(enough, drops, world).keywords["shares"] is True
    keeps = Codec(ct.make_tokenizer(ct.SMOLLM2, ct.QWEN_TOKENS, ct.QWEN))
    assert build.build_packer(search, keeps, world).keywords["shares"] is False


@pytest.mark.parametrize(("deadline_s", "waits_s"), [(30.0, 600.0), (3600.0, 3660.0)])
def test_no_call_that_a_plan_allows_is_a_hang(search, monkeypatch, deadline_s, waits_s):
    monkeypatch.setattr(build, "Pool", lambda *args, **how: how)
    plan = dataclasses.replace(search, rollout=dataclasses.replace(search.rollout, call_deadline_s=deadline_s))
    assert build.build_pool(plan, None, worlds.Placed(None, None), None)["watchdog_s"] == waits_s


def test_every_query_may_fail_before_a_pool_gives_up(search, monkeypatch):
    monkeypatch.setattr(build, "Pool", lambda *args, **how: how)
    plan = dataclasses.replace(search, ttrl=dataclasses.replace(search.ttrl, per_query=True, queries=5, samples=16))
    plan = dataclasses.replace(plan, rollout=dataclasses.replace(plan.rollout, data_retries=1))
    played = 5 * (16 + 1 + 8 * plan.rl.group_size)  # measured, greedily too, then refused eight times
    assert build.build_pool(plan, None, worlds.Placed(None, None), None)["failures_in_row"] > played * 2


def test_a_fleet_without_members_says_why_before_it_is_a_hang(search, monkeypatch):
    """Also where evaluation has a pool of its own, which has the calls of the other one."""

    class Dead(SimpleNamespace):
        make_env = ready = stats = close = staticmethod(lambda: None)
        patience_s = 630.0

    monkeypatch.setattr(worlds, "Fleet", lambda *args, **how: Dead())
    monkeypatch.setattr(build, "Pool", lambda *args, **how: how)
    plan = dataclasses.replace(search, rollout=dataclasses.replace(search.rollout, worlds="processes"))
    with worlds.placed(plan, None) as place:
        assert build.build_pool(plan, None, place, None)["watchdog_s"] == 690.0
        again = worlds.Placed(place.make_env, place.calls)
        assert build.build_pool(plan, None, again, None)["watchdog_s"] == 690.0
