"""The processes of one run: what they tell each other on the host, before any of them enters a device collective.

A collective that one process does not enter hangs all the others. So every stretch of work that can fail in one process
alone stands in `telling()`, and ends at an `exchange`: there all of them have come so far, or all of them raise.

    with hosts.telling():
        ...                              # local: play, pack, write
    records = hosts.exchange(mine)       # everybody's, by process

Exchanges pair up by their order, so every process must come to the same ones, in the main thread. Run by one process
alone, `exchange` is a list of one and nothing else happens.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import msgpack
import numpy as np
from jax.experimental import multihost_utils

from envs.failures import said
from rl.types import Max, Mean

_HEAD_BYTES = 8192  # what one collective carries; a longer record takes a second one
_MEAN, _MAX = 1, 2  # msgpack extensions


class HostError(RuntimeError):
    """Another process failed, or cannot be reached any more: the message says which, and what it said."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """This process's place among those of the run: `index` of `count`.

    `exchange(record)`: everybody's records, by process; plain data, Means and Maxes. Raises HostError where one of them
    failed instead. `tell(error)` is that failure.
    """

    index: int
    count: int
    exchange: Callable[[Any], list[Any]]
    tell: Callable[[BaseException], None]

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What raises in here, in one process, raises in the others at their next exchange."""
        try:
            yield
        except HostError:  # they know, or are gone
            raise
        except BaseException as error:
            if not getattr(error, "told", False):  # by a block inside this one
                self.tell(error)
                error.told = True
            raise

    def first(self, work: Callable[[], Any]) -> Any:
        """`work()`, by process 0 before the others: they find the files that it left."""
        if self.index == 0:
            done = work()
        self.exchange(None)
        return done if self.index == 0 else work()


ALONE = Hosts(0, 1, exchange=lambda record: [record], tell=lambda error: None)


def join() -> Hosts:
    """The processes that `jax.distributed.initialize` has brought together."""
    return over(_gather, jax.process_index(), jax.process_count()) if jax.process_count() > 1 else ALONE


def over(gather: Callable[[bytes], list[bytes]], index: int, count: int) -> Hosts:
    """Processes that `gather` connects: it gives each the bytes of all."""
    return Hosts(index, count, exchange=partial(_exchange, gather), tell=partial(_tell, gather))


def total(means: Iterable[Mapping[str, Mean | Max]]) -> dict[str, Mean | Max]:
    """Metrics of all processes by name; one that only some of them have counts where it is."""
    out: dict[str, Mean | Max] = {}
    for own in means:
        for name, mean in own.items():
            out[name] = out[name] + mean if name in out else mean
    return out


def _exchange(gather: Callable[[bytes], list[bytes]], record: Any) -> list[Any]:
    said = [_unpack(data) for data in gather(_pack({"record": record}))]
    failed = [f"process {i} failed: {words['error']}" for i, words in enumerate(said) if "error" in words]
    if failed:
        raise HostError(f"{'; '.join(failed)} (its own log says where)")
    return [words["record"] for words in said]


def _tell(gather: Callable[[bytes], list[bytes]], error: BaseException) -> None:
    try:
        gather(_pack({"error": f"{type(error).__name__}: {said(error)}"}))
    except HostError as lost:
        error.add_note(f"and the other processes could not be told: {lost}")


def _gather(data: bytes) -> list[bytes]:
    """Bytes of any length from every process."""
    head = np.zeros(_HEAD_BYTES, np.uint8)
    room = _HEAD_BYTES - 4
    head[:4] = np.array([len(data)], "<u4").view(np.uint8)
    head[4 : 4 + len(data[:room])] = np.frombuffer(data[:room], np.uint8)
    heads = _allgather(head)
    lengths = heads[:, :4].copy().view("<u4")[:, 0].astype(int)
    parts = heads[:, 4:]
    if lengths.max() > room:
        rest = np.zeros(1 << int(lengths.max() - room - 1).bit_length(), np.uint8)  # few shapes: each is compiled
        rest[: len(data[room:])] = np.frombuffer(data[room:], np.uint8)
        parts = np.concatenate([parts, _allgather(rest)], axis=1)
    return [part[:length].tobytes() for part, length in zip(parts, lengths, strict=True)]


def _allgather(own: np.ndarray) -> np.ndarray:
    try:
        return np.asarray(multihost_utils.process_allgather(own))
    except Exception as err:  # what the transport raises is of several types, and says little
        raise HostError(
            f"process {jax.process_index()} of {jax.process_count()} cannot reach the others ({err}); one of them has "
            "most likely died: see their logs"
        ) from err


def _pack(record: Any) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, Mean):
            return msgpack.ExtType(_MEAN, msgpack.packb([value.total, value.count], default=plain))
        if isinstance(value, Max):
            return msgpack.ExtType(_MAX, msgpack.packb(value.value, default=plain))
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            return value.item()
        raise TypeError(f"exchange: got a {type(value).__name__}, want plain data, a Mean or a Max")

    return msgpack.packb(record, default=plain)


def _unpack(data: bytes) -> Any:
    def special(kind: int, payload: bytes) -> Mean | Max:
        value = msgpack.unpackb(payload)
        return Mean(*value) if kind == _MEAN else Max(value)

    return msgpack.unpackb(data, ext_hook=special, strict_map_key=False)
