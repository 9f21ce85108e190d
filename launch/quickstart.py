"""The main job: warm start → GRPO → evaluation on held-out entities, one seed. `make train` runs it.

    python -m launch.quickstart --config=configs/quickstart.py --workdir=runs/quickstart/seed0 [--seed=0] [--control]

Leaves D/sft and D/rl (runs of their own) and D/result.json. The held-out split is read before and after RL, and at no other time.
`--control` adds what `make evidence` compares with: D/sft_only, the same demonstrations for the same minutes, without RL.
"""

import json
import time
from pathlib import Path

from absl import flags

from launch import cli
from launch.plan import Plan, make_plan

CONFIG = cli.define_config("configs/quickstart.py")
WORKDIR = cli.define_workdir("runs/quickstart/seed0")
SEED = flags.DEFINE_integer("seed", 0, "Of everything: demonstrations, weights, sampling")
CONTROL = flags.DEFINE_bool("control", False, "Also train and measure sft_only")


def run(config, plan: Plan, workdir: Path, *, control: bool) -> dict:
    """Every stage that `workdir` does not hold yet; returns the result that is in D/result.json."""
    from launch import build, evaluate, sft, train
    from launch.workdir import git_commit
    from models.sampling import Sampling

    samplings = {
        "greedy": Sampling(temperature=plan.rl.temperature, greedy=True),
        "sampled": Sampling(temperature=plan.rl.temperature),
    }
    result = _Result(workdir / "result.json", plan.seed)

    def held_out(stage: Path) -> dict:
        return evaluate.of_run(plan, stage, split="test", n=plan.eval.final_n, samplings=samplings, seed=plan.seed)

    with result.phase("demonstrations"):
        demonstrations = build.build_demonstrations(plan, build.build_world(plan))
        result["demo_success"] = sum(demo.success for demo in demonstrations) / len(demonstrations)
    with result.phase("sft"), cli.open_workdir(workdir / "sft", config) as stage:
        sft.run(plan, stage)
    with result.phase("eval_before"):
        result.measured("before", held_out(workdir / "sft"))
    with result.phase("rl"), cli.open_workdir(workdir / "rl", config) as stage:
        train.run(plan, stage, workdir / "sft")
    with result.phase("eval_after"):
        result.measured("after", held_out(workdir / "rl"))
    if control:
        minutes = result["minutes"]["sft"] + result["minutes"]["rl"]
        config = config.copy_and_resolve_references()
        with config.unlocked():
            config.sft.minutes = round(minutes, 2)
            config.sft.eval_every = 200
        plan = make_plan(config)
        with result.phase("sft_only"), cli.open_workdir(workdir / "sft_only", config) as stage:
            sft.run(plan, stage)
        result.measured("sft_only", held_out(workdir / "sft_only"))
    result["n_tasks"] = plan.eval.final_n
    result["commit"] = git_commit()
    return result.done()


class _Result:
    """result.json as it grows: a phase that ended in an earlier launch keeps its minutes."""

    def __init__(self, path: Path, seed: int):
        self._path = path
        self._tree = json.loads(path.read_text()) if path.exists() else {"seed": seed, "minutes": {}}

    def __getitem__(self, name: str):
        return self._tree[name]

    def __setitem__(self, name: str, value) -> None:
        self._tree[name] = value

    def phase(self, name: str):
        return _Phase(self, name)

    def measured(self, when: str, summaries: dict[str, dict]) -> None:
        """`summaries` by sampling, "greedy" and "sampled": success as a fraction, and all the rest apart."""
        self._tree[f"success_{when}"] = {name: own["success"] for name, own in summaries.items()}
        self._tree.setdefault("details", {})[when] = summaries
        self.save()

    def save(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._tree, indent=1) + "\n")
        temporary.replace(self._path)

    def done(self) -> dict:
        minutes = self._tree["minutes"]
        minutes["total"] = sum(m for name, m in minutes.items() if name not in ("total", "sft_only"))
        self.save()
        return self._tree


class _Phase:
    def __init__(self, result: _Result, name: str):
        self._result, self._name = result, name

    def __enter__(self) -> None:
        print(f"== {self._name}", flush=True)
        self._start = time.monotonic()

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            minutes = self._result["minutes"]
            minutes[self._name] = minutes.get(self._name, 0.0) + (time.monotonic() - self._start) / 60
            self._result.save()


def table(result: dict) -> str:
    """The result for the terminal."""
    n = result["n_tasks"]
    lines = [
        f"seed {result['seed']}  commit {result['commit']}  {n} held-out tasks  demonstrations succeed {result['demo_success']:.2f}"
    ]
    lines += [f"{'':10}{'sampled':>10}{'greedy':>10}{'searches':>10}"]
    for when in ("before", "after", "sft_only"):
        if when in result["details"]:
            own = result["details"][when]
            lines += [
                f"{when:10}{own['sampled']['success']:10.3f}{own['greedy']['success']:10.3f}{own['sampled']['searches']:10.2f}"
            ]
    for family in result["details"]["after"]["sampled"]["families"]:
        before, after = (result["details"][when]["sampled"]["families"][family] for when in ("before", "after"))
        lines += [
            f"  {family}: sampled success {before['success']:.3f} -> {after['success']:.3f}, searches {before['searches']:.2f} -> {after['searches']:.2f} (n={after['n']})"
        ]
    lines += ["minutes: " + "  ".join(f"{name} {m:.1f}" for name, m in result["minutes"].items())]
    return "\n".join(lines)


def main(_) -> None:
    with cli.validating():
        config = cli.resolve(CONFIG.value, None)
        with config.unlocked():
            config.seed = SEED.value
        plan = make_plan(config)
        workdir = Path(cli.want_workdir(WORKDIR.value))
        for stage in ("sft", "rl"):
            cli.check_workdir(workdir / stage, config)
    workdir.mkdir(parents=True, exist_ok=True)
    print(table(run(config, plan, workdir, control=CONTROL.value)))


if __name__ == "__main__":
    cli.run(main)
