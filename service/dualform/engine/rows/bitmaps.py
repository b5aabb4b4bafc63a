"""Which rows have which value, for columns of few values and for text: what filters are made from.

A comparison is asked of the column's distinct values, and its answer for the rows put together from
bits that were made once: of 640,000 rows, 80 KB a value.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualform.store.grouping import Grouping

MOST_VALUES = 64
"""Columns of more values have no bitmaps: 8 bytes a row, at most."""

_UNKNOWN = 2


class Bitmaps:
    """The rows of a column, by value.

    Args:
        grouping: The column's values and each row's place in them.

    Attributes:
        values: The distinct values, null among them where a row has none.
    """

    def __init__(self, grouping: Grouping) -> None:
        self.values = grouping.values
        self._codes = grouping.codes

    def spread(self, answer: pa.BooleanArray) -> pa.BooleanArray:
        """The answers for the values, true, false or null, as answers for all rows."""
        found = pc.fill_null(pc.cast(answer, pa.int8()), _UNKNOWN).to_numpy().astype(np.uint8)
        unknown = bool((found == _UNKNOWN).any())
        data = self._rows(found, 1)
        valid = np.bitwise_not(self._rows(found, _UNKNOWN)) if unknown else None
        buffers = [None if valid is None else pa.py_buffer(valid), pa.py_buffer(data)]
        return pa.BooleanArray.from_buffers(pa.bool_(), len(self._codes), buffers)

    def _rows(self, found: np.ndarray, wanted: int) -> np.ndarray:
        """Packed bits: the rows whose value was found to be what is wanted."""
        if len(found) > MOST_VALUES:
            return np.packbits(found[self._codes] == wanted, bitorder="little")
        chosen = np.flatnonzero(found == wanted)
        if len(chosen) > len(found) // 2:
            others: np.ndarray = np.bitwise_or.reduce(self._bits[found != wanted], axis=0)
            return np.asarray(np.bitwise_not(others))
        packed: np.ndarray = np.bitwise_or.reduce(self._bits[chosen], axis=0)
        return packed

    @cached_property
    def _bits(self) -> np.ndarray:
        """uint8 [values, bytes]: one bit a row."""
        rows = [
            np.packbits(self._codes == code, bitorder="little") for code in range(len(self.values))
        ]
        return np.stack(rows) if rows else np.zeros((0, -(-len(self._codes) // 8)), np.uint8)


def unpacked(mask: pa.BooleanArray) -> np.ndarray:
    """Which rows are true, bool [rows]; null is not."""
    if mask.offset:
        mask = pa.concat_arrays([mask])
    valid, data = mask.buffers()
    size = -(-len(mask) // 8)
    bits = np.frombuffer(data, np.uint8, size)
    if valid is not None and mask.null_count:
        bits = bits & np.frombuffer(valid, np.uint8, size)
    return np.unpackbits(bits, count=len(mask), bitorder="little").view(bool)
