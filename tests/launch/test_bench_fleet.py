"""`launch.bench fleet`, small: both places play the same, and what other processes import is a world's."""

import subprocess
import sys
from pathlib import Path

from launch import bench_fleet, sleepers

ROOT = Path(__file__).resolve().parents[2]


def test_a_line_for_each_place(monkeypatch):
    monkeypatch.setattr(sleepers, "SECONDS", 0.1)  # of the worlds here: those in processes take their own second
    lines = {line["bench"]: line for line in bench_fleet.workloads(0, episodes=16, rounds=1)}
    here, there = lines["fleet/threads"], lines["fleet/processes"]
    assert here.keys() < there.keys() and here["of_it_in_processes"] == 0
    assert here["cpu_ms_a_turn"] > 0 and there["cpu_ms_a_turn"] >= there["of_it_in_processes"]
    assert there["wall_s"] >= sleepers.TURNS * 0.2 > here["wall_s"] >= 0.1


def test_the_world_of_the_bench_imports_no_more_than_a_world():
    code = f"import sys, {sleepers.__name__}; print(sorted({{m.partition('.')[0] for m in sys.modules}}))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "'envs'" in out and not any(f"'{name}'" in out for name in ("jax", "rl", "models", "transformers"))
