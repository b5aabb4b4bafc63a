"""Float64 dot products of what is stored in float32: widened a few rows at a time, in the calling
thread, for a few vectors. With many, a matrix product by several threads is faster.
"""

from __future__ import annotations

import numpy as np

BLOCK_BYTES = 2 << 20
"""Rows are widened into so much at a time."""

FEW = 8
"""Up to so many vectors this is faster than a product by several threads, which must be woken."""


def dots(matrix: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """vectors @ matrix.T, every product and sum in float64.

    Args:
        matrix: float32 or float64 [m, d].
        vectors: float64 [n, d].

    Returns:
        float64 [n, m].
    """
    out = np.empty((len(vectors), len(matrix)))
    step = max(1, BLOCK_BYTES // (8 * matrix.shape[1]))
    for first in range(0, len(matrix), step):
        rows = matrix[first : first + step].astype(np.float64, copy=False)
        with np.errstate(all="ignore"):  # weights of a training that diverged are not finite
            out[:, first : first + step] = _vecdot(rows, vectors[:, None])
    return out


def pair_dots(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The dot product of each row with the other's: float32 [m, d] both; float64 [m]."""
    out = np.empty(len(left))
    step = max(1, BLOCK_BYTES // (16 * left.shape[1]))
    for first in range(0, len(left), step):
        rows = slice(first, first + step)
        products = left[rows].astype(np.float64)
        products *= right[rows]
        products.sum(axis=1, out=out[rows])
    return out


def _einsum(rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum("md,nod->nm", rows, vectors))


_vecdot = getattr(np, "vecdot", _einsum)  # NumPy 2
