"""Where the expressions of envs/grammar.py become constraints over a codec's ids."""

import collections
import threading

from envs import grammar
from envs.base import EnvSpec
from models.codec import Codec
from models.constraint import Constraint, from_regex

MOST_CHARACTERS = 60  # of a string in a call of an evaluated policy: one that is untrained would never end it
_KEPT_BYTES = 2**30


class Constraints:
    """Constraints by expression, those used last kept: an engine has a table of each on its device. Thread-safe."""

    def __init__(self, codec: Codec, kept_bytes: int = _KEPT_BYTES):
        self._codec, self._kept_bytes = codec, kept_bytes
        self._lock = threading.Lock()
        self._id_bytes: list[bytes | None] | None = None
        self._made: collections.OrderedDict[str, Constraint] = collections.OrderedDict()

    def of(self, pattern: str) -> Constraint:
        """Seconds where it is large and new. Errors (ValueError): as `models.constraint.from_regex`; a codec whose ids
        have no bytes of their own.
        """
        with self._lock:
            if pattern not in self._made:
                if self._id_bytes is None:
                    self._id_bytes = self._codec.id_bytes()
                self._made[pattern] = from_regex(pattern, self._id_bytes, self._codec.end_ids)
            self._made.move_to_end(pattern)
            made = self._made[pattern]
            while len(self._made) > 1 and sum(c.next_state.nbytes for c in self._made.values()) > self._kept_bytes:
                self._made.popitem(last=False)
            return made


def want_tools(spec: EnvSpec) -> None:
    """Errors: ValueError."""
    if not spec.tools:
        raise ValueError(
            f"eval.constrain_tools: the world {spec.name!r} gives no tools, want one that does (of search: "
            "world.options.protocol='json')"
        )


def of_world(spec: EnvSpec, codec: Codec) -> Constraint:
    """That a turn is one call of the world's tools, as its schemas say. Errors (ValueError): it has none, a schema that
    no expression covers, and as `Constraints.of`.
    """
    want_tools(spec)
    pattern = grammar.call_regex(spec.tools, codec.tool_form, opened=codec.opened, longest=MOST_CHARACTERS)
    return Constraints(codec).of(pattern)
