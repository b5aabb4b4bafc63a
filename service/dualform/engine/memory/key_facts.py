"""What an index says of a shard's keys, held against the keys when they are first used.

Bounds stand on it: a norm that is too small, or a NaN that nobody was told of, would give wrong
answers without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.store.encoding import FLOAT32

_TILE_BYTES = 4 << 20
_SLACK = 1e-3
"""Relative, and more than float32 loses in a norm: longer ones are computed again, in float64."""


@dataclass(frozen=True)
class KeyFacts:
    """Of one shard.

    Attributes:
        finite: bool [rows]: which keys are finite.
        max_norm: Upper bound of the finite keys' Euclidean norms.
        nonnegative: No key has a negative number.
    """

    finite: np.ndarray
    max_norm: float
    nonnegative: bool

    def wrong(self, keys: torch.Tensor) -> str | None:
        """What the keys, [rows, d] as stored, are not; None where they are all that."""
        step = max(1, _TILE_BYTES // FLOAT32.row_bytes(keys.shape[1]))
        for first in range(0, len(keys), step):
            tile = torch.empty(keys[first : first + step].shape, dtype=torch.float32, device="cpu")
            what = self._wrong(tile.copy_(keys[first : first + step]), first)
            if what is not None:
                return what
        return None

    def _wrong(self, keys: torch.Tensor, first: int) -> str | None:
        norms = torch.linalg.vector_norm(keys, dim=1).double().numpy()
        finite = self.finite[first : first + len(keys)]
        # A sum of squares that float32 can't hold is no proof: of those rows, each number is asked.
        odd = np.flatnonzero(~np.isfinite(norms))
        is_finite = np.ones(len(keys), bool)
        is_finite[odd] = torch.isfinite(keys[torch.from_numpy(odd)]).all(dim=1).numpy()
        if not np.array_equal(is_finite, finite):
            row = first + int(np.argmax(is_finite != finite))
            return f"the key in place {row} is {'' if finite[row - first] else 'as '}not finite"
        with np.errstate(invalid="ignore"):
            near = np.flatnonzero(finite & ~(norms <= self.max_norm * (1 - _SLACK)))
        if near.size:
            wide = keys[torch.from_numpy(near)].double()
            longest = float(torch.linalg.vector_norm(wide, dim=1).max())
            if longest > self.max_norm:
                return f"a key is {longest:g} long where max_norm is {self.max_norm:g}"
        if self.nonnegative and not bool((keys >= 0).all()):
            return "a key has a negative number where the manifest says nonnegative"
        return None
