"""Answers computed another way: exact rational arithmetic, nothing of the engine's."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to a rational number, ties to even."""
    limit = Fraction(float(np.finfo(np.float32).max)) + Fraction(2) ** 103
    if abs(value) >= limit:
        return np.float32(np.inf if value > 0 else -np.inf)
    guess = np.float32(float(value))
    if not np.isfinite(guess):
        guess = np.copysign(np.finfo(np.float32).max, guess)
    around = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    finite = [x for x in around if np.isfinite(x)]

    def distance(x: np.float32) -> tuple[Fraction, int]:
        return abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1

    return np.float32(min(finite, key=distance) + np.float32(0))


def exact_scores(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """float32 [n, rows]: every dot product as a rational number, rounded once."""
    wide_keys = [[Fraction(float(x)) for x in row] for row in keys]
    wide_queries = [[Fraction(float(x)) for x in row] for row in queries]
    return np.array(
        [
            [
                nearest_float32(sum((a * b for a, b in zip(q, k, strict=True)), Fraction(0)))
                for k in wide_keys
            ]
            for q in wide_queries
        ],
        np.float32,
    ).reshape(len(queries), len(keys))


def exact_dots(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """float64 [n, rows]: every dot product as a rational number, rounded once."""
    wide = [[[Fraction(float(x)) for x in row] for row in rows] for rows in (queries, keys)]
    return np.array(
        [
            [float(sum((a * b for a, b in zip(q, k, strict=True)), Fraction(0))) for k in wide[1]]
            for q in wide[0]
        ]
    ).reshape(len(queries), len(keys))


def top_k(
    scores: np.ndarray, k: int, order: str, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [k] and scores [k] of one query by (score, row id), padded with -1 and NaN."""
    merit = {"largest": scores, "smallest": -scores, "absolute": np.abs(scores)}[order]
    rows = sorted(np.flatnonzero(allowed), key=lambda t: (-float(merit[t]), t))[:k]
    padded_rows = np.full(k, -1, np.int64)
    padded_scores = np.full(k, np.nan, np.float32)
    padded_rows[: len(rows)] = rows
    padded_scores[: len(rows)] = scores[rows]
    return padded_rows, padded_scores
