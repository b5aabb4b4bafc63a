"""Sums over distinct keys: equal keys have equal weights, so one product stands for all their rows.

A layer of an index may know, for each position, the first one with the same key. The rows that take
part are counted by distinct key and group; a key's weight then adds to a group as often as its rows
do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.groups import Groups
from dualform.engine.totals.group_sums import GroupTotals
from dualform.store.grouping import Grouping


def first_rows(first: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """The rows that stand for the selected ones.

    Args:
        first: int32 or int64 [total], for each position the first one with the same key.
        selected: bool [total], the rows that take part.

    Returns:
        bool [total]; rows among them need not take part themselves.
    """
    found = np.zeros(len(first), bool)
    found[first if selected.all() else first[selected]] = True
    return found


@dataclass(frozen=True)
class Pairs:
    """How many rows each distinct key has in each group, of those that take part.

    Attributes:
        first: int64 [pairs], ascending: the key's first position.
        groups: int64 [pairs]: the group's code; ascending where `first` is the same.
        counts: float64 [pairs], at least 1.
    """

    first: np.ndarray
    groups: np.ndarray
    counts: np.ndarray

    @classmethod
    def count(cls, first: np.ndarray, selected: np.ndarray, grouping: Grouping) -> Pairs:
        """Count the selected rows, bool [total], each in some group; `first` as above."""
        groups = max(1, len(grouping.values))
        cells = first[selected].astype(np.int64) * groups + grouping.codes[selected]
        if len(cells) and int(cells.max()) < 2 * len(cells):
            counts = np.bincount(cells)
            cells = np.flatnonzero(counts)
            counts = counts[cells]
        else:
            cells, counts = np.unique(cells, return_counts=True)
        first, codes = np.divmod(cells, groups)
        return cls(first, codes, counts.astype(np.float64))


class DistinctSum:
    """Adds up weights per group, each as often as its key has rows there: a reducer.

    It takes tiles of the rows that stand for others, and all of those.

    Args:
        queries: Number of queries.
        grouping: The groups.
        pairs: The rows that take part, counted.
        absolute: Add |weight|.
    """

    values, once = False, True

    def __init__(
        self,
        queries: int,
        grouping: Grouping,
        pairs: Pairs,
        absolute: bool,
    ) -> None:
        self._pairs = pairs
        self._absolute = absolute
        self._totals = GroupTotals(Groups(grouping), (queries,))

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile and its weights, [n, rows]."""
        pairs, totals = self._pairs, self._totals.tensor()
        ends = np.searchsorted(pairs.first, [tile.positions[0], tile.positions[-1] + 1])
        inside = slice(*ends.tolist())
        rows = np.searchsorted(tile.positions, pairs.first[inside])
        # A sparse matrix: where a row has no count for a group, its NaN does not reach it.
        counts = torch.sparse_coo_tensor(
            torch.from_numpy(np.stack([pairs.groups[inside], rows])),
            torch.from_numpy(pairs.counts[inside]),
            (len(totals), len(tile.positions)),
            check_invariants=False,
        )
        if self._absolute:
            weights = weights.abs()
        totals.addmm_(counts, weights.T.double().contiguous())

    def merge(self, other: DistinctSum) -> None:
        """Take what another added up of other rows."""
        if self._absolute != other._absolute:
            raise ValueError("signed and absolute sums can't be added up")
        self._totals.merge(other._totals)

    def result(self) -> np.ndarray:
        """float64 [n, groups], in the order of the groups' values."""
        return np.ascontiguousarray(self._totals.ordered().T.numpy())
