"""How much goes on at once: calls of a world that bears only so many, and episodes, as many as the engine has use for.

`next_in_flight` is additive increase, multiplicative decrease (Chiu and Jain 1989). Which episodes are played, and with
which randomness, is said by their tickets: how many are in flight changes when they are played and nothing else.
"""

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from envs.base import EnvError

BUSY = 0.9  # share of the lanes' time in use from which on no more episodes are wanted
CROWDED = 2.0  # times the shortest mean of a call: then calls are in one another's way
HALF, FEWER = 0.5, 0.8  # what is left of the episodes in flight: of a crowded world, where lanes are waited for
FORGOTTEN = 1.1  # at each crowding: a world whose calls have become longer is not crowded for ever
FEWEST_CALLS = 96  # for a mean: of log-normal seconds (σ = 1) it is then off by 13 % (one standard deviation)
PERIOD_S = 1.0
_READ = ("lanes_used", "lane_places", "idle_s", "world_steps", "world_step_s")
_LOOK_S = 0.2  # for the end of the run, while a world is made again


class CallLimit:
    """At most `most` calls of a world at once, over all threads and pools that share it, first come, first served; and
    no episode begins before the world is there: `ready(seconds)` waits so long at most, and says whether it is (None:
    it always is). It says so too when the world has not been there for `patience_s`: calls then say why.

    `clock` is monotonic seconds less those that this thread has waited here: what a world's calls are timed by.
    """

    def __init__(
        self, most: float = math.inf, ready: Callable[[float], bool] | None = None, *, patience_s: float = 0.0
    ):
        if most < 1:
            raise ValueError(f"CallLimit: got {most=}, want at least 1")
        self.patience_s = patience_s
        self._most, self._holders, self._refused, self._ready = most, set(), set(), ready
        self._line: deque[tuple[Any, threading.Event]] = deque()  # who waits, and what tells them that they may go on
        self._lock = threading.Lock()  # guards all above
        self._own = threading.local()

    @contextlib.contextmanager
    def turn(self, holder: Any, *, begins: bool = False) -> Iterator[None]:
        """Waits until `holder` may call, for as long as the block runs; one that `begins` an episode also for the world
        to be there. Errors: EnvError where it is refused.
        """
        began_s, begins = time.monotonic(), begins and self._ready is not None
        self._take(holder)
        while begins and not self._ready(0.0):  # others may call meanwhile
            self._give_back(holder)
            while holder not in self._refused and not self._ready(_LOOK_S):
                pass
            self._take(holder)
        self._own.waited_s = self._waited_s() + time.monotonic() - began_s
        try:
            yield
        finally:
            self._give_back(holder)

    def refuse(self, holders: Iterable[Any]) -> None:
        """No turn for these any more; one whose call has not ended holds nobody up."""
        with self._lock:
            self._refused.update(holders)
            self._holders -= self._refused
            line, self._line = self._line, deque()
            for holder, goes_on in line:
                if holder in self._refused:
                    goes_on.set()
                else:
                    self._line.append((holder, goes_on))
            self._hand_over()

    def _take(self, holder: Any) -> None:
        goes_on = threading.Event()
        with self._lock:
            if holder in self._refused:
                goes_on.set()
            else:
                self._line.append((holder, goes_on))
                self._hand_over()
        goes_on.wait()
        with self._lock:
            if holder in self._refused:
                raise EnvError("the call was given up before its turn came")

    def _give_back(self, holder: Any) -> None:
        with self._lock:
            self._holders.discard(holder)
            self._hand_over()

    def _hand_over(self) -> None:
        """Under the lock. The turn is theirs before they wake: who calls again at once would always be there first."""
        while self._line and len(self._holders) < self._most:
            holder, goes_on = self._line.popleft()
            self._holders.add(holder)
            goes_on.set()

    def clock(self) -> float:
        return time.monotonic() - self._waited_s()

    def _waited_s(self) -> float:
        return getattr(self._own, "waited_s", 0.0)


@dataclasses.dataclass(frozen=True)
class Seen:
    """Of one period of `seconds`: `busy_frac` of the lanes' time; `step` calls of the world that ended, and their mean;
    at its end the turns that wait for a lane, and the episodes in flight.

    A `reset` is no measure of a step: a batch begins with many of them, and they may take no time at all.
    """

    seconds: float
    busy_frac: float
    calls: int
    call_s: float
    waiting: int
    in_flight: int


@dataclasses.dataclass(frozen=True)
class InFlight:
    """Episodes that may be in flight; the shortest mean of a call so far; seconds until calls that began before the
    last change have ended; calls since the last mean, and their seconds.
    """

    most: int
    shortest_s: float = math.inf
    quiet_s: float = 0.0
    calls: int = 0
    calls_s: float = 0.0


def next_in_flight(now: InFlight, seen: Seen, *, lanes: int, cap: int) -> InFlight:
    """One more for every four lanes while lanes are idle and all that may be are in flight. Half of them where the
    world takes twice as long as it did at best: fewer calls are then answered as many a second, and show again how long
    one takes. A fifth less where a whole set of lanes waits for its turn. 1 <= most <= cap. How long a call takes is
    the mean of FEWEST_CALLS or more, over as many periods as that needs.
    """
    most, shortest_s, quiet_s = now.most, now.shortest_s, max(0.0, now.quiet_s - seen.seconds)
    calls, calls_s = (0, 0.0) if quiet_s else (now.calls + seen.calls, now.calls_s + seen.calls * seen.call_s)
    call_s = calls_s / calls if calls >= FEWEST_CALLS else None
    if call_s is not None:
        shortest_s, calls, calls_s = min(shortest_s, call_s), 0, 0.0
    if quiet_s:
        pass
    elif call_s is not None and call_s > CROWDED * shortest_s:
        most, shortest_s, quiet_s = math.floor(HALF * most), FORGOTTEN * shortest_s, call_s
    elif seen.waiting > lanes and seen.in_flight >= most:
        most = math.floor(FEWER * most)
    elif seen.busy_frac < BUSY and seen.in_flight >= most:
        most += max(1, lanes // 4)
    return InFlight(min(max(1, most), cap), shortest_s, quiet_s, calls, calls_s)


def seen_between(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> Seen:
    """What two readings of the stats of engine and pool together say, `seconds` apart."""
    did = {name: now[name] - before[name] for name in _READ}
    in_use = did["lanes_used"] / max(1, did["lane_places"])
    return Seen(
        seconds=seconds,
        busy_frac=in_use * max(0.0, 1.0 - did["idle_s"] / seconds),
        calls=int(did["world_steps"]),
        call_s=did["world_step_s"] / max(1, did["world_steps"]),
        waiting=int(now["requests"] - now["busy_lanes"]),
        in_flight=int(now["in_flight"]),
    )


@contextlib.contextmanager
def adapting(engine: Any, pool: Any, *, lanes: int, cap: int, period_s: float = PERIOD_S) -> Iterator[None]:
    """Keep `pool` at as many episodes as `engine`, of `lanes` lanes, has use for, for as long as the block runs."""
    stop, now, failure = threading.Event(), InFlight(min(cap, 2 * lanes)), []
    pool.limit_in_flight(now.most)

    def run() -> None:
        try:
            adapt()
        except BaseException as error:  # raised when the block ends well; until then nothing is held back
            logging.error("episodes in flight: %s: %s", type(error).__name__, error)
            failure.append(error)
            pool.limit_in_flight(cap)

    def adapt() -> None:
        state, before, since = now, engine.stats() | pool.stats(), time.monotonic()
        while not stop.wait(period_s):
            after, until = engine.stats() | pool.stats(), time.monotonic()
            was, state = state, next_in_flight(state, seen_between(before, after, until - since), lanes=lanes, cap=cap)
            before, since = after, until
            if state.most != was.most:
                logging.debug("episodes in flight: %d", state.most)
                pool.limit_in_flight(state.most)

    thread = threading.Thread(target=run, name="pool-in-flight", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failure:  # not in place of what ended the block
        raise failure[0]
