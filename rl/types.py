"""What passes between the parts of rl/: episodes on the host, batches on the device, and means that add exactly.

Axes: B rows, T tokens of a packed row, t tokens of one host row. `x[t]` describes `tokens[t]` given `tokens[:t]`.
"""

import dataclasses
import enum
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Status(enum.Enum):
    """Why an episode ended: exactly one.

    `ENV_ERROR` and `CANCELLED` are not the policy's: never scored, never in a baseline. All others are scored, and a
    limit is a failure. A call past its wall deadline is `ENV_ERROR`; `TIME_LIMIT` is the world's own or virtual clock.
    """

    DONE = "done"
    GAVE_UP = "gave_up"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    ABANDONED = "abandoned"
    ENV_ERROR = "env_error"
    CANCELLED = "cancelled"

    @property
    def scored(self) -> bool:
        """True where the outcome is the policy's own."""
        return self not in (Status.ENV_ERROR, Status.CANCELLED)


ROW_DTYPES = {  # of its fields, in their order
    "tokens": np.int32,
    "turn": np.int32,
    "action_mask": np.bool_,
    "behavior_logp": np.float32,
    "version": np.int32,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One sequence as the policy saw it; `x[t]` describes `tokens[t]` given `tokens[:t]`.

    `turn` is -1 on the prompt, k on turn k of the episode and on the world's answer to it.
    `action_mask` is True on policy-sampled tokens only; off it, `behavior_logp` is 0 and `version` is -1.
    `behavior_logp` is in nats, of the full softmax at the sampling temperature.
    """

    tokens: Int[np.ndarray, " t"]
    turn: Int[np.ndarray, " t"]
    action_mask: Bool[np.ndarray, " t"]
    behavior_logp: Float[np.ndarray, " t"]
    version: Int[np.ndarray, " t"]

    def __post_init__(self):
        for name, dtype in ROW_DTYPES.items():
            value = getattr(self, name)
            if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
                got = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
                raise ValueError(f"Row.{name}: got {got}, want a 1-d array of {np.dtype(dtype).name}; use np.asarray")
            if len(value) != len(self.tokens):
                raise ValueError(f"Row.{name}: got {len(value)} entries, want {len(self.tokens)}, one for each token")
        if len(self.tokens) and self.action_mask[0]:
            raise ValueError("Row.action_mask[0] is True: nothing precedes the first token, so no policy sampled it")
        off = ~self.action_mask
        if np.any(self.behavior_logp[off] != 0) or np.any(self.version[off] != -1):
            raise ValueError("Row: behavior_logp must be 0 and version -1 wherever action_mask is False")


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the engine sampled in one turn: learner version `version[i]` sampled `ids[i]` with `logp[i]` nats.

    `forced` are the places of ids that a constraint left no choice: logp 0, and no action.
    `reason` is "stop" (an end-of-turn token or a stop string), "length" (a budget or a full cache), "time" (a deadline)
    or "cancelled".
    """

    ids: list[int]
    logp: list[float]
    version: list[int]
    reason: str
    forced: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode on the host, ragged.

    `rows` holds one row, unless the template or a context cut breaks the prefix: then a later row begins with the
    conversation so far as its prompt, and each sampled token is an action in one row alone. Score and advantage belong
    to the episode. `facts` is what the world reports, `scores` the reward terms by name, `images` None or uint8 arrays
    by identity.
    """

    task_id: str
    ticket: int
    member: int
    status: Status
    rows: tuple[Row, ...]
    facts: Mapping[str, Any]
    scores: Mapping[str, float]
    images: Mapping[str, np.ndarray] | None = None

    @property
    def n_turns(self) -> int:
        """How many turns the policy had; in each it sampled something, or was forced to."""
        return 1 + max((int(row.turn.max(initial=-1)) for row in self.rows), default=-1)

    @property
    def n_actions(self) -> int:
        """How many tokens the policy sampled."""
        return sum(int(row.action_mask.sum()) for row in self.rows)

    def to_bytes(self) -> bytes:
        """One record: magic, CRC-32 of the rest, msgpack. `from_bytes` gives back every value and type exactly.

        Raises TypeError for a fact that is not plain data (numbers, strings, bytes, lists, tuples, dicts, NumPy).
        """
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        record["status"] = self.status.name
        record["rows"] = [{name: getattr(row, name) for name in ROW_DTYPES} for row in self.rows]
        record["facts"], record["scores"] = dict(self.facts), dict(self.scores)
        record["images"] = None if self.images is None else dict(self.images)
        payload = msgpack.packb(record, default=_pack_extension, strict_types=True)
        return _MAGIC + zlib.crc32(payload).to_bytes(4, "big") + payload

    @staticmethod
    def from_bytes(data: bytes) -> "Trajectory":
        """The episode that `to_bytes` wrote. Raises ValueError on bytes of another kind, another format or damaged."""
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"not an episode record: got {bytes(data[:8])!r}, want bytes that begin with {_MAGIC!r}")
        checksum, payload = data[len(_MAGIC) : len(_MAGIC) + 4], data[len(_MAGIC) + 4 :]
        if zlib.crc32(payload).to_bytes(4, "big") != checksum:
            raise ValueError(f"damaged episode record of {len(data)} bytes: checksum differs; was the file cut short?")
        record = msgpack.unpackb(payload, ext_hook=_unpack_extension, strict_map_key=False)
        record["status"] = Status[record["status"]]
        record["rows"] = tuple(Row(**row) for row in record["rows"])
        return Trajectory(**record)


_MAGIC = b"WFEP\x01"  # the last byte is the format's number
_ARRAY, _SCALAR, _TUPLE = 1, 2, 3


def _pack_extension(value: Any) -> msgpack.ExtType:
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, msgpack.packb(list(value), default=_pack_extension, strict_types=True))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufSU":
        kind = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
        return msgpack.ExtType(kind, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))
    raise TypeError(
        f"episode record: got {type(value).__name__}, want plain data or NumPy; convert the fact in the world"
    )


def _unpack_extension(kind: int, data: bytes) -> Any:
    if kind == _TUPLE:
        return tuple(msgpack.unpackb(data, ext_hook=_unpack_extension, strict_map_key=False))
    if kind not in (_ARRAY, _SCALAR):
        raise ValueError(f"episode record: unknown extension {kind}; was it written by a newer version?")
    dtype, shape, buffer = msgpack.unpackb(data)
    if np.dtype(dtype).itemsize:
        array = np.frombuffer(buffer, np.dtype(dtype)).reshape(shape).copy()
    else:  # an empty text
        array = np.zeros(shape, np.dtype(dtype))
    return array if kind == _ARRAY else array[()]


MEMBERS = 2**16  # of one group, at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryBatch:
    """Packed rows, NumPy on the host and jax arrays on the device, sharded over B. A pytree; absent fields are None.

    Segments number the host rows in a packed row from 1; segment 0 is padding, and every other field is 0 there.
    """

    tokens: Int[Array, "B T"]
    segment: Int[Array, "B T"]
    position: Int[Array, "B T"]  # from 0 in each segment; [3 B T] for M-RoPE
    action_mask: Bool[Array, "B T"]
    behavior_logp: Float[Array, "B T"]  # nats
    staleness: Int[Array, "B T"]  # learner version minus the version that sampled the token; 0 off the mask
    rewards: Float[Array, "B T"]  # an episode's reward stands on its last action token
    advantages: Float[Array, "B T"]
    # 1 / (action tokens of the episode, over all its rows) on each of them; None: every episode is one row
    episode_share: Float[Array, "B T"] | None = None
    proximal_logp: Float[Array, "B T"] | None = None
    ref_logp: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None
    returns: Float[Array, "B T"] | None = None
    # What credit on the device follows from token to token, wherever the rows of an episode lie (rl/critic.py): the
    # episode's number, another for each one of the batch (group · MEMBERS + member), and Row.turn.
    episode: Int[Array, "B T"] | None = None
    turn: Int[Array, "B T"] | None = None
    # Tokens of observations that are trained as if they were sampled: a part of `action_mask`. `learner.prepare` gives
    # them their behavior_logp. None: they are not trained.
    world_mask: Bool[Array, "B T"] | None = None
    images: Any | None = None  # ImageBatch, once a policy sees


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
    """What one forward pass says of the tokens of a batch: the first argument of every loss."""

    logp: Float[Array, "B T"]  # nats
    entropy: Float[Array, "B T"]  # nats, of the distribution that the token was drawn from
    values: Float[Array, "B T"] | None = None  # of the state before the token; None: the policy has no value head
    # Nats, of a yes where a yes/no head judges; None: there is no such head.
    log_odds: Float[Array, "B T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """Σ x / Σ 1, kept apart so that it adds exactly over micro-batches, devices, hosts and steps."""

    total: Any
    count: Any

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Any:
        """total / count; NaN at count 0, because nothing was measured (a 0 would be read as a measurement)."""
        if isinstance(self.count, jax.Array):
            safe = jnp.where(self.count == 0, 1, self.count)  # a division by 0 would also make the gradient NaN
            return jnp.where(self.count == 0, jnp.nan, self.total / safe)
        return self.total / self.count if self.count else float("nan")

    def identity(self) -> "Mean":
        """The Mean that changes nothing when added, of the same shapes."""
        return Mean(jnp.zeros_like(self.total), jnp.zeros_like(self.count))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A maximum as a metric: `+` takes the larger, so that it travels with the Means; -inf if nothing was measured."""

    value: Any

    def __add__(self, other: "Max") -> "Max":
        if isinstance(self.value, jax.Array) or isinstance(other.value, jax.Array):
            return Max(jnp.maximum(self.value, other.value))
        return Max(max(self.value, other.value))

    def identity(self) -> "Max":
        """The Max that changes nothing when added, of the same shape."""
        return Max(jnp.full_like(self.value, -jnp.inf))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Explained:
    """1 - Var(R - V) / Var(R) as a metric, kept as five sums so that it adds exactly: 1 for a perfect critic, 0 for a
    constant one, below 0 for one that is worse than none.
    """

    count: Any
    returns: Any  # Σ R
    returns_sq: Any
    errors: Any  # Σ (R - V)
    errors_sq: Any

    def __add__(self, other: "Explained") -> "Explained":
        return jax.tree.map(lambda a, b: a + b, self, other)

    @property
    def value(self) -> Any:
        """NaN where the returns do not vary: there is nothing to explain."""
        of_returns = self.count * self.returns_sq - self.returns**2
        of_errors = self.count * self.errors_sq - self.errors**2
        # by a margin: what rounding leaves of equal returns is no variance
        xp = jnp if isinstance(self.count, jax.Array) else np
        varies = of_returns > 1e-6 * self.count * self.returns_sq
        return xp.where(varies, 1 - of_errors / xp.where(varies, of_returns, 1), xp.nan)

    def identity(self) -> "Explained":
        """The Explained that changes nothing when added."""
        return jax.tree.map(jnp.zeros_like, self)


Metric = Mean | Max | Explained
