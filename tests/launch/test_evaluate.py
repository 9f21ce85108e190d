"""Law: how a scripted episode ended is what the world says, also on the last turn that it allows."""

from configs import swe_rl
from envs.base import EnvSpec, Message, Observation, Step, Task, World
from launch import evaluate
from launch.evaluate import of_policy
from launch.plan import make_plan

TASKS = [Task(f"t/{i}", "f", "test", i, (Message("user", "?"),), {"answers": ["yes"]}) for i in range(4)]


class Asking:
    """Ends with an answer or with "give up"; anything else costs one of two turns."""

    spec = EnvSpec(name="asking", stop=(), max_turns=2)

    def reset(self, task):
        return Observation("")

    def step(self, action):
        facts = {"success": action == "yes", "gave_up": action == "give up"}
        return Step(Observation("hm"), action != "wait", facts)

    def snapshot(self):
        raise NotImplementedError

    def restore(self, snapshot):
        raise NotImplementedError

    def close(self):
        pass


def saying(*actions):
    return lambda task: lambda observations: actions[min(len(observations), len(actions) - 1)]


def test_the_world_says_how_an_episode_ended():
    policies = {
        "wrong at the end": saying("wait", "no"),
        "right at the end": saying("wait", "yes"),
        "never": saying("wait"),
        "gives up": saying("give up"),
    }
    world = World("asking", Asking, lambda split: TASKS, policies, lambda: iter(()))
    got = {name: of_policy(world, name, TASKS) for name in policies}
    ended = {name: {status for status, share in summary["status"].items() if share} for name, summary in got.items()}
    assert {name: {str(s).lower() for s in statuses} for name, statuses in ended.items()} == {
        "wrong at the end": {"done"},
        "right at the end": {"done"},
        "never": {"turn_limit"},
        "gives up": {"gave_up"},
    }
    assert [got[name]["success"] for name in policies] == [0, 1, 0, 0]
    assert [got[name]["turns"] for name in policies] == [2, 2, 2, 1]
    families = [own for name in policies for own in got[name]["families"].values()]
    assert [own["turns"] for own in families] == [2, 2, 2, 1]


def test_who_is_held_out_is_asked_as_often_as_the_config_says(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(evaluate, "of_run", lambda plan, workdir, **how: asked.update(how))
    config = swe_rl.get_config()
    config.eval.final_n, config.eval.final_samples = 45, 3
    evaluate.held_out(make_plan(config), tmp_path, 3)
    assert (asked["split"], asked["n"], asked["samples"], asked["seed"]) == ("test", 45, 3, 3)
    assert [sampling.greedy for sampling in asked["samplings"].values()] == [True, False]
