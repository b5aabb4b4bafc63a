"""Rows that may be among the k best, as parallel arrays; and what is known of them.

A cell is a (query, group): group * queries + query, so that groups which come later change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

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
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def where(self, which: np.ndarray) -> Candidates:
        """Those at these places, bool [m] or int64."""
        return Candidates(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.cells)


_NONE = pa.table({"row": pa.array([], pa.int64())})


class Kept:
    """The metadata of candidates whose rows nothing holds afterwards."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self.rows = 0

    def add(self, table: Table, positions: np.ndarray) -> None:
        """Keep some rows of a table, at positions int64 [m]."""
        if not len(positions):
            return
        ids = pa.array(table.ids[positions])
        self._parts.append(pa.table({"row": ids, **table.take(positions)}))
        self.rows += len(positions)

    def merge(self, other: Kept) -> None:
        """Take what another keeps."""
        self._parts += other._parts
        self.rows += other.rows

    def prune(self, ids: np.ndarray) -> None:
        """Keep these rows alone, int64 [m]."""
        self._parts = [self.of(ids)]
        self.rows = len(self._parts[0])

    def of(self, ids: np.ndarray) -> pa.Table:
        """The metadata of those of these rows that are kept, by row id in the column "row".

        Args:
            ids: int64 [m].

        Returns:
            In order of ids, each row once; null where a row has no such column.
        """
        if not self._parts:
            return _NONE
        whole = pa.concat_tables(self._parts, promote_options="default")
        rows, first = np.unique(whole["row"].to_numpy(), return_index=True)
        return whole.take(pa.array(first[np.isin(rows, ids)]))
