"""Totals per group: of attention weights, of rows, of keys. Reducers, in float64 throughout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dualform.engine.memory.shards import Stop, check_stop
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.groups import Groups, few_runs

_ONE_BY_ONE = 4
"""Up to so many queries are added up one after the other where there are many groups."""
_QUERIES_AT_ONCE = 16
"""What is turned round at a time: a cache line or two of each group."""


class GroupTotals:
    """One float64 tensor for each group, with room for groups that are yet to come.

    Args:
        groups: The groups.
        shape: Of each group's tensor.
    """

    def __init__(self, groups: Groups, shape: Sequence[int]) -> None:
        self.groups = groups
        self._totals = torch.zeros((len(groups), *shape), dtype=torch.float64, device="cpu")

    def tensor(self) -> torch.Tensor:
        """The totals by group number, [at least groups, ...], to be added to."""
        missing = len(self.groups) - len(self._totals)
        if missing > 0:
            more = max(missing, len(self._totals) // 4)
            room = self._totals.new_zeros((more, *self._totals.shape[1:]))
            self._totals = torch.cat([self._totals, room])
        return self._totals

    def merge(self, other: GroupTotals) -> None:
        """Add another's totals to those of the same groups."""
        numbers = torch.from_numpy(self.groups.join(other.groups).astype(np.int64))
        added = other.tensor()[: len(other.groups)]
        self.tensor().index_add_(0, numbers, added)

    def ordered(self) -> torch.Tensor:
        """The totals in the order of the groups' values, float64 [groups, ...], on the CPU."""
        if self.groups.in_order:
            return self.tensor()[: len(self.groups)]
        _, order = self.groups.ordered()
        return self.tensor()[torch.from_numpy(order)]


class GroupSum:
    """Adds up attention weights per group.

    Args:
        queries: Number of queries.
        groups: The groups.
        absolute: Add |weight|.
    """

    values, once = False, True

    def __init__(self, queries: int, groups: Groups, absolute: bool) -> None:
        self._groups = groups
        self._absolute = absolute
        self._totals = GroupTotals(groups, (queries,))

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile and its weights, [n, rows]."""
        codes = self._groups.codes(tile.table, tile.positions)
        totals = self._totals.tensor()
        if self._absolute:
            weights = weights.abs()
        found = few_runs(codes, len(self._groups))
        if found is None:
            places = codes.astype(np.int64)  # of narrower ones each row is a call
            if len(weights) <= _ONE_BY_ONE:
                for query, of_query in enumerate(weights.double().numpy()):
                    np.add.at(totals.numpy()[:, query], places, of_query)
            else:
                by_row = weights.T.contiguous().double()
                totals.index_add_(0, torch.from_numpy(places), by_row)
            return
        if found.order is not None:
            weights = weights[:, found.order]
        for group, first, last in found.spans:
            totals[group] += weights[:, first:last].sum(1, dtype=torch.float64)

    def add_runs(self, groups: np.ndarray, weights: np.ndarray) -> None:
        """Take whole runs: their groups, int32 [runs], and total weights, float64 [n, runs]."""
        totals = self._totals.tensor()
        parts = torch.from_numpy(np.ascontiguousarray(weights.T))
        totals.index_add_(0, torch.from_numpy(groups.astype(np.int64)), parts)

    def merge(self, other: GroupSum) -> None:
        """Take what another added up, signed or absolute as this one, of other rows."""
        if self._absolute != other._absolute:
            raise ValueError("signed and absolute sums can't be added up")
        self._totals.merge(other._totals)

    def result(self, stop: Stop | None = None) -> np.ndarray:
        """float64 [n, groups], in the order of the groups' values; `stop` is asked meanwhile."""
        by_group = self.by_group()
        found = np.empty(by_group.shape[::-1])
        for first in range(0, len(found), _QUERIES_AT_ONCE):
            check_stop(stop)
            found[first : first + _QUERIES_AT_ONCE] = by_group[
                :, first : first + _QUERIES_AT_ONCE
            ].T
        return found

    def by_group(self) -> np.ndarray:
        """The same turned round, float64 [groups, n]."""
        return np.asarray(self._totals.ordered().numpy())


class GroupCount:
    """Counts rows per group; weights do not matter.

    Args:
        groups: The groups.
    """

    values, once = False, True

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._counts = np.zeros(0, np.int64)

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile."""
        codes = self._groups.codes(tile.table, tile.positions)
        self._add(np.bincount(codes, minlength=len(self._groups)))

    def merge(self, other: GroupCount) -> None:
        """Take what another counted of other rows."""
        numbers = self._groups.join(other._groups)
        counts = np.zeros(len(self._groups), np.int64)
        np.add.at(counts, numbers[: len(other._counts)], other._counts)
        self._add(counts)

    def result(self) -> np.ndarray:
        """int64 [groups], in the order of the groups' values."""
        self._add(np.zeros(len(self._groups), np.int64))
        return np.asarray(self._counts[self._groups.ordered()[1]])

    def _add(self, counts: np.ndarray) -> None:
        more = np.zeros(len(counts) - len(self._counts), np.int64)
        self._counts = np.concatenate([self._counts, more]) + counts


class KeySum:
    """Adds up keys per group; weights do not matter. Signed sums of any query follow from these.

    Memory: 8 d_in bytes per group.

    Args:
        d_in: Length of a key.
        groups: The groups.
    """

    values, once = False, False

    def __init__(self, d_in: int, groups: Groups) -> None:
        self._groups = groups
        self._totals = GroupTotals(groups, (d_in,))

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile."""
        codes = self._groups.codes(tile.table, tile.positions)
        numbers, totals = torch.from_numpy(codes.astype(np.int64)), self._totals.tensor()
        totals.index_add_(0, numbers, tile.keys.double())

    def merge(self, other: KeySum) -> None:
        """Take what another added up of other rows."""
        self._totals.merge(other._totals)

    def result(self) -> np.ndarray:
        """float64 [groups, d_in], in the order of the groups' values."""
        return np.asarray(self._totals.ordered().numpy())
