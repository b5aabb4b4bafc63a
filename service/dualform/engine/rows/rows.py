"""The rows of a row space: ids, metadata columns, groups, and which rows a filter selects.

Rows are addressed by *position*: shards one after the other, inside a shard in the sidecar's order.
Shards cover contiguous ranges of row ids, so positions and ids cover the same ranges.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa

from dualform.engine.errors import InvalidArgumentError
from dualform.engine.rows.filters import evaluate
from dualform.store.errors import DamagedError
from dualform.store.files import read_checked
from dualform.store.grouping import Grouping, group
from dualform.store.index import REBUILD, RowSpace, runs
from dualform.store.parquet import read_parquet
from dualform.store.row_metadata import row_schema
from dualform.v1 import attribution_pb2 as pb


class Rows:
    """All rows of a row space, in memory; thread-safe.

    Attributes:
        total: Number of rows.
        starts: int64 [shards + 1], the position at which each shard starts.
        ids: int64 [total], the row id at each position.
        columns: Metadata columns by name, [total], by position.
        everything: bool [total], all true, and only to be read: no filter.
        run_starts: int64 [runs], where runs of rows with the same (task, label) start, shard by
            shard; a run never crosses shards.
    """

    def __init__(self, directory: Path, space: RowSpace) -> None:
        """
        Raises:
            DamagedError: A sidecar does not hold what was written.
        """
        none = row_schema({}).empty_table()
        # A layer that never ran has no shard.
        tables = [] if space.shards else [none.add_column(0, "row", none["step"])]
        for shard in space.shards:
            path = directory / shard.sidecar.name
            data = read_checked(directory, shard.sidecar, REBUILD)
            try:
                table = read_parquet(data)
            except pa.ArrowException as error:
                raise DamagedError(path, f"not a sidecar ({error})", REBUILD) from None
            ids = np.sort(table["row"].to_numpy())
            if not np.array_equal(ids, np.arange(shard.start, shard.start + shard.rows)):
                raise DamagedError(path, "its row ids are not the shard's", REBUILD)
            tables.append(table)
        self.total = space.rows
        self.starts = np.cumsum([0, *(shard.rows for shard in space.shards)], dtype=np.int64)
        table = pa.concat_tables(tables)
        self.ids = table["row"].to_numpy().astype(np.int64)
        self.columns = {
            name: table[name].combine_chunks() for name in table.column_names if name != "row"
        }
        self.steps = self.columns["step"].to_numpy(zero_copy_only=False).astype(np.int64)
        self.everything = np.ones(self.total, bool)
        self.everything.flags.writeable = False
        self._groupings: dict[str, Grouping] = {}
        self._run_codes: dict[str, np.ndarray] = {}
        self._lock = threading.RLock()
        task, label = (
            self.grouping(name).codes if name in self.columns else None
            for name in ("task", "label")
        )
        starts = runs(task, label, self.total)
        self.run_starts = np.union1d(starts, self.starts[:-1])

    def grouping(self, column: str, field: str = "group_by") -> Grouping:
        """Group rows by a column, which the request named in this field.

        Raises:
            InvalidArgumentError: Unknown column.
        """
        if column not in self.columns:
            raise InvalidArgumentError(
                f"unknown column {column!r}; the columns are {', '.join(self.columns)}",
                field=field,
                reason="UNKNOWN_COLUMN",
            )
        with self._lock:
            if column not in self._groupings:
                self._groupings[column] = group(self.columns[column])
            return self._groupings[column]

    def select(self, where: pb.Filter | None, before_step: int | None = None) -> np.ndarray:
        """Which rows take part.

        Returns:
            bool [total], by position.
        """
        mask = self.everything if where is None else evaluate(where, self.columns)
        return mask if before_step is None else mask & (self.steps < before_step)

    def count(self, column: str, selected: np.ndarray) -> np.ndarray:
        """int64 [groups]: how many of the selected rows, bool [total], each group has."""
        grouping = self.grouping(column)
        if selected is self.everything:
            return grouping.counts
        counts = np.bincount(grouping.codes[selected], minlength=len(grouping.values))
        return counts.astype(np.int64)

    def run_codes(self, column: str) -> np.ndarray:
        """The group of each run's rows, int32 [runs]; -1 where a run has rows of several."""
        grouping = self.grouping(column)
        with self._lock:
            if column not in self._run_codes:
                self._run_codes[column] = self.codes_of_runs(grouping)
            return self._run_codes[column]

    def codes_of_runs(self, grouping: Grouping) -> np.ndarray:
        """Likewise of any grouping of the rows."""
        low = np.minimum.reduceat(grouping.codes, self.run_starts)
        high = np.maximum.reduceat(grouping.codes, self.run_starts)
        return np.where(low == high, low, np.int32(-1))

    def take(self, positions: np.ndarray) -> dict[str, pa.Array]:
        """Every column at these positions [n]; null where a position is negative."""
        index = pa.array(positions, mask=positions < 0)
        return {name: column.take(index) for name, column in self.columns.items()}
