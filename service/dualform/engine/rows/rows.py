"""The rows of a row space: ids, metadata columns, groups, and which rows a filter selects.

Rows are addressed by *position*: shards one after the other, inside a shard in the sidecar's order.
Shards cover contiguous ranges of row ids, so positions and ids cover the same ranges.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from dualform.engine.rows.table import Table
from dualform.store.errors import DamagedError
from dualform.store.files import read_checked
from dualform.store.grouping import Grouping
from dualform.store.index import REBUILD, RowSpace, runs
from dualform.store.parquet import read_parquet
from dualform.store.row_metadata import row_schema


class Rows(Table):
    """All rows of a row space, in memory; thread-safe.

    Attributes:
        starts: int64 [shards + 1], the position at which each shard starts.
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
        table = pa.concat_tables(tables)
        columns = {
            name: table[name].combine_chunks() for name in table.column_names if name != "row"
        }
        super().__init__(
            table["row"].to_numpy().astype(np.int64),
            columns["step"].to_numpy(zero_copy_only=False).astype(np.int64),
            lambda: columns,
        )
        self.starts = np.cumsum([0, *(shard.rows for shard in space.shards)], dtype=np.int64)
        self._run_codes: dict[str, np.ndarray] = {}
        task, label = (
            self.grouping(name).codes if name in columns else None for name in ("task", "label")
        )
        starts = runs(task, label, self.total)
        self.run_starts = np.union1d(starts, self.starts[:-1])

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
