"""Reading the records of a recording's segments: whole, unpacked, and checked by their digests."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dualform.store.encoding import encoding
from dualform.store.errors import DamagedError
from dualform.store.files import digest, reading
from dualform.store.packing import MOST_BYTES, PLAIN, PLANES, unpack
from dualform.store.recording_again import AGAIN, Again
from dualform.store.recording_again import MOST_BYTES as MOST_KEPT
from dualform.store.recording_format import RERECORD
from dualform.store.recording_masks import MASKED, with_mask
from dualform.store.segment_table import SegmentTable, Span

_Place = tuple[int, int]
"""A segment, and where a record of keys starts in its .bin file."""


class RecordReader:
    """Reads records, in any order; the file of the last one's segment stays open.

    Args:
        directory: Of the segments.
        segments: Their tables.
    """

    def __init__(self, directory: Path, segments: Sequence[SegmentTable]) -> None:
        self._directory = directory
        self._open: tuple[int, int] | None = None  # segment, descriptor
        self._segments = segments
        self._places: dict[_Place, tuple[Span, int]] | None = None
        self._kept: OrderedDict[_Place, np.ndarray] = OrderedDict()
        self._kept_bytes = 0

    def read(self, segment: int, span: Span, rows: int, out: memoryview) -> None:
        """Read a record.

        Args:
            segment: Number of its segment.
            span: The record.
            rows: How many it has; of inputs, how many inputs (`Span.inputs`).
            out: Filled with its numbers, `span.nbytes` bytes.

        Raises:
            DamagedError: It, or an earlier one that its rows lie in, is not what was written.
        """
        if span.packing == PLAIN:
            whole = self._fill(segment, span.offset, out)
        elif span.packing == AGAIN:
            whole = self._read_again(segment, span, rows, out)
        else:
            data = self._bytes(segment, span)
            whole = self._unpack(segment, span, data, span.packing, out)
        if not whole or digest(out) != span.xxh3:
            raise self._damaged(segment, span, "is not the one that was written")

    def addresses(self, segment: int, span: Span, rows: int) -> np.ndarray:
        """Where the rows of a record of keys lie that come again, `ADDRESS` [rows].

        Raises:
            DamagedError: It can't be read.
        """
        return self._again(segment, span, rows).addresses

    def path(self, segment: int) -> Path:
        """A segment's .bin file."""
        return self._directory / self._segments[segment].bin

    def close(self) -> None:
        """Let go of the open file and of rows; reading goes on with them again."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None
        self._kept.clear()
        self._kept_bytes = 0

    def __del__(self) -> None:
        if self._open is not None:
            os.close(self._open[1])

    def _read_again(self, segment: int, span: Span, rows: int, out: memoryview) -> bool:
        """Gather rows from the records that they lie in."""
        again = self._again(segment, span, rows)
        table = np.frombuffer(out, np.uint8).reshape(rows, -1)
        addresses = again.addresses
        order = np.lexsort((addresses["offset"], addresses["segment"]))
        ordered = addresses[order]
        starts = np.flatnonzero(np.diff(ordered["offset"]) | np.diff(ordered["segment"])) + 1
        for here in np.split(order, starts):
            place = int(addresses["segment"][here[0]]), int(addresses["offset"][here[0]])
            found = self._rows(segment, span, table.shape[1], place)
            wanted = addresses["row"][here]
            if wanted.max() >= len(found):
                what = f"names row {wanted.max():,} of {len(found):,} at byte {place[1]:,}"
                raise self._damaged(segment, span, f"{what} of segment {place[0]:,}")
            table[here] = found[wanted]
        return True

    def _rows(self, segment: int, asking: Span, row_bytes: int, place: _Place) -> np.ndarray:
        """The rows that a record holds itself, as bytes [rows, row_bytes]."""
        if place in self._kept:
            self._kept.move_to_end(place)
            return self._kept[place]
        if self._places is None:
            self._places = {
                (table.number, record.keys.offset): (
                    record.keys,
                    record.keys.inputs(record.rows),
                )
                for table in self._segments
                for _, record in table.passes
                if record.keys.nbytes
            }
        span, rows = self._places.get(place, (None, 0))
        later = place > (segment, asking.offset)
        if span is None or later or span.encoding != asking.encoding or span.nbytes > MOST_BYTES:
            what = f"names rows at byte {place[1]:,} of segment {place[0]:,}, where there are none"
            raise self._damaged(segment, asking, what)
        found = self._held(place[0], span, rows)
        if found.shape[1] != row_bytes:
            what = f"names rows of {found.shape[1]:,} bytes where it has {row_bytes:,}"
            raise self._damaged(segment, asking, what)
        self._kept[place] = found
        self._kept_bytes += found.nbytes
        while self._kept_bytes > MOST_KEPT and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._kept_bytes -= gone.nbytes
        return found

    def _held(self, segment: int, span: Span, rows: int) -> np.ndarray:
        """The same of one record, read."""
        if span.packing != AGAIN:
            whole = np.empty(span.nbytes, np.uint8)
            self.read(segment, span, rows, whole.data)
            return whole.reshape(rows, -1)
        again = self._again(segment, span, rows)
        new = np.empty(again.new * (span.nbytes // rows), np.uint8)
        if not self._unpack(segment, span, again.data, again.packing, new.data) or (
            digest(new) != again.xxh3
        ):
            raise self._damaged(segment, span, "has other new rows than were written")
        return new.reshape(again.new, span.nbytes // rows)

    def _again(self, segment: int, span: Span, rows: int) -> Again:
        try:
            return Again.read(self._bytes(segment, span), rows)
        except ValueError as error:
            raise self._damaged(segment, span, f"can't be unpacked ({error})") from None

    def _unpack(
        self,
        segment: int,
        span: Span,
        data: bytes | bytearray | memoryview,
        packing: str,
        out: memoryview,
    ) -> bool:
        """Fill `out` with packed numbers; False where they are plain, and of another size."""
        if packing == PLAIN:
            if len(data) != len(out):
                return False
            out[:] = data
            return True
        numbers = np.frombuffer(out, encoding(span.encoding).stored)

        def read(place: int, size: int) -> bytearray:
            found = bytearray(size)
            if not self._fill(segment, place, memoryview(found)):
                raise ValueError(f"its bitmap at byte {place:,} is behind the end")
            return found

        try:
            if packing == MASKED:
                data = with_mask(bytes(data), numbers.itemsize, len(numbers), read)
                packing = PLANES
            unpack(data, packing, numbers)
        except ValueError as error:
            raise self._damaged(segment, span, f"can't be unpacked ({error})") from None
        return True

    def _bytes(self, segment: int, span: Span) -> bytearray:
        """A record as it lies in the file."""
        data = bytearray(span.packed)
        if not self._fill(segment, span.offset, memoryview(data)):
            raise self._damaged(segment, span, "is not the one that was written")
        return data

    def _fill(self, segment: int, offset: int, out: memoryview) -> bool:
        """Read bytes of a segment; False where the file ends before."""
        with reading(self.path(segment)):
            if self._open is None or self._open[0] != segment:
                if self._open is not None:
                    os.close(self._open[1])
                    self._open = None
                self._open = segment, os.open(self.path(segment), os.O_RDONLY)
            done = 0
            while done < len(out):
                count = os.preadv(self._open[1], [out[done:]], offset + done)
                if count == 0:
                    return False
                done += count
            return True

    def _damaged(self, segment: int, span: Span, what: str) -> DamagedError:
        return DamagedError(
            self.path(segment), f"the record at byte {span.offset:,} {what}", RERECORD
        )
