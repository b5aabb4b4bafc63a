"""Answers computed another way: exact rational arithmetic, nothing of the engine's."""

from __future__ import annotations

import operator
from collections.abc import Iterator
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
    found = [[nearest_float32(dot) for dot in row] for row in _dots(keys, queries)]
    return np.array(found, np.float32).reshape(len(queries), len(keys))


def exact_dots(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """float64 [n, rows]: every dot product as a rational number, rounded once."""
    found = [[float(dot) for dot in row] for row in _dots(keys, queries)]
    return np.array(found).reshape(len(queries), len(keys))


def _dots(keys: np.ndarray, queries: np.ndarray) -> Iterator[list[Fraction]]:
    """Of each query with every key."""
    (wide_keys, unit), (wide_queries, other) = _integers(keys), _integers(queries)
    for q in wide_queries:
        yield [Fraction(sum(map(operator.mul, q, k)), unit * other) for k in wide_keys]


def _integers(rows: np.ndarray) -> tuple[list[list[int]], int]:
    """Finite floats as whole numbers of the smallest one that their type has, and how many of those
    are one: a sum of whole numbers is quick, of fractions it is not."""
    unit = 1 << (149 if rows.dtype == np.float32 else 1074)
    ratios = [[x.as_integer_ratio() for x in row] for row in rows.astype(np.float64).tolist()]
    return [[n * (unit // d) for n, d in row] for row in ratios], unit


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
