"""What an index says of a shard's keys, held against the keys when they are first used.

Bounds stand on it: a norm that is too small, or a NaN that nobody was told of, would give wrong
answers without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.store.encoding import FLOAT32, Encoding

_TILE_BYTES = 4 << 20
_LOST = 2e-7
"""Relative, per number of a key, and more than float32 loses in a norm."""
_SMALL = 1e-15
"""Squares of shorter keys may be too small for float32."""


@dataclass(frozen=True)
class KeyFacts:
    """Of one shard. Held with NumPy in one thread, beside whatever else the process does.

    Attributes:
        encoding: How the keys are stored.
        d: Numbers of a key.
        finite: bool [rows]: which keys are finite.
        max_norm: Upper bound of the finite keys' Euclidean norms.
        nonnegative: No key has a negative number.
    """

    encoding: Encoding
    d: int
    finite: np.ndarray
    max_norm: float
    nonnegative: bool

    def wrong(self, keys: torch.Tensor) -> str | None:
        """What the keys, as stored, are not; None where they are all that."""
        step = max(1, _TILE_BYTES // FLOAT32.row_bytes(self.d))
        stored = keys.view(torch.uint8).numpy()
        for first in range(0, len(keys), step):
            aligned = stored[first : first + step].copy()  # as bytes: mapped numbers are not
            what = self.wrong_part(aligned, first)
            if what is not None:
                return what
        return None

    def wrong_part(self, stored: np.ndarray, first: int) -> str | None:
        """The same of some keys, the first of them in this place.

        Args:
            stored: uint8 [n, bytes of a key], aligned.
            first: Its row in the shard.
        """
        try:
            tile = self.encoding.widen(stored.view(self.encoding.stored), self.d)
        except ValueError as error:
            return f"its keys are not {self.encoding.name}: {error}"
        return self._wrong(tile, first)

    def _wrong(self, keys: np.ndarray, first: int) -> str | None:
        finite = self.finite[first : first + len(keys)]
        with np.errstate(all="ignore"):
            norms = np.sqrt(np.einsum("ij,ij->i", keys, keys, dtype=np.float32)).astype(np.float64)
        # A sum of squares that float32 can't hold is no proof: of those rows, each number is asked.
        odd = np.flatnonzero(~np.isfinite(norms))
        is_finite = np.ones(len(keys), bool)
        is_finite[odd] = np.isfinite(keys[odd]).all(axis=1)
        if not np.array_equal(is_finite, finite):
            row = first + int(np.argmax(is_finite != finite))
            said = "finite" if finite[row - first] else "not finite"
            return f"the key in place {row} is not what the manifest says it is: {said}"
        sure = (norms <= self.max_norm * (1 - _LOST * (keys.shape[1] + 8))) & (norms > _SMALL)
        near = np.flatnonzero(finite & ~sure)
        if near.size:
            longest = float(np.linalg.norm(keys[near].astype(np.float64), axis=1).max())
            if longest > self.max_norm:
                return f"a key is {longest:g} long where max_norm is {self.max_norm:g}"
        if self.nonnegative and not (keys >= 0).all():
            return "a key has a negative number where the manifest says nonnegative"
        return None
