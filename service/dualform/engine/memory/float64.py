"""Float64 dot products of what is stored in float32: widened a few rows at a time, in the calling
thread, for a few vectors. With many, a matrix product by several threads is faster.
"""

from __future__ import annotations

import numpy as np

BLOCK_BYTES = 512 << 10
"""Rows are widened into so much, the same for all: fresh memory costs more than the products."""

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
    with np.errstate(all="ignore"):  # weights of a training that diverged are not finite
        if matrix.dtype == np.float64:
            return np.asarray(_vecdot(matrix, vectors[:, None]))
        step = max(1, BLOCK_BYTES // (8 * matrix.shape[1]))
        wide = np.empty((min(step, len(matrix)), matrix.shape[1]))
        for first in range(0, len(matrix), step):
            some = matrix[first : first + step]
            rows = wide[: len(some)]
            rows[:] = some
            out[:, first : first + step] = _vecdot(rows, vectors[:, None])
    return out


def pair_dots(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The dot product of each row with the other's: float32 [m, d] both; float64 [m]."""
    out = np.empty(len(left))
    step = max(1, BLOCK_BYTES // (8 * left.shape[1]))
    wide = np.empty((min(step, len(left)), left.shape[1]))
    for first in range(0, len(left), step):
        rows = slice(first, first + step)
        products = wide[: len(left[rows])]
        products[:] = left[rows]
        with np.errstate(all="ignore"):  # keys of a training that diverged are not finite
            products *= right[rows]
            products.sum(axis=1, out=out[rows])
    return out


def lengths(matrix: np.ndarray) -> np.ndarray:
    """Each row's Euclidean norm, float32 [m, d] to float64 [m]: of a row always the same number."""
    return np.asarray(np.sqrt(pair_dots(matrix, matrix)))


def _einsum(rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum("md,nod->nm", rows, vectors))


_vecdot = getattr(np, "vecdot", _einsum)  # NumPy 2
