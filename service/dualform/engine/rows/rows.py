"""The rows of a row space: ids, metadata columns, groups, and which rows a filter selects.

Rows are addressed by *position*: shards one after the other, inside a shard in the sidecar's order.
Shards cover contiguous ranges of row ids, so positions and ids cover the same ranges.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualform.engine.rows.bitmaps import MOST_VALUES, Bitmaps
from dualform.engine.rows.table import Table
from dualform.store.errors import DamagedError
from dualform.store.files import read_checked
from dualform.store.grouping import Grouping
from dualform.store.index import REBUILD, RowSpace, runs
from dualform.store.parquet import read_parquet
from dualform.store.row_metadata import ROW_COLUMNS, TYPES, row_schema

MOST_TEXT = 2**31 - 1
"""Bytes that Arrow's usual text has at most."""


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
        path = directory
        # A layer that never ran has no shard.
        tables = [] if space.shards else [none.add_column(0, "row", none["step"])]
        for shard in space.shards:
            path = directory / shard.sidecar.name
            data = read_checked(directory, shard.sidecar, REBUILD)
            try:
                table = read_parquet(data, rows=shard.rows, dictionaries=True)
                _check_columns(table)
            except (pa.ArrowException, OSError) as error:
                raise DamagedError(path, f"not a sidecar ({error})", REBUILD) from None
            ids = np.sort(table["row"].to_numpy())
            if not np.array_equal(ids, np.arange(shard.start, shard.start + shard.rows)):
                raise DamagedError(path, "its row ids are not the shard's", REBUILD)
            tables.append(table)
        try:
            table = pa.concat_tables(tables)
        except pa.ArrowException as error:
            what = f"its columns are not those of the other shards ({error})"
            raise DamagedError(path, what, REBUILD) from None
        columns = {name: _joined(table[name]) for name in table.column_names if name != "row"}
        super().__init__(
            table["row"].to_numpy().astype(np.int64),
            columns["step"].to_numpy(zero_copy_only=False).astype(np.int64),
            lambda: columns,
        )
        self.starts = np.cumsum([0, *(shard.rows for shard in space.shards)], dtype=np.int64)
        self._groups_of_runs: dict[str, np.ndarray] = {}
        self._bitmaps: dict[str, Bitmaps | None] = {}
        task, label = (
            self.grouping(name).codes if name in columns else None for name in ("task", "label")
        )
        starts = runs(task, label, self.total)
        self.run_starts = np.union1d(starts, self.starts[:-1])

    def bitmaps_of(self, column: str) -> Bitmaps | None:
        """Made when a filter first names the column; None for numbers of many values."""
        with self._lock:
            if column not in self._bitmaps:
                kind = self.columns[column].type
                few = pa.types.is_dictionary(kind) or pa.types.is_boolean(kind)
                few = few or _has_few_values(self.columns[column])
                self._bitmaps[column] = Bitmaps(self.grouping(column)) if few else None
            return self._bitmaps[column]

    def count(self, column: str, selected: np.ndarray) -> np.ndarray:
        """int64 [groups]: how many of the selected rows, bool [total], each group has."""
        grouping = self.grouping(column)
        if selected is self.everything:
            return grouping.counts
        counts = np.bincount(grouping.codes[selected], minlength=len(grouping.values))
        return counts.astype(np.int64)

    def groups_of_runs(self, column: str) -> np.ndarray:
        """The group of each run's rows, int32 [runs]; -1 where a run has rows of several."""
        grouping = self.grouping(column)
        with self._lock:
            if column not in self._groups_of_runs:
                self._groups_of_runs[column] = self.groups_of_runs_by(grouping)
            return self._groups_of_runs[column]

    def groups_of_runs_by(self, grouping: Grouping) -> np.ndarray:
        """Likewise of any grouping of the rows."""
        low = np.minimum.reduceat(grouping.codes, self.run_starts)
        high = np.maximum.reduceat(grouping.codes, self.run_starts)
        return np.where(low == high, low, np.int32(-1))


def _has_few_values(column: pa.Array) -> bool:
    """Whether a numeric column has few enough values for bitmaps; a look at some of it often
    tells."""
    return all(
        pc.count_distinct(part, mode="all").as_py() <= MOST_VALUES
        for part in (column[: 1 << 12], column)
    )


def _joined(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece, which text of more than 2 GiB is only with wider offsets."""
    if not pa.types.is_dictionary(column.type):
        return column.combine_chunks()
    text = sum(chunk.dictionary.nbytes for chunk in column.chunks)
    if text > MOST_TEXT:
        column = column.cast(pa.dictionary(column.type.index_type, pa.large_string()))
    return column.unify_dictionaries().combine_chunks()


def _check_columns(table: pa.Table) -> None:
    """Raise ArrowInvalid where the columns are not a sidecar's."""
    kinds = {field.name: field.type for field in table.schema}
    if len(kinds) < len(table.schema):
        raise pa.ArrowInvalid("two columns have one name")
    for name in ("row", *ROW_COLUMNS):
        if kinds.get(name) != pa.int64():
            raise pa.ArrowInvalid(f"column {name!r} is {kinds.get(name)}; int64 belongs there")
    allowed = {*TYPES.values(), pa.large_string()}
    for name, kind in kinds.items():
        if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in allowed:
            raise pa.ArrowInvalid(f"column {name!r} is {kind}, which no metadata is")
    for name in ("row", "step", "slot"):
        if table[name].null_count:
            raise pa.ArrowInvalid(f"column {name!r} has nulls")
