"""Top-k of distinct values of a column: of rows with the same value only the best counts."""

from __future__ import annotations

import numpy as np

from dualform.engine.rows.groups import Groups
from dualform.engine.rows.table import Table
from dualform.store.grouping import Grouping


def value_codes(values: Groups, table: Table, positions: np.ndarray) -> np.ndarray:
    """What rows stand for: int64 [rows], equal where they stand for the same.

    Args:
        values: Of the column, numbered.
        table: Whose rows.
        positions: int64 [rows].

    Returns:
        The values' numbers; a row without a value has a code of its own, negative.
    """
    codes = values.codes(table, positions).astype(np.int64)
    if values.null is not None:
        without = codes == values.null
        codes[without] = -1 - table.ids[positions[without]]
    return codes


def counts(
    positions: np.ndarray, selected: np.ndarray, values: Grouping, grouping: Grouping | None
) -> np.ndarray:
    """How many of the selected rows share each hit's value (and group).

    Args:
        positions: int64, any shape; -1 for no hit.
        selected: bool [total], the rows that took part.
        values: Of the column.
        grouping: The groups that were ranked apart, or None.

    Returns:
        int64, the shape of positions; 0 for no hit, 1 for a row without a value.
    """
    found = positions >= 0
    out = found.astype(np.int64)
    null = Groups(values).null
    if null is not None:
        found[found] = values.codes[positions[found]] != null
    if not found.any():
        return out
    hits = positions[found]
    wanted = np.unique(values.codes[hits])
    place = np.full(len(values.values), -1, np.int64)
    place[wanted] = np.arange(len(wanted))
    sharing = np.flatnonzero(selected)
    sharing = sharing[place[values.codes[sharing]] >= 0]
    pairs, hit_pairs = place[values.codes[sharing]], place[values.codes[hits]]
    if grouping is not None:
        pairs = pairs * len(grouping.values) + grouping.codes[sharing]
        hit_pairs = hit_pairs * len(grouping.values) + grouping.codes[hits]
    cells, sizes = np.unique(pairs, return_counts=True)
    out[found] = sizes[np.searchsorted(cells, hit_pairs)]
    return out


def first_of_each(cells: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Which entries are the first of their (cell, code) in the order given: bool [n]."""
    order = np.lexsort((codes, cells))  # stable: equal pairs stay in the order given
    sorted_cells, sorted_codes = cells[order], codes[order]
    new = np.ones(len(order), bool)
    new[1:] = (sorted_cells[1:] != sorted_cells[:-1]) | (sorted_codes[1:] != sorted_codes[:-1])
    first = np.empty(len(order), bool)
    first[order] = new
    return first
