"""Rows and what is known of each: ids, steps and metadata columns, wherever the rows come from.

An index knows all rows of a row space (`rows.Rows`); a live training run knows those of a tile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import pyarrow as pa

from dualform.engine.errors import InvalidArgumentError
from dualform.engine.rows.bitmaps import Bitmaps
from dualform.engine.rows.filters import evaluate, unknown_column
from dualform.store.grouping import Grouping, group
from dualform.v1 import attribution_pb2 as pb

KEPT_BYTES = 16 << 20
"""What filters selected is kept for those that come again, up to so many bytes of each table."""


class Table:
    """Rows with their metadata, addressed by *position*; thread-safe.

    Args:
        ids: int64 [total], the row id at each position.
        steps: int64 [total], the step at each position.
        columns: Gives the metadata columns by name, [total], once they are asked for.

    Attributes:
        total: Number of rows.
        everything: bool [total], all true, and only to be read: no filter.
    """

    def __init__(
        self,
        ids: np.ndarray,
        steps: np.ndarray,
        columns: Callable[[], Mapping[str, pa.Array]],
    ) -> None:
        self.total = len(ids)
        self.ids = ids
        self.steps = steps
        self.everything = np.ones(self.total, bool)
        self.everything.flags.writeable = False
        self._columns = columns
        self._groupings: dict[str, Grouping] = {}
        self._selected: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.RLock()

    @cached_property
    def columns(self) -> Mapping[str, pa.Array]:
        """Metadata columns by name, [total], by position; text may be dictionaries."""
        return self._columns()

    def check_column(self, column: str, field: str) -> None:
        """Refuse a column that rows do not have, which the request named in this field.

        Raises:
            InvalidArgumentError: Unknown column.
        """
        if column not in self.columns:
            raise InvalidArgumentError(
                unknown_column(column, self.columns), field=field, reason="UNKNOWN_COLUMN"
            )

    def grouping(self, column: str, field: str = "group_by") -> Grouping:
        """Group rows by a column, which the request named in this field.

        Raises:
            InvalidArgumentError: Unknown column.
        """
        self.check_column(column, field)
        with self._lock:
            if column not in self._groupings:
                self._groupings[column] = group(self.columns[column])
            return self._groupings[column]

    def select(
        self,
        where: pb.Filter | None,
        before_step: int | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> np.ndarray:
        """Which rows take part; `stop` is asked before each comparison.

        Returns:
            bool [total], by position; only to be read.
        """
        mask = self.everything if where is None else self._filtered(where, stop)
        return mask if before_step is None else mask & (self.steps < before_step)

    def _filtered(self, where: pb.Filter, stop: Callable[[], bool] | None) -> np.ndarray:
        """What a filter selects, by which the same filter is answered when it comes again."""
        key = where.SerializeToString(deterministic=True)
        with self._lock:
            if key in self._selected:
                self._selected.move_to_end(key)
                return self._selected[key]
        mask = evaluate(where, self.columns, self.bitmaps_of, stop)
        mask.flags.writeable = False
        with self._lock:
            self._selected[key] = mask
            while sum(len(k) + kept.nbytes for k, kept in self._selected.items()) > KEPT_BYTES:
                self._selected.popitem(last=False)
        return mask

    def bitmaps_of(self, column: str) -> Bitmaps | None:
        """What filters of the column are made from, where that pays; None where it does not."""
        return None

    def take(self, positions: np.ndarray) -> dict[str, pa.Array]:
        """Every column at these positions [n]; null where a position is negative."""
        index = pa.array(positions, mask=positions < 0)
        taken = {name: column.take(index) for name, column in self.columns.items()}
        return {
            name: column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            for name, column in taken.items()
        }
