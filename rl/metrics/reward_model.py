"""How good a reward model is, on the host: pure functions of p = P(yes) and labels y in [0, 1].

A soft label is the share of several samples that succeeded. Everything here but the Brier score is what it would be
over those samples, each with the p of its place: for labels of 0 and 1 these are the usual definitions.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

BINS = 10

Ps = Float[np.ndarray, " n"]


def accuracy(p: Ps, y: Ps) -> float:
    """Share of the samples that are as was said: yes where p >= 1/2. NaN of none."""
    return float(np.mean(np.where(p >= 0.5, y, 1 - y))) if len(p) else math.nan


def constant_accuracy(y: Ps) -> float:
    """The accuracy of whoever says the same of all, which is the more frequent: what a model has to beat."""
    return max(float(np.mean(y)), 1 - float(np.mean(y))) if len(y) else math.nan


def auc(p: Ps, y: Ps) -> float:
    """Chance that a success has a higher p than a failure, a tie counting half: Mann-Whitney's U / (n₊ n₋).

        Σ_ij y_i (1 - y_j) (1[p_i > p_j] + ½ 1[p_i = p_j]) / (Σ y · Σ (1 - y))

    NaN where there are only successes, or only failures.
    """
    yes, no = float(np.sum(y)), float(np.sum(1 - y))
    if yes <= 0 or no <= 0:
        return math.nan
    _, place = np.unique(p, return_inverse=True)
    won, lost = np.bincount(place, y), np.bincount(place, 1 - y)
    below = np.cumsum(lost) - lost
    return float(np.sum(won * (below + lost / 2)) / (yes * no))


def brier(p: Ps, y: Ps) -> float:
    """mean (p - y)² (Brier 1950, one class of two). NaN of none."""
    return float(np.mean((p - y) ** 2)) if len(p) else math.nan


def ece(p: Ps, y: Ps, *, bins: int = BINS) -> float:
    """Expected calibration error Σ_b (n_b / n) |mean y - mean p| over `bins` of equal width in p, [a, b) but for the
    last, which holds 1 (Guo et al. 2017, 1706.04599 eq. 3). NaN of none.
    """
    if not len(p):
        return math.nan
    if bins < 1 or p.min() < 0 or p.max() > 1:
        raise ValueError(f"ece: got {bins=} and p in [{p.min()}, {p.max()}], want bins >= 1 and p in [0, 1]")
    place = np.minimum((p * bins).astype(int), bins - 1)
    return float(np.sum(np.abs(np.bincount(place, y) - np.bincount(place, p))) / len(p))


def report(p: Ps, y: Ps) -> dict[str, Any]:
    """All of the above: {n, base_rate, accuracy, constant_accuracy, auc, brier, ece}; None for what is not defined."""
    found = {
        "base_rate": float(np.mean(y)) if len(y) else math.nan,
        "accuracy": accuracy(p, y),
        "constant_accuracy": constant_accuracy(y),
        "auc": auc(p, y),
        "brier": brier(p, y),
        "ece": ece(p, y),
    }
    return {"n": len(p)} | {name: None if math.isnan(value) else value for name, value in found.items()}
