"""Scores as the float32 nearest to the exact dot product (docs/exactness.md, rule 1).

The product of two float32 is exact in float64. Their float64 sum, in any order, is within a known
bound of the exact sum; where that interval holds a boundary between two float32, the row is summed
again exactly with `math.fsum`.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_FLOAT32_UNIT = 2.0**-24
_FLOAT64_UNIT = 2.0**-53
_FLOAT32_TINY = 2.0**-126


def exact_scores(keys: torch.Tensor, query: torch.Tensor) -> np.ndarray:
    """Score keys against one query, each correctly rounded.

    Args:
        keys: float32 [n, d], finite, on the CPU.
        query: float32 [d], finite, on the CPU.

    Returns:
        float32 [n]; -0.0 never occurs, and a sum beyond float32's range is infinite.
    """
    wide_keys, wide_query = keys.double(), query.double()
    sums = (wide_keys @ wide_query).numpy()
    size = (wide_keys.abs_() @ wide_query.abs()).numpy()
    bound = size * ((keys.shape[1] + 2) * _FLOAT64_UNIT)
    with np.errstate(over="ignore"):
        scores = sums.astype(np.float32)
        low, high = (sums - bound).astype(np.float32), (sums + bound).astype(np.float32)
    for i in np.flatnonzero(low != high):
        scores[i] = _rounded_sum(keys[i].double().mul(query.double()).tolist())
    return np.asarray(scores + np.float32(0))


def error_bound(d: int, query_norms: torch.Tensor, max_norm: float) -> torch.Tensor:
    """How far a float32 dot product of length d, summed in any order, is from the exact one.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: gamma_d |q|.|x|, with
    Cauchy-Schwarz for |q|.|x|, and an absolute part for products that underflow.

    Args:
        d: Length of keys and queries.
        query_norms: float64 [n], Euclidean.
        max_norm: Upper bound of the keys' Euclidean norms.

    Returns:
        float64 [n].
    """
    gamma = (d + 4) * _FLOAT32_UNIT / (1 - (d + 4) * _FLOAT32_UNIT)
    return query_norms * (gamma * max_norm * (1 + 1e-9)) + (d + 4) * _FLOAT32_TINY


def _rounded_sum(terms: list[float]) -> float:
    """The float32 nearest to the exact sum; fsum rounds to float64, so break a tie by the rest."""
    total = math.fsum(terms)
    with np.errstate(over="ignore"):
        nearest = float(np.float32(total))
    if not math.isfinite(nearest) or nearest == total:
        return nearest
    side = np.float32(math.inf if total > nearest else -math.inf)
    other = float(np.nextafter(np.float32(nearest), side))
    if total - nearest != other - total:
        return nearest
    rest = math.fsum([*terms, -total])
    if rest == 0:
        return nearest
    return max(nearest, other) if rest > 0 else min(nearest, other)
