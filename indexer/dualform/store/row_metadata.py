"""The metadata of rows, block by block: what the recorder writes into `rows.parquet`.

A block is the metadata of one forward pass. Layers that ran in the same passes refer to the same
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

TYPES: Mapping[str, pa.DataType] = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}
"""The types that a metadata column can have, by the names that the files use."""


@dataclass(frozen=True)
class Block:
    """The metadata of one forward pass.

    Attributes:
        step: The optimizer step that used the rows.
        leading: Shape of the layer's input without its last axis: (), (batch,), (batch, time), ...
        columns: The annotation, by name. Each array has one entry for all rows, one per leading
            index, or one per row.
    """

    step: int
    leading: tuple[int, ...]
    columns: Mapping[str, pa.Array]

    @property
    def rows(self) -> int:
        """How many rows the pass has."""
        return math.prod(self.leading)


def row_schema(columns: Mapping[str, str]) -> pa.Schema:
    """Schema of row metadata with these user columns (type names by column name)."""
    own = [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("slot", pa.int64(), nullable=False),
        pa.field("position", pa.int64()),
    ]
    return pa.schema([*own, *(pa.field(name, TYPES[kind]) for name, kind in columns.items())])


def blocks_table(blocks: Sequence[Block], columns: Mapping[str, str]) -> pa.Table:
    """The blocks' rows, one after the other.

    Args:
        blocks: In order.
        columns: Type names of the user columns; null where a block has none of that name.

    Returns:
        A table with the schema `row_schema(columns)`.
    """
    schema = row_schema(columns)
    steps = np.array([block.step for block in blocks], np.int64)
    counts = np.array([block.rows for block in blocks], np.int64)
    arrays: list[pa.Array | pa.ChunkedArray] = [
        pa.array(np.repeat(steps, counts)),
        pa.chunked_array([_slots(block.leading) for block in blocks], pa.int64()),
        pa.chunked_array([_positions(block.leading) for block in blocks], pa.int64()),
    ]
    for field in list(schema)[3:]:
        chunks = [_expand(block.columns.get(field.name), block, field.type) for block in blocks]
        arrays.append(pa.chunked_array(chunks, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _slots(leading: tuple[int, ...]) -> pa.Array:
    if not leading:
        return pa.array([0], pa.int64())
    return pa.array(np.repeat(np.arange(leading[0]), math.prod(leading[1:])))


def _positions(leading: tuple[int, ...]) -> pa.Array:
    if len(leading) < 2:
        return pa.nulls(math.prod(leading), pa.int64())
    return pa.array(np.tile(np.arange(math.prod(leading[1:])), leading[0]))


def _expand(array: pa.Array | None, block: Block, kind: pa.DataType) -> pa.Array:
    if array is None:
        return pa.nulls(block.rows, kind)
    if len(array) == block.rows:
        return array
    if len(array) == 1:
        return pa.repeat(array[0], block.rows)
    return array.take(pa.array(np.repeat(np.arange(len(array)), block.rows // len(array))))
