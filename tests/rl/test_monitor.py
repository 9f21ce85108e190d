"""Every metric reaches the file with its count, nothing measured is null, and a resumed file reads as one run."""

import io
import json

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event  # the events are read back by their own protocol

from rl.monitor import Monitor
from rl.types import Max, Mean


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_file_console_and_events(tmp_path):
    out = io.StringIO()
    monitor = Monitor(tmp_path, console={"success": "episode/success", "kl": "policy/kl", "gone": "x/y"}, stream=out)
    metrics = {
        "episode/success": Mean(np.float32(1), 4),
        "policy/kl": Mean(0.0, 0),
        "policy/ratio_max": Max(np.float32(1.5)),
        "clock/learn_s": 0.25,
        "optim/grad_norm": Mean(float("inf"), 1),
    }
    monitor.write(7, metrics)
    monitor.close()
    monitor.close()
    (record,) = lines(tmp_path)
    assert record.pop("time_s") >= 0
    assert record.pop("count") == {"episode/success": 4, "policy/kl": 0, "optim/grad_norm": 1}
    assert record == {
        "step": 7, "episode/success": 0.25, "policy/kl": None, "policy/ratio_max": 1.5, "clock/learn_s": 0.25,
        "optim/grad_norm": None,
    }  # fmt: skip
    assert out.getvalue() == "step     7 | success 0.25 | kl -\n"
    assert {"episode/success": 0.25, "policy/ratio_max": 1.5, "clock/learn_s": 0.25} == events(tmp_path, step=7)


def events(path, step):
    (file,) = (path / "tensorboard").iterdir()
    data, found = file.read_bytes(), {}
    while data:  # record: length u64, its CRC u32, event, its CRC u32
        size = int.from_bytes(data[:8], "little")
        event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
        if event.step == step:
            found |= {value.tag: pytest.approx(value.simple_value) for value in event.summary.value}
    return found


def test_resume_reads_as_one_run(tmp_path):
    for step in (1, 2, 3):
        monitor = Monitor(tmp_path, stream=io.StringIO(), tensorboard=False)
        monitor.write(step, {"loss": float(step)})
        monitor.close()
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3]  # opening again drops nothing by itself
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a crash
    monitor = Monitor(tmp_path, first_step=3, stream=io.StringIO(), tensorboard=False)
    monitor.write(3, {"loss": 30.0})
    monitor.close()
    assert [(r["step"], r["loss"]) for r in lines(tmp_path)] == [(1, 1), (2, 2), (3, 30)]
