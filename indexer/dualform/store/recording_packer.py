"""What a packed recording's writer does with records: packs them, and lays them side by side.

Each column, the keys or the values of a layer, goes the way that was the shortest for its first
record of the segment. Packed records are short and of any length, so they are not padded to whole
pages one by one, but together.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from dualform.store.encoding import encoding
from dualform.store.packing import AS_IT_IS, Way, measured, packed
from dualform.store.segment_table import padded

_FEW_BYTES = 16 << 10
"""Records of fewer are not packed, which would save little for the time it takes."""

_SIDE_BY_SIDE = 1 << 20
"""Records of fewer bytes that are not packed are copied, and share pages with packed ones."""

Column = tuple[str, bool]
"""A layer's name, and whether values are meant."""


class Packer:
    """Packs a segment's records, and gathers them until they are written.

    Attributes:
        waiting: Bytes that were gathered since the last `take`.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[Column, str], Way] = {}
        self._parts: list[Any] = []
        self.waiting = 0

    def begin_segment(self) -> None:
        """Measure all columns anew."""
        self._ways.clear()

    def put(self, column: Column, memory: memoryview, name: str) -> tuple[str, int] | None:
        """Take a record over, or leave it to be written as it is from its own memory.

        Args:
            column: Which it is of.
            memory: Its numbers.
            name: Of their encoding.

        Returns:
            Its packing, and the bytes that it takes from `waiting` on; None where it was left.
        """
        way, data = AS_IT_IS, None
        if len(memory) >= _FEW_BYTES:
            numbers = np.frombuffer(memory, encoding(name).stored)
            if (column, name) not in self._ways:
                self._ways[column, name] = measured(numbers)
            way = self._ways[column, name]
            data = packed(numbers, way)
        if data is None:
            if len(memory) >= _SIDE_BY_SIDE:
                return None
            way, data = AS_IT_IS, bytes(memory)
        self._parts.append(data)
        self.waiting += len(data)
        return way.packing, len(data)

    def take(self) -> memoryview:
        """What was gathered, page-aligned and padded with zeros to whole pages."""
        found = memoryview(mmap.mmap(-1, padded(self.waiting)))
        place = 0
        for part in self._parts:
            found[place : place + len(part)] = part
            place += len(part)
        self._parts, self.waiting = [], 0
        return found
