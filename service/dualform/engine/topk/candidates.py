"""Candidates of a top-k: rows that may be among the best until their exact scores are known.

Every query keeps candidates of its own in each group; such a pair is a *cell*. Cells are numbered
group * queries + query: a group that is met later adds numbers and changes none. The candidates of
all cells lie in parallel arrays, an entry each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualform.engine.rows.table import Table


@dataclass(frozen=True)
class Candidates:
    """Candidates, each in one cell.

    Attributes:
        cells: int64 [m].
        merits: float64 [m].
        errors: float64 [m], how far a merit can be from the exact one; 0 where the score is known.
        ids: int64 [m], row ids.
        positions: int64 [m], where the rows are in the memory; -1 where they are in another.
        values: int64 [m], what the rows stand for; 0 for all where each stands for itself.
        scores: float32 [m], exact; NaN where not yet known.
    """

    cells: np.ndarray
    merits: np.ndarray
    errors: np.ndarray
    ids: np.ndarray
    positions: np.ndarray
    values: np.ndarray
    scores: np.ndarray

    @classmethod
    def empty(cls) -> Candidates:
        none, real = np.zeros(0, np.int64), np.zeros(0)
        return cls(none, real, real, none, none, none, np.zeros(0, np.float32))

    @classmethod
    def join(cls, parts: Sequence[Candidates]) -> Candidates:
        if len(parts) == 1:
            return parts[0]
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def where(self, which: np.ndarray) -> Candidates:
        """Those at these places, bool [m] or int64."""
        return Candidates(
            self.cells[which],
            self.merits[which],
            self.errors[which],
            self.ids[which],
            self.positions[which],
            self.values[which],
            self.scores[which],
        )

    def __len__(self) -> int:
        return len(self.cells)


class Kept:
    """The metadata of candidates whose rows nothing holds afterwards, as Python objects: Arrow's
    many small ones would lie about in the memory that tiles come and go in."""

    def __init__(self) -> None:
        self._metadata: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._metadata)

    def add(self, table: Table, positions: np.ndarray) -> None:
        """Keep some rows of a table, at positions int64 [m]."""
        if not len(positions):
            return
        columns = {name: column.to_pylist() for name, column in table.take(positions).items()}
        for place, row in enumerate(table.ids[positions].tolist()):
            self._metadata[row] = {name: column[place] for name, column in columns.items()}

    def merge(self, other: Kept) -> None:
        """Take what another keeps."""
        self._metadata.update(other._metadata)

    def prune(self, ids: np.ndarray) -> None:
        """Keep these rows alone, int64 [m]."""
        wanted = set(ids.tolist())
        self._metadata = {row: columns for row, columns in self._metadata.items() if row in wanted}

    def of(self, ids: np.ndarray) -> dict[int, dict[str, Any]]:
        """The metadata of those of these rows that are kept, int64 [m]: by row id, ascending, and
        by column; None where a row has no such column."""
        kept = [row for row in np.unique(ids).tolist() if row in self._metadata]
        names = dict.fromkeys(name for row in kept for name in self._metadata[row])
        return {row: {name: self._metadata[row].get(name) for name in names} for row in kept}
