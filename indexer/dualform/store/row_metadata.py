"""The metadata of rows, block by block: what the recorder writes into `rows.parquet`.

A block is the metadata of one forward pass. Layers that ran in the same passes refer to the same
blocks.
"""

from __future__ import annotations

import functools
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


ROW_COLUMNS = ("step", "slot", "position")
"""Metadata columns that the recorder fills by itself, all int64."""


@dataclass(frozen=True)
class Block:
    """The metadata of one forward pass.

    Attributes:
        step: The optimizer step that used the rows.
        leading: Shape of the layer's input without its last axis: (), (batch,), (batch, time), ...
        columns: The annotation, by name: flat int64, float64, bool, or object (str) arrays with
            one entry for all rows, one per leading index, or one per row. Masked, or None among
            the objects, where there is none.
        kept: int64, ascending: which of the pass's rows are recorded, the columns' entries being
            one for all, or one for each of these; None for all of them.
    """

    step: int
    leading: tuple[int, ...]
    columns: Mapping[str, np.ndarray]
    kept: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """How many rows are recorded."""
        return math.prod(self.leading) if self.kept is None else len(self.kept)


def column_types(blocks: Sequence[Block]) -> dict[str, str]:
    """The types of all columns that the blocks have, by name, in order of appearance."""
    types: dict[str, str] = {}
    for block in blocks:
        for name, values in block.columns.items():
            if name not in types:
                types[name] = "string" if values.dtype == object else str(values.dtype)
    return types


def row_schema(columns: Mapping[str, str]) -> pa.Schema:
    """Schema of row metadata with these user columns (type names by column name)."""
    fields = [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("slot", pa.int64(), nullable=False),
        pa.field("position", pa.int64()),
    ]
    return pa.schema([*fields, *(pa.field(name, TYPES[kind]) for name, kind in columns.items())])


def blocks_table(blocks: Sequence[Block], columns: Mapping[str, str]) -> pa.Table:
    """The blocks' rows, one after the other.

    Args:
        blocks: In order.
        columns: Type names of the user columns; null where a block has none of that name.

    Returns:
        A table with the schema `row_schema(columns)`.
    """
    counts = np.array([block.rows for block in blocks], np.int64)
    steps = np.repeat(np.array([block.step for block in blocks], np.int64), counts)
    places = [_places_of(block) for block in blocks]
    flat = np.array([len(block.leading) < 2 for block in blocks], np.bool_)
    arrays = [
        pa.array(steps),
        pa.array(_joined([slots for slots, _ in places], np.int64)),
        pa.array(
            _joined([positions for _, positions in places], np.int64), mask=np.repeat(flat, counts)
        ),
    ]
    for name, kind in columns.items():
        arrays.append(_column([block.columns.get(name) for block in blocks], counts, kind))
    return pa.Table.from_arrays(arrays, schema=row_schema(columns))


def _column(parts: Sequence[np.ndarray | None], counts: np.ndarray, kind: str) -> pa.Array:
    dtype = object if kind == "string" else np.dtype(kind)
    filler = np.zeros(1, dtype)
    spread = []
    masks = []
    for part, count in zip(parts, counts.tolist(), strict=True):
        given = filler if part is None else part
        each = count // len(given) if len(given) else 1
        spread.append(given if len(given) == count else np.repeat(given, each))
        if part is None:
            masks.append(np.ones(count, np.bool_))
        elif isinstance(part, np.ma.MaskedArray):
            spread[-1] = np.ma.getdata(spread[-1])
            masks.append(np.repeat(np.ma.getmaskarray(part), each))
        else:
            masks.append(np.zeros(count, np.bool_))
    values = _joined(spread, dtype)
    mask = np.concatenate(masks) if masks and any(mask.any() for mask in masks) else None
    if kind == "string":  # as a list: from an object array, pyarrow would first import pandas
        if mask is not None:
            values[mask] = None
        return pa.array(values.tolist(), TYPES[kind])
    return pa.array(values, TYPES[kind], mask=mask)


def _joined(parts: Sequence[np.ndarray], dtype: object) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)  # type: ignore[call-overload]


def _places_of(block: Block) -> tuple[np.ndarray, np.ndarray]:
    slots, positions = _places(block.leading)
    return (slots, positions) if block.kept is None else (slots[block.kept], positions[block.kept])


@functools.lru_cache(maxsize=64)
def _places(leading: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Slot and position of every row; positions are zeros where there is but one axis."""
    rows = math.prod(leading)
    first = leading[0] if leading else 1
    inner = rows // first if first else 0
    slots, positions = np.divmod(np.arange(rows), max(1, inner))
    return slots, positions
