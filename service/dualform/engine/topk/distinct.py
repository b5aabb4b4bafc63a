"""Top-k of distinct values of a column: of rows with the same value only the best counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dualform.store.grouping import Grouping


@dataclass(frozen=True)
class Distinct:
    """Which rows stand for the same thing.

    Attributes:
        codes: int64 [total], by position: rows with the same code have the same value. A row
            without a value has a code of its own.
    """

    codes: np.ndarray

    @classmethod
    def of(cls, grouping: Grouping) -> Distinct:
        """By the values of one column."""
        codes = grouping.codes.astype(np.int64)
        values = len(grouping.values)
        if values and not grouping.values[values - 1].is_valid:
            null = np.flatnonzero(codes == values - 1)
            codes[null] = values + null
        return cls(codes)

    def counts(
        self, positions: np.ndarray, selected: np.ndarray, grouping: Grouping | None
    ) -> np.ndarray:
        """How many of the selected rows share each hit's value (and group).

        Args:
            positions: int64, any shape; -1 for no hit.
            selected: bool [total], the rows that took part.
            grouping: The groups that were ranked apart, or None.

        Returns:
            int64, the shape of positions; 0 for no hit.
        """
        found = positions >= 0
        counts = np.zeros(positions.shape, np.int64)
        if not found.any():
            return counts
        hits = positions[found]
        wanted = np.unique(self.codes[hits])
        place = np.full(int(self.codes.max()) + 1, -1, np.int64)
        place[wanted] = np.arange(len(wanted))
        rows = np.flatnonzero(selected)
        rows = rows[place[self.codes[rows]] >= 0]
        pairs, hit_pairs = place[self.codes[rows]], place[self.codes[hits]]
        if grouping is not None:
            pairs = pairs * len(grouping.values) + grouping.codes[rows]
            hit_pairs = hit_pairs * len(grouping.values) + grouping.codes[hits]
        values, own = np.unique(pairs, return_counts=True)
        counts[found] = own[np.searchsorted(values, hit_pairs)]
        return counts


def first_of_each(cells: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Which entries are the first of their (cell, code) in the order given: bool [n]."""
    order = np.lexsort((codes, cells))  # stable: equal pairs stay in the order given
    own_cells, own_codes = cells[order], codes[order]
    new = np.ones(len(order), bool)
    new[1:] = (own_cells[1:] != own_cells[:-1]) | (own_codes[1:] != own_codes[:-1])
    first = np.empty(len(order), bool)
    first[order] = new
    return first
