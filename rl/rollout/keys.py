"""Addresses of randomness, computed on the host: a key for each episode without a trip to the device."""

from typing import Any

import jax
import numpy as np
from jaxtyping import UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MASK = 0xFFFFFFFF


def request_key(seed: int, ticket: int, member: int) -> UInt32[np.ndarray, "2"]:
    """Key data of fold_in(fold_in(key(seed), ticket), member), equal to jax.random's threefry2x32 to the bit.

    Errors: ValueError for a number outside [0, 2³¹) (seed) or [0, 2³²).
    """
    if not 0 <= seed < 2**31:
        raise ValueError(
            f"request_key: got {seed=}, want 0 <= seed < 2**31 (jax reads larger ones differently by platform)"
        )
    return fold_in(fold_in(np.array([0, seed], np.uint32), ticket), member)


def key_data(key: Any) -> UInt32[np.ndarray, "2"]:
    """Key data of a jax key (typed or raw) or of a NumPy one. Errors: ValueError for anything else."""
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    key = np.asarray(key)
    if key.shape != (2,) or key.dtype != np.uint32:
        raise ValueError(f"key: got {key.dtype}{list(key.shape)}, want uint32[2]; see request_key")
    return key


def fold_in(key: UInt32[np.ndarray, "2"], data: int) -> UInt32[np.ndarray, "2"]:
    """jax.random.fold_in on threefry2x32 key data: threefry2x32(key, (0, data))."""
    if not 0 <= data <= _MASK:
        raise ValueError(f"fold_in: got {data}, want 0 <= data < 2**32")
    return np.array(_threefry2x32(int(key[0]), int(key[1]), 0, data), np.uint32)


def _threefry2x32(k0: int, k1: int, x0: int, x1: int) -> tuple[int, int]:
    """Twenty rounds of Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    keys = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + k0) & _MASK, (x1 + k1) & _MASK
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = (x0 + x1) & _MASK
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) & _MASK
            x1 ^= x0
        x0 = (x0 + keys[(block + 1) % 3]) & _MASK
        x1 = (x1 + keys[(block + 2) % 3] + block + 1) & _MASK
    return x0, x1
