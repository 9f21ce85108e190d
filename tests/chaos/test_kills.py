"""Law: a run that SIGKILL ends at a random moment, and that is started again, trains the same tickets and ends with the
same parameters as one that nothing disturbed; it loses at most the steps since the last commit.

Law: SIGTERM ends a run within `DEADLINE_S`, with a checkpoint, also while a world hangs and while sampling runs ahead.

Real processes, real signals. `python -m launch.bench chaos` kills twenty times, and while sampling runs ahead too.
"""

import json
import signal
import time
from collections import Counter

from envs import chaos
from launch import bench_chaos, cli
from rl import checkpoint
from rl.episodes import read_episodes
from tests.chaos.conftest import STEPS

DEADLINE_S = (
    60  # of the exit: a step, the checkpoint, ten seconds for the thread that hangs; far more on a busy machine
)

JUDGE = """
import pathlib, time, zlib

HERE = pathlib.Path(__file__).parent

def score(answer, answers):
    if answers[0] == "9" and (HERE / "hold").exists():
        (HERE / "asked").touch()
        time.sleep(600)
    return zlib.crc32(answer.encode()) % 9973 / 9973
"""


def test_killed_at_a_random_moment_and_resumed_it_is_the_same_run(runs, tmp_path):
    done = bench_chaos.killed(tmp_path, runs.config, kills=1, whole=runs.root / "whole", early=0)
    assert done["kills"] == 1 and done["trained"] == STEPS * 4 and done["quarantined"] >= 1
    assert done["tickets_equal"] and done["states_equal"], done
    assert done["steps_lost_most"] <= 2  # one that was being written, one whose record came before its save


def test_killed_with_its_worlds_in_processes_it_is_the_same_run_and_none_of_them_is_left(runs, tmp_path):
    """Some of which a fault ends: the same too as where the worlds are in threads, and nothing ends."""
    config = bench_chaos.to_kill(tmp_path, 1, 0, steps=STEPS, worlds="processes")
    done = bench_chaos.killed(tmp_path, config, kills=1, whole=runs.root / "whole", moments=2)  # not as it starts
    assert done["kills"] == 1 and done["trained"] == STEPS * 4
    assert done["tickets_equal"] and done["states_equal"], done
    assert done["children"] >= 1 and done["left_children"] == 0
    assert chaos.Faults(["exit"], 0.0, 0.0, 1, 0, tmp_path / "faults").injected["exit"] >= 1


def test_a_stop_while_a_world_hangs_and_sampling_runs_ahead(runs, tmp_path):
    """One task of ten hangs for ten minutes: its batch cannot be completed, and others finish behind it and wait."""
    steps, config = 6, bench_chaos.tiny(tmp_path)
    rows = [{"question": f"{i} + 1 = ?", "answers": [str(i + 1)]} for i in range(40)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "judge_of_stops.py").write_text(JUDGE)
    (tmp_path / "hold").touch()
    with config.unlocked():
        config.world.name, config.world.options = "qa", {"file": str(tmp_path / "q.jsonl"), "tag": None}
        config.world.options.reward = "judge_of_stops:score"
        config.rl.max_staleness, config.rl.save_every, config.rl.steps = 2, 0, steps
        config.rollout.call_deadline_s = 900.0
        config.rollout.threads = 8
    bench_chaos.write_config(tmp_path, config)
    workdir = tmp_path / "run"
    launched = bench_chaos.launch(tmp_path, workdir)
    try:
        launched.wait(lambda: (tmp_path / "asked").exists() and bench_chaos.recorded(workdir) == 3)
        time.sleep(2)  # for those behind it
        launched.process.send_signal(signal.SIGTERM)
        assert launched.process.wait(DEADLINE_S) == cli.EXIT_STOPPED
    finally:
        launched.process.kill()
    progress = checkpoint.restore_host(workdir / "ckpt")["progress"]
    assert progress["step"] == 3 and progress["ticket"] == 6
    waiting = {saved["ticket"]: saved["episodes"] for saved in progress["waiting"]}
    assert waiting and not {*waiting} & {*range(6), 7}

    (tmp_path / "hold").unlink()
    bench_chaos.launch(tmp_path, workdir).wait_for_end()
    assert bench_chaos.trained(workdir) == Counter((ticket, member) for ticket in range(2 * steps) for member in (0, 1))
    played = {(t.ticket, t.member): t.to_bytes() for t in read_episodes(workdir)}
    for ticket, episodes in waiting.items():  # not played again
        assert [played[ticket, member] for member in (0, 1)] == episodes
