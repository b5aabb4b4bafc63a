"""Groups whose values become known as the tiles come."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dualform.replay.errors import ReplayError
from dualform.replay.tiles import LiveTile
from dualform.store.grouping import group

Group = int | float | str | bool | None
"""A value of a metadata column; None where not annotated."""


class Groups:
    """Numbers the values of a metadata column in the order in which they first come.

    Args:
        column: Its name; None for one group of all rows.
    """

    def __init__(self, column: str | None) -> None:
        self.column = column
        self._codes: dict[object, int] = {} if column is not None else {None: 0}
        self._values: list[Group] = [] if column is not None else [None]

    def __len__(self) -> int:
        return len(self._values)

    def codes(self, tile: LiveTile) -> np.ndarray:
        """Number of each row's group, int64 [rows].

        Raises:
            ReplayError: There is no such column.
        """
        rows = len(tile.keys)
        if self.column is None:
            return np.zeros(rows, np.int64)
        table = tile.columns
        if self.column not in table.column_names:
            raise ReplayError(
                f"rows of step {int(tile.steps[0])} and later have no column {self.column!r}; "
                f"there are {', '.join(table.column_names)}: annotate it, or group by one of these"
            )
        own = group(table.column(self.column).combine_chunks())
        values = own.values.to_pylist()
        numbers = np.array([self._number(value) for value in values], np.int64)
        return np.asarray(numbers[own.codes])

    def ordered(self) -> tuple[list[Group], np.ndarray]:
        """The values ascending, null last, and the number of each, int64 [groups]."""
        if not self._values:
            return [], np.zeros(0, np.int64)
        own = group(pa.array(self._values))
        return own.values.to_pylist(), np.argsort(own.codes, kind="stable").astype(np.int64)

    def _number(self, value: Group) -> int:
        # NaN does not equal itself.
        key = ("nan",) if value != value else value
        if key not in self._codes:
            self._codes[key] = len(self._values)
            self._values.append(value)
        return self._codes[key]
