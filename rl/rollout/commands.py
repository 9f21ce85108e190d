"""What callers have the engine's thread do between its programs, in turn."""

import threading
from collections import deque
from collections.abc import Callable


class Commands:
    """A queue of calls, guarded by the engine's `lock`; none runs under it. `wake` tells the thread that there is one.

    `ended` is the error that callers are told once the engine is closed or dead, None before.
    """

    def __init__(self, *, lock: threading.RLock, wake: Callable[[], None], ended: Callable[[], Exception | None]):
        self._lock, self._wake, self._ended = lock, wake, ended
        self._queue: deque[tuple[Callable[[], None], threading.Event]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def run(self, command: Callable[[], None]) -> None:
        """Have the thread call `command`; returns when it has. Errors: EngineClosed, EngineError if it never has."""
        done, ran = threading.Event(), []
        with self._lock:
            if (error := self._ended()) is not None:
                raise error
            self._queue.append((lambda: ran.append(command()), done))
            self._wake()
        done.wait()
        with self._lock:
            if not ran and (error := self._ended()) is not None:
                raise error

    def obey(self) -> None:
        """For the thread: call what is queued. A command leaves the queue when it has run: one that raises, and those
        behind it, stay there for `drop`, which wakes their callers when the failure is known.
        """
        while True:
            with self._lock:
                if not self._queue:
                    return
                command, done = self._queue[0]
            command()
            with self._lock:
                if self._queue:  # else the engine was closed meanwhile
                    self._queue.popleft()
                done.set()

    def drop(self) -> None:
        """Wake who waits for a command that is not run any more."""
        with self._lock:
            for _, done in self._queue:
                done.set()
            self._queue.clear()
