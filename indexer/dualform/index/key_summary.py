"""A summary of a shard's keys, for an engine that has not read them: norms, signs, sums per run."""

from __future__ import annotations

import numpy as np

MAX_RUNS = 256
"""With more runs of rows than this, a shard has no sums."""

_FLOAT32_TINY = 1.1754943508222875e-38


class KeySummary:
    """Gathered over a shard's keys as they come.

    Args:
        rows: Rows of the shard.
        d: Length of a key.
        run_starts: int64 [runs], the positions at which runs of (task, label) start.

    Attributes:
        max_norm: Upper bound of the finite keys' Euclidean norms.
        nonnegative: No key has had a negative number.
        sums: float64 [runs, d], sum of each run's keys; None where runs are too many.
    """

    def __init__(self, rows: int, d: int, run_starts: np.ndarray) -> None:
        self.max_norm = 0.0
        self.nonnegative = True
        self.sums = np.zeros((len(run_starts), d)) if len(run_starts) <= MAX_RUNS else None
        self._run_starts = run_starts
        self._finite = np.ones(rows, bool)

    def add(self, positions: np.ndarray, keys: np.ndarray) -> None:
        """Take in keys, float32 [n, d], at these positions of the shard."""
        self._add_norms(positions, keys)
        self.nonnegative = self.nonnegative and bool((keys >= 0).all())
        if self.sums is not None:
            run = np.searchsorted(self._run_starts, positions, side="right") - 1
            finite = self._finite[positions]
            belongs = (run[finite] == np.arange(len(self._run_starts))[:, None]).astype(np.float64)
            self.sums += belongs @ keys[finite].astype(np.float64)
            with np.errstate(invalid="ignore"):  # the sum of a run with a NaN is NaN, no other's
                np.add.at(self.sums, run[~finite], keys[~finite].astype(np.float64))

    def nonfinite(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of positions whose key holds NaN or Inf."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], ~self._finite, [False]])))
        return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))

    def _add_norms(self, positions: np.ndarray, keys: np.ndarray) -> None:
        d = keys.shape[1]
        with np.errstate(all="ignore"):
            squares = np.einsum("ij,ij->i", keys, keys).astype(np.float64)
            odd = np.flatnonzero(~np.isfinite(squares))
            if odd.size:  # not finite, or finite and so long that the square overflows float32
                wide = keys[odd].astype(np.float64)
                squares[odd] = np.einsum("ij,ij->i", wide, wide)
                self._finite[positions[odd]] = np.isfinite(squares[odd])
                squares = squares[np.isfinite(squares)]
        if squares.size:
            # An upper bound: d float32 roundings, and products that underflowed.
            bound = squares.max() * (1 + 2e-7 * (d + 8)) + d * _FLOAT32_TINY
            self.max_norm = max(self.max_norm, float(np.sqrt(bound)))
