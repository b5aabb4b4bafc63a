"""The sidecar of a shard: its rows' metadata, sorted, and with it where each row lies.

Rows lie by task, then by label, so that a filter or a group by these meets runs of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dualform.index.parts import PartsPlan
from dualform.index.row_spaces import Space
from dualform.store.files import FileEntry, write_atomic
from dualform.store.grouping import group
from dualform.store.index import runs
from dualform.store.index_parts import SpaceShard, sidecar_file
from dualform.store.parquet import write_parquet
from dualform.store.recording import Recording


@dataclass(frozen=True)
class Order:
    """How the rows of a shard lie.

    Attributes:
        number: The shard's, in its row space.
        start: Its first row.
        stop: The row after its last.
        positions: int64 [rows], of each row in the order of the recording.
        run_starts: Where the runs of (task, label) start.
        parts: int32 [columns, rows], the stored parts that each row of the recording belongs to.
    """

    number: int
    start: int
    stop: int
    positions: np.ndarray
    run_starts: np.ndarray
    parts: np.ndarray

    @property
    def rows(self) -> int:
        return self.stop - self.start


def write_sidecar(
    directory: Path,
    source: Recording,
    plan: PartsPlan,
    number: int,
    space: Space,
    shard: int,
    start: int,
    stop: int,
) -> tuple[Order, SpaceShard]:
    """Write the sidecar of a shard.

    Args:
        directory: The index's.
        source: The recording.
        plan: Whose groups become `Order.parts`.
        number: The row space's.
        space: The row space.
        shard: The shard's number in it.
        start: The shard's first row.
        stop: The row after its last.

    Returns:
        How its rows lie, and what the manifest says of it.

    Raises:
        DamagedError: The recording's metadata is not what was written.
    """
    table = space.metadata(source, start, stop)
    codes = {
        name: group(table[name].combine_chunks()).codes
        for name in ("label", "task")
        if name in table.column_names
    }
    parts = plan.codes(number, table)
    order = np.lexsort(list(codes.values())) if codes else np.arange(len(table))
    task, label = (codes[name][order] if name in codes else None for name in ("task", "label"))
    row = pa.array(np.arange(start, stop)[order])
    table = table.take(pa.array(order)).combine_chunks().add_column(0, "row", row)
    name = sidecar_file(number, shard)
    entry = write_atomic(directory / name, write_parquet(table))
    positions = np.empty(stop - start, np.int64)
    positions[order] = np.arange(stop - start)
    lie = Order(shard, start, stop, positions, runs(task, label, stop - start), parts)
    return lie, SpaceShard(FileEntry(name, entry.bytes, entry.xxh3), start, stop - start)
