"""Scores as the float32 nearest to the exact dot product (docs/exactness.md, rule 1).

The product of two float32 is exact in float64. Their float64 sum, in any order, is within a known
bound of the exact sum; where that interval holds a boundary between two float32, the row is summed
again exactly with `math.fsum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from dualform.engine.memory.float64 import dots, pair_dots
from dualform.engine.memory.shards import Stop, check_stop

_FLOAT32_UNIT = 2.0**-24
_FLOAT64_UNIT = 2.0**-53
_FLOAT32_TINY = 2.0**-126


class ExactDots:
    """Dot products of keys with one query, or each with its own, known to an interval and exact on
    demand.

    Args:
        keys: float32 [n, d], finite, on the CPU.
        query: float32 [d], or one for each key [n, d]; finite, on the CPU.
        longest: At least the Euclidean norm of each key.
        stop: Asked before each exact sum; True raises CancelledError.
    """

    def __init__(
        self, keys: torch.Tensor, query: torch.Tensor, longest: float, stop: Stop | None = None
    ) -> None:
        self._stop = stop
        self._keys = keys.numpy()
        self._unit = (keys.shape[1] + 2) * _FLOAT64_UNIT
        self._pairs = query.dim() == 2
        wide = query.double()
        if self._pairs:
            self._query = query.numpy()
            self._sums = pair_dots(self._keys, self._query)
        else:
            self._query = wide.numpy()
            self._sums = dots(self._keys, self._query[None])[0]
        # Cauchy-Schwarz: at least the sum of absolute terms, and no pass over the keys.
        self._most = torch.linalg.vector_norm(wide, dim=-1).numpy() * (longest * (1 + 1e-9))

    def rounded(self) -> np.ndarray:
        """The dot products, each the float32 nearest to the exact one.

        Returns:
            float32 [n]; -0.0 never occurs, and a sum beyond float32's range is infinite.
        """

        def narrowed(sums: np.ndarray, _: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                return np.asarray(sums.astype(np.float32))

        scores, odd = self._outcome(narrowed)
        for i in odd:
            scores[i] = _rounded_sum(self._terms(i))
        return np.asarray(scores + np.float32(0))

    def rounded_contributions(
        self, of_weight: np.ndarray, of_bias: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        """Contributions (c D + c') e to one output unit, D the float64 nearest to the dot product.

        The three operations are float64's; the result is rounded to float32 once.

        Args:
            of_weight: c, float64 [n].
            of_bias: c', float64 [n]; zeros without a bias.
            values: e, float32 [n], finite.

        Returns:
            float32 [n].
        """
        wide = values.astype(np.float64)

        def contributions(sums: np.ndarray, rows: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):
                found: np.ndarray = (of_weight[rows] * sums + of_bias[rows]) * wide[rows]
                return found.astype(np.float32)

        found, odd = self._outcome(contributions)
        found[odd] = contributions(np.array([math.fsum(self._terms(i)) for i in odd]), odd)
        return np.asarray(found + np.float32(0))

    def rounded_cosines(self, lengths: np.ndarray) -> np.ndarray:
        """Cosines D / l, D the float64 nearest to the dot product, rounded to float32 once.

        Args:
            lengths: The norms' products l, float64 [n]; where one is 0, so is the cosine.

        Returns:
            float32 [n].
        """

        def cosines(sums: np.ndarray, rows: np.ndarray) -> np.ndarray:
            of_rows = lengths[rows]
            none = np.zeros(len(rows))
            found = np.divide(sums, of_rows, out=none, where=of_rows > 0)
            return np.asarray(found.clip(-1, 1).astype(np.float32))

        found, odd = self._outcome(cosines)
        found[odd] = cosines(np.array([math.fsum(self._terms(i)) for i in odd]), odd)
        return np.asarray(found + np.float32(0))

    def _outcome(
        self, of: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """What something monotonic makes of every sum, and the rows where it depends on which
        number of the sum's interval is the exact one.

        Args:
            of: Given sums, float64 [m], and their rows, int64 [m]; returns float32 [m].
        """

        def differs(rows: np.ndarray, bound: np.ndarray) -> np.ndarray:
            sums = self._sums[rows]
            return np.asarray(rows[of(sums - bound, rows) != of(sums + bound, rows)])

        everything = np.arange(len(self._keys))
        found = of(self._sums, everything)
        # First a bound that costs no pass, then the sum of absolute terms for what is left.
        odd = differs(everything, self._most * self._unit)
        if odd.size:
            keys = np.abs(self._keys[odd])
            if self._pairs:
                size = pair_dots(keys, np.abs(self._query[odd]))
            else:
                size = dots(keys, np.abs(self._query)[None])[0]
            odd = differs(odd, size * self._unit)
        return found, odd

    def _terms(self, i: int) -> list[float]:
        check_stop(self._stop)
        query = self._query[i].astype(np.float64) if self._pairs else self._query
        terms: list[float] = (self._keys[i] * query).tolist()
        return terms


class ExactWeights:
    """Dot products of many keys with the same queries, each the float32 nearest to the exact one.

    Args:
        queries: float32 [n, d], finite, on the CPU.
    """

    def __init__(self, queries: torch.Tensor) -> None:
        self._queries = queries
        self._wide = queries.double()
        self._norms = torch.linalg.vector_norm(self._wide, dim=1)

    def of(self, keys: torch.Tensor, finite: np.ndarray, stop: Stop | None = None) -> np.ndarray:
        """Weights of keys.

        Args:
            keys: float32 [m, d], on the CPU.
            finite: bool [m], which keys are; the weights of others are infinite or NaN.
            stop: Asked before each query with weights that are summed again.

        Returns:
            float32 [n, m]; -0.0 never occurs.
        """
        wide = keys.double()
        sums = (self._wide @ wide.T).numpy()
        # Cauchy-Schwarz instead of the sum of absolute terms: one product less, and few are unsure.
        size = torch.outer(self._norms, torch.linalg.vector_norm(wide, dim=1)).numpy()
        bound = size * ((keys.shape[1] + 2) * _FLOAT64_UNIT * (1 + 1e-9))
        with np.errstate(over="ignore", invalid="ignore"):
            scores = sums.astype(np.float32)
            unsure = (sums - bound).astype(np.float32) != (sums + bound).astype(np.float32)
        unsure &= finite
        for query in np.flatnonzero(unsure.any(axis=1)):
            check_stop(stop)
            rows = np.flatnonzero(unsure[query])
            longest = float(torch.linalg.vector_norm(wide[torch.from_numpy(rows)], dim=1).max())
            dots = ExactDots(keys[torch.from_numpy(rows)], self._queries[query], longest, stop)
            scores[query, rows] = dots.rounded()
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
