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
from dualform.store.files import digest
from dualform.store.packing import MOST_BYTES, PLAIN, PLANES, Way, measured, packed
from dualform.store.recording_again import AGAIN, Again, EarlierRows
from dualform.store.recording_masks import MASKED, RecentMasks
from dualform.store.segment_table import padded

_FEW_BYTES = 16 << 10
"""Records of fewer are not packed, which would save little for the time it takes."""

_SIDE_BY_SIDE = 1 << 20
"""Records of fewer bytes that are not packed are copied, and share pages with packed ones."""

_ROOM = 16 << 20
"""So much memory is had at least for what is gathered; what is not used is never touched."""

Column = tuple[str, bool]
"""A layer's name, and whether values are meant."""


class Packer:
    """Packs a segment's records, and gathers them until they are written.

    Attributes:
        waiting: Bytes that were gathered since the last `take`.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[Column, str], Way] = {}
        self._earlier = EarlierRows()
        self._masks = RecentMasks()
        self._segment = 0
        self._parts: list[Any] = []
        self._memory, self._lent = memoryview(b""), False
        self.waiting = 0

    def begin_segment(self, number: int) -> None:
        """Measure all columns anew."""
        self._segment = number
        self._ways.clear()
        self._masks.clear()
        self._earlier.begin_segment()

    def put(
        self, column: Column, memory: memoryview, name: str, rows: int, place: int
    ) -> tuple[str, int] | None:
        """Take a record over, or leave it to be written as it is from its own memory.

        Args:
            column: Which it is of.
            memory: Its numbers.
            name: Of their encoding.
            rows: How many there are, where they may come again; 0 where not.
            place: Where the record lies, if it is taken.

        Returns:
            Its packing, and the bytes that it takes; None where it was left.
        """
        numbers = np.frombuffer(memory, encoding(name).stored)
        remembered = rows > 0 and self._looks_at(column, numbers, name, rows)
        found = self._put_again(column, numbers, name, rows, place) if remembered else None
        if found is None:
            packing, data = self._packed(column, numbers, name)
            if packing == PLAIN and len(memory) >= _SIDE_BY_SIDE and not remembered:
                return None
            found = packing, bytes(data)
            if packing == PLANES:
                shorter = self._masks.shorten(found[1], numbers.itemsize, place)
                found = found if shorter is None else (MASKED, shorter)
        self._parts.append(found[1])
        self.waiting += len(found[1])
        return found[0], len(found[1])

    def take(self) -> memoryview:
        """What was gathered, page-aligned and padded with zeros to whole pages; to be used until
        `taken`."""
        size = padded(self.waiting)
        memory = self._memory
        if self._lent or len(memory) < size:
            memory = memoryview(mmap.mmap(-1, max(size, _ROOM)))
        if not self._lent:
            self._memory, self._lent = memory, True
        place = 0
        for part in self._parts:
            memory[place : place + len(part)] = part
            place += len(part)
        memory[place:size] = bytes(size - place)
        self._parts, self.waiting = [], 0
        return memory[:size]

    def taken(self) -> None:
        """What `take` gave is on disk; its memory is used again, as new pages are dear."""
        self._lent = False

    def _packed(
        self, column: Column, numbers: np.ndarray, name: str
    ) -> tuple[str, bytes | memoryview]:
        """Numbers, packed as is best for their column, or as they are."""
        plain = numbers.view(np.uint8).data
        if numbers.nbytes < _FEW_BYTES:
            return PLAIN, plain
        if (column, name) not in self._ways:
            self._ways[column, name] = measured(numbers)
        way = self._ways[column, name]
        data = packed(numbers, way)
        return (PLAIN, plain) if data is None else (way.packing, data)

    def _looks_at(self, column: Column, numbers: np.ndarray, name: str, rows: int) -> bool:
        size = numbers.nbytes // rows
        return numbers.nbytes <= MOST_BYTES and self._earlier.looks_at(column[0], name, size)

    def _put_again(
        self, column: Column, numbers: np.ndarray, name: str, rows: int, place: int
    ) -> tuple[str, bytes] | None:
        """The record as addresses and new rows; None where hardly any row was there before."""
        table = numbers.view(np.uint8).reshape(rows, -1)
        found = self._earlier.find(column[0], name, table, (self._segment, place))
        if found is None:
            return None
        addresses, new = found
        fresh = table[new].reshape(-1).view(numbers.dtype)
        packing, data = self._packed(column, fresh, name) if len(new) else (PLAIN, b"")
        again = Again(addresses, len(new), packing, digest(fresh), memoryview(data))
        return AGAIN, again.to_bytes()
