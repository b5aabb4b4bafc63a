"""Reading the records of a recording's segments: whole, unpacked, and checked by their digests."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dualform.store.encoding import encoding
from dualform.store.errors import DamagedError
from dualform.store.files import digest
from dualform.store.packing import PLAIN, unpack
from dualform.store.recording_format import RERECORD
from dualform.store.segment_table import Span, segment_name


class RecordReader:
    """Reads records, in any order; the file of the last one's segment stays open.

    Args:
        directory: Of the segments.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: tuple[int, int] | None = None  # segment, descriptor

    def read(self, segment: int, span: Span, out: memoryview) -> None:
        """Read a record.

        Args:
            segment: Number of its segment.
            span: The record.
            out: Filled with its numbers, `span.nbytes` bytes.

        Raises:
            DamagedError: It is not what was written.
        """
        if span.packing == PLAIN:
            whole = self._fill(segment, span.offset, out)
        else:
            data = bytearray(span.packed)
            whole = self._fill(segment, span.offset, memoryview(data))
            stored = encoding(span.encoding).stored
            try:
                if whole:
                    unpack(data, span.packing, np.frombuffer(out, stored))
            except ValueError as error:
                raise self._damaged(segment, span, f"can't be unpacked ({error})") from None
        if not whole or digest(out) != span.xxh3:
            raise self._damaged(segment, span, "is not the one that was written")

    def close(self) -> None:
        """Let go of the open file; reading opens it again."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def __del__(self) -> None:
        self.close()

    def _fill(self, segment: int, offset: int, out: memoryview) -> bool:
        """Read bytes of a segment; False where the file ends before."""
        if self._open is None or self._open[0] != segment:
            self.close()
            path = self._directory / segment_name(segment, "bin")
            self._open = segment, os.open(path, os.O_RDONLY)
        done = 0
        while done < len(out):
            count = os.preadv(self._open[1], [out[done:]], offset + done)
            if count == 0:
                return False
            done += count
        return True

    def _damaged(self, segment: int, span: Span, what: str) -> DamagedError:
        path = self._directory / segment_name(segment, "bin")
        return DamagedError(path, f"the record at byte {span.offset:,} {what}", RERECORD)
