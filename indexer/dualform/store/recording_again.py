"""Keys that come again: rows of a record that lie in an earlier one already.

Examples that are seen every epoch have the same key each time, where no trained weight has a part
in it. Such a record has an address for each of its rows, and holds those alone that are new
(docs/format-recording.md, *Keys that come again*).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from dualform.store.packing import PACKINGS, compressed, expanded

AGAIN = "again"

MOST_BYTES = 256 << 20
"""Of rows that later ones may refer to: writer and reader keep as many in memory at most."""

_ROW_MEMORY = 256
"""What a row in memory takes beside its bytes, about."""

LEAST_ROW_BYTES = 256
"""Shorter rows are not looked for: an address takes up to 16 bytes."""

ADDRESS = np.dtype([("segment", "<u4"), ("row", "<u4"), ("offset", "<u8")])
"""Where a row lies: in which segment, at which byte of its .bin file the record starts, and the how
manieth of that record's rows, of its new ones alone where it has addresses itself."""

_NAMES = tuple(ADDRESS.names or ())

_PART = 1 / 8
"""Where fewer of a record's rows were there before, all are written."""

_PAYS = 1 / 16
"""Once there is no more room, a layer of whose rows fewer come again is given up."""

_HEADER = np.dtype([("new", "<u8"), ("packing", "<u8"), ("xxh3", "<u8"), ("addresses", "<u8")])


class Again(NamedTuple):
    """What a record says whose rows come again.

    Attributes:
        addresses: `ADDRESS` [rows].
        new: How many of the rows are new.
        packing: Of these (`dualform.store.packing`).
        xxh3: The digest of their numbers.
        data: They, as they are packed.
    """

    addresses: np.ndarray
    new: int
    packing: str
    xxh3: str
    data: memoryview

    def to_bytes(self) -> bytes:
        """As they lie in the file."""
        raw = self.addresses.tobytes()
        columns = b"".join(np.ascontiguousarray(self.addresses[n]).tobytes() for n in _NAMES)
        frame = compressed(np.frombuffer(columns, np.uint8))
        part = frame if len(frame) < len(raw) else columns
        which = PACKINGS.index(self.packing)
        header = np.array([(self.new, which, int(self.xxh3, 16), len(part))], _HEADER)
        return b"".join((header.tobytes(), part, self.data))

    @classmethod
    def read(cls, data: bytes | bytearray, rows: int) -> Again:
        """What `to_bytes` gave of so many rows.

        Raises:
            ValueError: It is something else.
        """
        start = _HEADER.itemsize
        if len(data) < start:
            raise ValueError(f"{len(data):,} bytes hold no header")
        new, packing, xxh3, size = np.frombuffer(data, _HEADER, 1)[0].tolist()
        whole = rows * ADDRESS.itemsize
        if new > rows or packing >= len(PACKINGS) or size > min(whole, len(data) - start):
            raise ValueError(f"{new:,} new rows of {rows:,}, {size:,} bytes of addresses")
        part = memoryview(data)[start : start + size]
        columns = memoryview(part if size == whole else expanded(part, whole))
        addresses, place = np.empty(rows, ADDRESS), 0
        for name in _NAMES:
            kind = ADDRESS[name]
            addresses[name] = np.frombuffer(columns, kind, rows, place)
            place += rows * kind.itemsize
        left = memoryview(data)[start + size :]
        return cls(addresses, new, PACKINGS[packing], f"{xxh3:016x}", left)


class _Known(NamedTuple):
    """A row that was written."""

    record: int
    row: int
    data: bytes


@dataclass
class _Column:
    """What is known of a layer's keys in one encoding."""

    known: dict[bytes, _Known] = field(default_factory=dict)  # by digest
    room: int = 0  # bytes that these take
    rows: int = 0  # of this segment
    again: int = 0
    full: bool = False
    given_up: bool = False


class EarlierRows:
    """Remembers rows that were written: found by their digest, and compared byte by byte.

    Args:
        most: So many bytes of memory are taken for them, of all layers together.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._left = most
        self._columns: dict[tuple[str, str], _Column] = {}
        self._records: list[tuple[int, int]] = []  # segment, offset

    def begin_segment(self) -> None:
        """Let go of layers that found no room, and hardly any row again, in the last segment."""
        for column in self._columns.values():
            if column.full and column.again < _PAYS * column.rows:
                self._left += column.room
                column.known.clear()
                column.room, column.given_up = 0, True
            column.rows = column.again = 0

    def looks_at(self, layer: str, encoding: str, row_bytes: int) -> bool:
        """Whether rows of a layer's keys may come again, as far as is known."""
        return row_bytes >= LEAST_ROW_BYTES and not self._column(layer, encoding).given_up

    def find(
        self, layer: str, encoding: str, rows: np.ndarray, place: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Which rows of a record are there already; the others are remembered.

        Args:
            layer: Whose keys they are.
            encoding: Its name.
            rows: uint8 [rows, row_bytes], contiguous.
            place: Segment and offset of the record.

        Returns:
            Addresses of all rows, and the numbers of those that are new; None where hardly any was
            there, and the record is to be written whole.
        """
        column = self._column(layer, encoding)
        data, size = rows.tobytes(), rows.shape[1]
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        digests = [xxhash.xxh3_128_digest(part) for part in parts]
        found = [_row_of(column.known, *pair) for pair in zip(digests, parts, strict=True)]
        again = sum(known is not None for known in found)
        column.rows += len(parts)
        column.again += again
        whole = again < max(1, _PART * len(parts))
        new: list[int] = []
        record = len(self._records)
        self._records.append(place)
        for number, known in enumerate(found):
            if known is None:
                row = number if whole else len(new)
                found[number] = written = _Known(record, row, parts[number])
                new.append(number)
                self._remember(column, digests[number], written)
        if whole:
            return None
        addresses = np.empty(len(parts), ADDRESS)
        for number, known in enumerate(found):
            assert known is not None
            segment, offset = self._records[known.record]
            addresses[number] = segment, known.row, offset
        return addresses, np.array(new, np.intp)

    def _remember(self, column: _Column, key: bytes, row: _Known) -> None:
        size = len(row.data) + _ROW_MEMORY
        if size > self._left:
            column.full = True
        elif key not in column.known:  # rows of one record may be equal, or their digests alone
            column.known[key] = row
            column.room += size
            self._left -= size

    def _column(self, layer: str, encoding: str) -> _Column:
        return self._columns.setdefault((layer, encoding), _Column())


def _row_of(known: dict[bytes, _Known], key: bytes, data: bytes) -> _Known | None:
    found = known.get(key)
    return found if found is not None and found.data == data else None
