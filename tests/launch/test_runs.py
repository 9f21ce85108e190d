"""A run that is stopped says what is so, and a second signal is not taken for the first."""

import os
import signal

import pytest

from launch import runs
from rl.loop import Progress


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_after_the_first_signal_either_kills(first):
    both = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in both]
    with runs.stopping() as stop:
        assert not stop()
        os.kill(os.getpid(), first)
        assert stop() and [signal.getsignal(number) for number in both] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(number) for number in both] == before


def test_who_stopped_before_the_first_step_saved_nothing():
    with pytest.raises(runs.Stopped, match="stopped at step 0 of 5; nothing was there to save"):
        runs.want_finished(Progress(), 5)
    with pytest.raises(runs.Stopped, match="stopped at step 2 of 5; the checkpoint is written"):
        runs.want_finished(Progress(step=2), 5)
    runs.want_finished(Progress(step=5), 5)
