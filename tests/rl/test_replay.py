"""Stored groups in place of a pool: in ticket order, whole, under the tickets of the run that learns from them."""

import dataclasses
import math

import numpy as np
import pytest

from rl import loop
from rl.episodes import EpisodeLog
from rl.replay import Replay
from rl.types import Status
from tests.rl import test_loop as looping


def store(folder, groups, *, version=0):
    """One file a group, the members as they happened to finish, by a policy of `version`."""
    with EpisodeLog(folder) as log:
        for step, group in enumerate(groups):
            for t in reversed(group.trajectories):
                (row,) = t.rows
                row = dataclasses.replace(row, version=row.version + np.int32(version) * row.action_mask)
                log.append(dataclasses.replace(t, rows=(row,)))
            log.end_step(step)
    return folder


@pytest.fixture
def replay(tmp_path):
    """Tickets 5 and 3 of one run, 0 and 2 of another, of which one has lost a member to its world."""
    first = store(tmp_path / "a", [looping.group(5, [0.0, 1.0]), looping.group(3, [0.5, 0.5])], version=7)
    lost = looping.group(2, [0.0, 1.0], statuses=[Status.ENV_ERROR, Status.DONE])
    return Replay([first, store(tmp_path / "b", [looping.group(0, [1.0, 0.25]), lost])], 2)


def test_tickets_go_through_the_stored_groups_in_their_order_and_again(replay):
    assert (len(replay), replay.newest) == (4, 7)
    taken = []
    for ticket in range(6):
        replay.submit_group(ticket, replay.draw(ticket), 2)
        group = replay.next_group()
        assert [(t.ticket, t.member) for t in group.trajectories] == [(ticket, 0), (ticket, 1)]
        assert group.ticket == ticket and group.task.task_id == group.trajectories[0].task_id
        taken.append((group.task.task_id, group.dropped))
    assert taken == [(f"task-{t}", t == 2) for t in (3, 5, 0, 2, 3, 5)]


def test_the_loop_scores_refuses_and_batches_them_as_what_is_played(replay):
    """Task 3 is equal, task 2 dropped: their places go to the next tickets, the second time round too."""
    progress, options = loop.Progress(), dict(steps=2, drop_equal_groups=True, draw=replay.draw)
    _, events, batches, metrics = looping.run(replay, progress, **options)
    assert [[(t.ticket, t.task_id) for t in episodes[::2]] for episodes, *_ in batches] == [
        [(1, "task-5"), (2, "task-0")],
        [(5, "task-5"), (6, "task-0")],
    ]
    credit = batches[0][1]
    assert credit == {(1, 0): -0.5, (1, 1): 0.5, (2, 0): 0.375, (2, 1): -0.375}
    assert progress.ticket == 7 and math.isnan(metrics[1]["batch/difficulty"].value)
    assert not any(name.startswith("family/") for name in metrics[1])
    # a run that resumes goes on with the next ticket
    _, _, again, _ = looping.run(replay, loop.Progress(1, 1, 3), **options)
    assert [list(b[1]) for b in again] == [list(batches[1][1])]


def test_what_is_not_whole_is_refused(tmp_path, replay):
    with pytest.raises(ValueError, match=r"a: group 3: got members \[0, 1\], want 3 from 0 on, .*set rl.group_size"):
        Replay([tmp_path / "a"], 3)
    with pytest.raises(ValueError, match="none/episodes: no episodes there; want the workdir of a run"):
        Replay([tmp_path / "none"], 2)
    store(tmp_path / "empty", [])
    with pytest.raises(ValueError, match="empty: no episodes there; want a run that has finished a step"):
        Replay([tmp_path / "a", tmp_path / "empty"], 2)
