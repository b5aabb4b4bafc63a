"""A segment's .bin file while it is written: where each record lies, and how it gets there.

By direct I/O, from the records' own memory; packed ones are gathered first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualform.store.direct import create_direct, write_at
from dualform.store.encoding import FLOAT32
from dualform.store.files import digest
from dualform.store.patches import Patches
from dualform.store.recording_packer import Column, Packer
from dualform.store.segment_table import Span


class Record(NamedTuple):
    """Keys or values on their way to disk.

    Attributes:
        memory: Page-aligned bytes, padded with zeros to a multiple of `ALIGNMENT`.
        nbytes: Bytes that count.
        xxh3: Their digest, where it is known already.
        encoding: Name of the encoding of the numbers (`dualform.store.encoding`): "float32", or
            "bfloat16" or "float16" where training had such numbers. Every pass may have its own.
        rows: How many rows there are, where they may be those of earlier records; 0 where not.
        patches: How keys are cut from them, where they are inputs.
    """

    memory: memoryview
    nbytes: int
    xxh3: str | None = None
    encoding: str = FLOAT32.name
    rows: int = 0
    patches: Patches | None = None


Written = dict[tuple[int, str, str], tuple[memoryview, Span]]
"""Records that others may be the same as: by their bytes, digest and encoding."""


class BinFile:
    """Takes a segment's records, one after the other.

    Args:
        path: Made with the first bytes that are written, or by `finish`.
        packer: What packs records; None where they stay as they are. Its segment begins.
        segment: Its number.

    Attributes:
        written: Bytes that are on disk.
    """

    def __init__(self, path: Path, packer: Packer | None = None, segment: int = 0) -> None:
        self._path = path
        self._packer = packer
        self._fd: int | None = None
        self._pending: list[memoryview] = []
        self._placed = 0  # bytes of these and of what is on disk
        self.written = 0
        if packer is not None:
            packer.begin_segment(segment)

    @property
    def size(self) -> int:
        """Bytes so far, those not yet written included."""
        return self._placed + (0 if self._packer is None else self._packer.waiting)

    def place(self, column: Column, record: Record) -> Span:
        """Where a record is going to lie; its memory is used until the next `flush`."""
        memory = record.memory[: record.nbytes]
        xxh3 = record.xxh3 or digest(memory)
        if self._packer is not None and record.nbytes:
            place = self.size
            found = self._packer.put(column, memory, record.encoding, record.rows, place)
            if found is not None:
                return Span(place, record.nbytes, xxh3, record.encoding, *found, record.patches)
        self._gather()
        span = Span(self._placed, record.nbytes, xxh3, record.encoding, patches=record.patches)
        if record.nbytes:
            self._append(record.memory)
        return span

    def place_once(self, column: Column, record: Record, written: Written) -> Span:
        """Place a record, or name the one that has its bytes already."""
        if not record.nbytes:
            return self.place(column, record)
        key = record.nbytes, record.xxh3 or digest(record.memory[: record.nbytes]), record.encoding
        if key in written:
            memory, span = written[key]
            if _same(memory, record.memory):  # a digest is no proof
                return span._replace(patches=record.patches)
        span = self.place(column, record)
        written[key] = record.memory, span
        return span

    def flush(self) -> None:
        """Hand what was placed to the disk. The records' memory is free after."""
        self._gather()
        if not self._pending:
            return
        write_at(self._opened(), self._pending, self.written)
        self.written = self._placed
        self._pending = []
        if self._packer is not None:
            self._packer.taken()

    def finish(self) -> int:
        """Make all of it survive a crash, and let go of the file. Returns its size."""
        self.flush()
        fd = self._opened()
        os.fsync(fd)
        os.close(fd)
        self._fd = None
        return self._placed

    def abandon(self) -> None:
        """Let go of file and memory after a failed write."""
        self._pending = []
        if self._packer is not None:
            self._packer.taken()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _opened(self) -> int:
        if self._fd is None:
            self._fd = create_direct(self._path)
        return self._fd

    def _gather(self) -> None:
        """What the packer has is written next."""
        if self._packer is not None and self._packer.waiting:
            self._append(self._packer.take())

    def _append(self, memory: memoryview) -> None:
        self._pending.append(memory)
        self._placed += len(memory)


def _same(one: memoryview, other: memoryview) -> bool:
    """Whether two records have the same bytes, the padding to whole pages included."""
    a, b = (np.frombuffer(memory, np.uint64) for memory in (one, other))
    return np.array_equal(a, b)
