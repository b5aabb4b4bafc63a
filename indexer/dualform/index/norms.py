"""What the engine must know of a shard's keys before it reads them: norms and rows without one."""

from __future__ import annotations

import numpy as np

_FLOAT32_TINY = 1.1754943508222875e-38


class KeyNorms:
    """Gathers a shard's largest finite norm, and the rows that are not finite."""

    def __init__(self, rows: int) -> None:
        self.max_norm = 0.0
        self._finite = np.ones(rows, bool)

    def add(self, positions: np.ndarray, keys: np.ndarray) -> None:
        """Take in keys, float32 [n, d], at these positions of the shard."""
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

    def nonfinite(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of positions whose key holds NaN or Inf."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], ~self._finite, [False]])))
        return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
