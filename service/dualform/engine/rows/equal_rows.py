"""Which rows have the same key: where training sees its examples more than once.

Made once for a row space, from the index's table of equal keys; takes four bytes a row and twelve a
distinct key in addition to that table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dualform.store.grouping import Grouping


@dataclass(frozen=True)
class KeyRows:
    """The rows that take part, key by key.

    Attributes:
        positions: int32 or int64 [rows]: those of a key are neighbours, in the order of row ids.
        starts: int64 [keys + 1]: where each key's rows begin, and the end of all.
        names: [keys], ascending: what the index calls each key, the first position that has it.
    """

    positions: np.ndarray
    starts: np.ndarray
    names: np.ndarray

    @classmethod
    def of(cls, positions: np.ndarray, first: np.ndarray) -> KeyRows:
        """Of some rows at positions [rows], those of a key together; `first` as in `EqualRows`."""
        keys = first[positions]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        return cls(positions, np.append(starts, len(keys)), keys[starts])

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [keys]: how many of the rows each key has."""
        return np.diff(self.starts)

    @cached_property
    def standing(self) -> np.ndarray:
        """[keys]: the position of each key's row with the lowest id."""
        return np.asarray(self.positions[self.starts[:-1]])


class EqualRows:
    """All rows of a layer by key.

    Args:
        first: int32 or int64 [total], for each position the first one with the same key.
        ids: int64 [total], row ids: 0 to total - 1 in some order.
    """

    def __init__(self, first: np.ndarray, ids: np.ndarray) -> None:
        self._first = first
        order = np.argsort(first.astype(np.int64) * max(1, len(ids)) + ids)
        self._order = order.astype(first.dtype)
        self._together: dict[int, tuple[Grouping, bool]] = {}

    @cached_property
    def all(self) -> KeyRows:
        """Every row."""
        return KeyRows.of(self._order, self._first)

    def selected(self, which: np.ndarray) -> KeyRows:
        """Those of the rows that take part, bool [total]."""
        return self.all if which.all() else KeyRows.of(self._order[which[self._order]], self._first)

    def places(self, rows: KeyRows, positions: np.ndarray) -> np.ndarray:
        """The numbers, in `rows`, of the keys at these positions: int64 [n]."""
        return np.asarray(np.searchsorted(rows.names, self._first[positions]))

    def agree(self, grouping: Grouping) -> bool:
        """Whether all rows with the same key are in the same group."""
        known = self._together.get(id(grouping))
        if known is None:
            codes = grouping.codes[self._order]
            changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
            known = grouping, bool(np.isin(changes, self.all.starts, assume_unique=True).all())
            self._together[id(grouping)] = known
        return known[1]
