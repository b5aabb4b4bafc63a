"""Sketches: a few floats per key that bound its dot product with any query (docs/decisions/0005).

A sketch is y = P x, P the leading directions of a sample of the keys, and rho, at least the length
of what y leaves out of x. The bound that the engine builds on them holds for any P.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DIRECTIONS = 63
"""Directions kept: with rho, a sketch is 64 floats."""

MIN_D_IN = 256
"""Shorter keys have no sketches: scanning them whole costs little more."""

SAMPLE_ROWS = 8192

WIDE = 2048
"""Of wider keys so many are a sample: finding directions takes the cube of the keys' width, or of
their number where they are fewer."""

_UNIT = 2.0**-24
_LONGEST = 1e15
_TINY = 1e-300


def leading_directions(sample: Sequence[np.ndarray]) -> np.ndarray | None:
    """The directions in which the sampled keys, float32 [n, d] each, are largest.

    Returns:
        P, float32 [DIRECTIONS, d], its rows orthonormal up to rounding; None where no finite key
        of a usable length is there.
    """
    rows = np.concatenate(sample)
    if rows.shape[1] > WIDE:
        rows = rows[:: -(-len(rows) // WIDE)]
    keys = rows.astype(np.float64)
    with np.errstate(all="ignore"):
        keys = keys[np.linalg.norm(keys, axis=1) < _LONGEST]
    if len(keys) == 0 or not keys.any():
        return None
    if len(keys) < keys.shape[1]:
        _, of_rows = np.linalg.eigh(keys @ keys.T)
        found = keys.T @ of_rows[:, ::-1][:, :DIRECTIONS]
        directions = np.zeros((keys.shape[1], DIRECTIONS))
        directions[:, : found.shape[1]] = found / np.maximum(np.linalg.norm(found, axis=0), _TINY)
        return np.ascontiguousarray(np.linalg.qr(directions)[0].T, dtype=np.float32)
    _, vectors = np.linalg.eigh(keys.T @ keys)
    return np.ascontiguousarray(vectors[:, ::-1][:, :DIRECTIONS].T, dtype=np.float32)


def sketch(keys: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Sketches of keys.

    Args:
        keys: float32 [n, d].
        directions: P, float32 [m, d].

    Returns:
        float32 [n, m + 1]: y and rho, |x - P'y| <= rho. Zeros for keys that are not finite; rho is
        infinite where a key is too long for float32 arithmetic.
    """
    m, d = directions.shape
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij->i", keys, keys))
        y = keys @ directions.T
        rest = keys - y @ directions
        rho = np.sqrt(np.einsum("ij,ij->i", rest, rest)).astype(np.float64)
        # What float32 may have lost: in the norm, in y P (m products), in the subtraction, in
        # squares that underflow.
        size = float(np.linalg.norm(directions))
        lost = (m + 4) * _UNIT * 1.01 * size * np.linalg.norm(y, axis=1) + 4 * _UNIT * lengths
        rho = (rho * (1 + (d + 8) * _UNIT) + lost) * (1 + 1e-6) + 1e-17
        out = np.empty((len(keys), m + 1), np.float32)
        out[:, :m] = y
        out[:, m] = np.nextafter(rho.astype(np.float32), np.float32(np.inf))
    usable = np.isfinite(lengths) & (lengths < _LONGEST)
    out[~usable, :m] = 0
    out[~usable, m] = np.inf
    out[~np.isfinite(keys).all(axis=1)] = 0
    return out
