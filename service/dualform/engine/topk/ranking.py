"""What is ranked, and what "best" means.

A row's *merit* is its score, the negated score, or the absolute score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dualform.engine.memory.exact import error_bound
from dualform.engine.memory.float64 import lengths
from dualform.engine.memory.tiles import Tile
from dualform.engine.topk.contribution import Contribution
from dualform.store.grouping import Grouping

_FLOAT32_TINY = 2.0**-126
_SMALL = 2.0**-90
"""Where the norms' product is smaller, products are float64: float32's may be lost."""


@dataclass(frozen=True)
class Ranking:
    """What is ranked, and by what.

    Groups are known beforehand, of all rows, or they are a column's name, and come with the tiles.

    Attributes:
        k: Rows per query (and group).
        order: "largest", "smallest" or "absolute".
        grouping: Rank inside each of these groups, or None.
        contribution: Rank by contribution to one output unit, or along directions; None for the
            attention weight.
        cosine: Rank by the cosine of query and key, in place of the weight.
        distinct: Of rows with the same value only the best counts; a row without a value stands
            for itself. None where each row counts.
    """

    k: int
    order: str
    grouping: Grouping | str | None = None
    contribution: Contribution | None = None
    distinct: Grouping | str | None = None
    cosine: bool = False

    def part(self, queries: slice) -> Ranking:
        """The same for some of the queries."""
        if self.contribution is None:
            return self
        return replace(self, contribution=self.contribution.part(queries))

    @property
    def groups(self) -> int:
        """Number of groups that are known beforehand; 1 without."""
        return len(self.grouping.values) if isinstance(self.grouping, Grouping) else 1

    @property
    def hits(self) -> int:
        """Rows to return per query."""
        return self.k * self.groups


class Cosines:
    """Cosines of some queries with the keys of tiles.

    Args:
        queries: float32 [n, d_in], finite.

    Attributes:
        error: How far a cosine can be from the exact one.
    """

    def __init__(self, queries: torch.Tensor) -> None:
        d = queries.shape[1]
        self._queries = queries.double()
        self._lengths = torch.from_numpy(lengths(queries.numpy()))
        # A weight's error, of lengths of 1 and where float32 may underflow; the bound's own margin
        # holds float64's few roundings.
        one = torch.ones((), dtype=torch.float64)
        self.error = float(error_bound(d, one, 1.0)) + (d + 4) * _FLOAT32_TINY / _SMALL

    def of_tile(
        self, tile: Tile, weights: torch.Tensor, which: np.ndarray | None = None
    ) -> torch.Tensor:
        """Cosines of a tile's keys, 0 where query or key is zero.

        Args:
            tile: Whose keys.
            weights: Attention weights [n, rows].
            which: The queries that the weights belong to, int64 [n]; None for all.

        Returns:
            float64 [n, rows]; NaN where a key is not finite.
        """
        some = slice(None) if which is None else torch.from_numpy(which)
        sizes = torch.outer(self._lengths[some], torch.from_numpy(lengths(tile.keys.numpy())))
        found = weights.to(torch.float64, copy=True)
        small = torch.nonzero((sizes < _SMALL).any(dim=0))[:, 0]
        if len(small):
            found[:, small] = self._queries[some] @ tile.keys[small].double().T
        return found.div_(sizes).masked_fill_(sizes == 0, 0)


def merit(scores: torch.Tensor, order: str) -> torch.Tensor:
    """What "best" means by this order, of scores of any shape."""
    if order == "largest":
        return scores
    return -scores if order == "smallest" else scores.abs()
