"""Add up contributions, or cosines, per group: reducers, in float64."""

from __future__ import annotations

import numpy as np
import torch

from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.groups import Groups
from dualform.engine.topk.contribution import Contribution
from dualform.engine.topk.ranking import Cosines
from dualform.engine.totals.group_sums import GroupSum


class ContributionSum:
    """Adds up what rows added to one output unit, or along directions, per group.

    Args:
        queries: Number of queries.
        groups: The groups.
        contribution: With coefficients.
    """

    values = True

    def __init__(self, queries: int, groups: Groups, contribution: Contribution) -> None:
        self.once = contribution.directions is None
        self._contribution = contribution
        self._sum = GroupSum(queries, groups, absolute=False)

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile, with values, and its weights, [n, rows]."""
        self._sum.update(tile, self._contribution.parts(tile, weights))

    def merge(self, other: ContributionSum) -> None:
        """Take what another added up, of the same unit or directions and of other rows."""
        if not self._contribution.same_question(other._contribution):
            raise ValueError("only answers to the same question can be merged")
        self._sum.merge(other._sum)

    def result(self) -> np.ndarray:
        """float64 [n, groups], in the order of the groups' values."""
        return self._sum.result()


class CosineSum:
    """Adds up the cosines of queries and keys, per group.

    Args:
        queries: float32 [n, d_in].
        groups: The groups.
    """

    values, once = False, True

    def __init__(self, queries: torch.Tensor, groups: Groups) -> None:
        self._queries = queries
        self._cosines = Cosines(queries)
        self._sum = GroupSum(len(queries), groups, absolute=False)

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile and its weights, [n, rows]."""
        self._sum.update(tile, self._cosines.of_tile(tile, weights))

    def merge(self, other: CosineSum) -> None:
        """Take what another added up, for the same queries and of other rows."""
        if not torch.equal(self._queries, other._queries):
            raise ValueError("only answers to the same question can be merged")
        self._sum.merge(other._sum)

    def result(self) -> np.ndarray:
        """float64 [n, groups], in the order of the groups' values."""
        return self._sum.result()
