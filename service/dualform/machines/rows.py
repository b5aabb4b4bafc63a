"""A row space whose rows are on other machines: what of it the server knows, and asks for once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from dualform.engine.rows.rows import Rows
from dualform.engine.rows.table import Table
from dualform.store.grouping import Grouping

Values = Callable[[str, str], "tuple[pa.Array, bool]"]
"""Gives a column's values, [groups], named in this field of the request, and whether they are those
of all machines."""


class FarRows(Rows):
    """Columns without rows, and groups without codes.

    Args:
        total: How many rows there are.
        columns: Their types by name.
        values: Asks the machines.
    """

    def __init__(self, total: int, columns: Mapping[str, pa.DataType], values: Values) -> None:
        none = np.zeros(0, np.int64)
        empty = {name: pa.array([], kind) for name, kind in columns.items()}
        Table.__init__(self, none, none, lambda: empty)
        self.total = total
        self.starts = np.zeros(1, np.int64)
        self.run_starts = none
        self._values = values
        self._known: dict[str, Grouping] = {}

    def grouping(self, column: str, field: str = "group_by") -> Grouping:
        """A column's groups; none of them has rows here.

        Raises:
            InvalidArgumentError: Unknown column.
        """
        self.check_column(column, field)
        with self._lock:
            known = self._known.get(column)
        if known is None:
            values, whole = self._values(column, field)
            known = Grouping(values, np.zeros(0, np.int32))
            if whole:
                with self._lock:
                    self._known[column] = known
        return known
