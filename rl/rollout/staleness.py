"""How far sampling may run ahead of learning, counted in groups.

Batch v is the first `batch` accepted groups, in ticket order, that no earlier batch took. A group admitted at version
v while accepted + running < (max_staleness + v + 1) * batch is thus trained at version v + max_staleness at the
latest: the bound holds for each of its tokens, because every token is sampled at version v or later.
"""

import threading


def capacity(version: int, accepted: int, running: int, *, batch: int, max_staleness: int, max_running: int) -> int:
    """How many more groups may start now; negative means none (after a resume with a smaller bound, say).

    min(max_running - running, (max_staleness + version + 1) * batch - (accepted + running)). A batch of 0 counts as 1.
    Unit: groups. A dropped or filtered group is in neither count. Source: AReaL, arXiv:2505.24298, eq. 3.
    """
    return min(max_running - running, (max_staleness + version + 1) * max(batch, 1) - (accepted + running))


class StalenessGate:
    """Counts groups in (running), through (accepted) and out (dropped), and lets a new one start when `capacity`
    allows.

    Thread-safe. `version` is the learner's published version; 0 of everything at the start.
    """

    def __init__(self, *, batch: int, max_staleness: int, max_running: int):
        if batch < 1 or max_staleness < 0 or max_running < 1:
            raise ValueError(
                f"StalenessGate: got {batch=} {max_staleness=} {max_running=}; "
                "want at least one group a batch, no negative staleness, at least one running group"
            )
        self._limits = {"batch": batch, "max_staleness": max_staleness, "max_running": max_running}
        self._changed = threading.Condition()  # guards all below
        self._version, self._accepted, self._running, self._dropped = 0, 0, 0, 0
        self._closed = False

    def acquire(self, timeout_s: float | None = None) -> bool:
        """Waits for room and takes one group's place. False: closed, or no room within `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._capacity() > 0, timeout_s)
            if self._closed or self._capacity() <= 0:
                return False
            self._running += 1
            return True

    def accept(self) -> None:
        """A running group ended and will be trained. Raises RuntimeError when none is running."""
        self._end("accept", accepted=1)

    def drop(self) -> None:
        """A running group ended and will not be trained: its place goes to the next ticket."""
        self._end("drop", dropped=1)

    def on_publish(self, version: int) -> None:
        """The engine has the weights of `version`. Raises ValueError when versions go back."""
        with self._changed:
            if version < self._version:
                raise ValueError(f"on_publish: got version {version} after {self._version}, want it to grow")
            self._version = version
            self._changed.notify_all()

    def allows(self, sampled: int | None, place: int) -> bool:
        """Whether a token that version `sampled` sampled is young enough for the `place`-th group (from 0) of those
        that are to be trained from now on. None: there is no token.
        """
        with self._changed:
            trained = self._version + place // self._limits["batch"]
            return trained - (self._version if sampled is None else sampled) <= self._limits["max_staleness"]

    def close(self) -> None:
        """Wakes everyone who waits in `acquire`, for ever; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stats(self) -> dict[str, int]:
        """Counts now: version, accepted, running, dropped, and the capacity left."""
        with self._changed:
            return {
                "version": self._version,
                "accepted": self._accepted,
                "running": self._running,
                "dropped": self._dropped,
                "capacity": self._capacity(),
            }

    def start_at(self, version: int) -> None:
        """Goes on where `version` batches are published, and all groups of theirs were accepted. Groups that were
        accepted and wait for training take their places again. Raises RuntimeError unless the gate is fresh.
        """
        with self._changed:
            if self._running or self._accepted:
                raise RuntimeError(f"start_at: got a gate with {self._running} running groups, want a fresh one")
            self._version, self._accepted = version, version * self._limits["batch"]
            self._changed.notify_all()

    def _capacity(self) -> int:
        return capacity(self._version, self._accepted, self._running, **self._limits)

    def _end(self, what: str, *, accepted: int = 0, dropped: int = 0) -> None:
        with self._changed:
            if self._running < 1:
                raise RuntimeError(f"{what}: got no running group, want one that acquire() let in; did one end twice?")
            self._running -= 1
            self._accepted += accepted
            self._dropped += dropped
            self._changed.notify_all()
