"""Shard files as they are filled and written: rows scattered into place, hashed, written directly.

A file is put together in one page-aligned buffer and written by a thread of its own, so that
hashing and writing (and packing, where that was asked for) overlap with filling the next file. The
buffer goes to another file once this one is written and nobody reads it any more.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from dualform.store.direct import create_direct, write_at
from dualform.store.encoding import Encoding
from dualform.store.files import FileEntry, digest
from dualform.store.packed_rows import Rows, pack_rows, packed_name

_ALIGNMENT = 4096
_WRITE = 16 << 20
_BUFFERS = 2


class ShardFile:
    """One file of rows, being filled.

    Args:
        header: What the file starts with.
        rows: Number of rows.
        d: Numbers per row.
        encoding: How they are stored.
        memory: Page-aligned buffer for the whole file.
        free: Takes the buffer once it was let go of twice: by the writer and by the reader.
    """

    def __init__(
        self,
        header: bytes,
        rows: int,
        d: int,
        encoding: Encoding,
        memory: mmap.mmap,
        free: queue.Queue[mmap.mmap],
    ) -> None:
        self._encoding = encoding
        self._d = d
        self._memory = memory
        self._free = free
        self._users = 2
        self._lock = threading.Lock()
        size = rows * encoding.row_bytes(d)
        self._shape = Rows.of(encoding, d, rows, header)
        self._bytes = len(header) + size
        memory[: len(header)] = header
        numbers = np.frombuffer(memory, np.uint8, size, offset=len(header))
        # One opaque item per row: scattering rows copies memory and nothing else.
        self._rows = numbers.view(np.dtype((np.void, encoding.row_bytes(d))))

    def put(self, positions: np.ndarray, rows: np.ndarray) -> None:
        """Copy rows, as they are stored and contiguous, to these positions."""
        self._rows[positions] = rows.reshape(-1).view(self._rows.dtype)

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Rows that were put, float32 [n, d]; until the reader lets go."""
        rows: np.ndarray = self._rows[positions].view(self._encoding.stored)
        return self._encoding.widen(rows.reshape(len(positions), -1), self._d)

    def let_go(self) -> None:
        """Called by the writer when the file is written, and once by who reads what was put."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._free.put(self._memory)

    def write(self, directory: Path, name: str, *, pack: bool) -> FileEntry:
        """Write and fsync the file, packed where that was asked for and pays.

        Returns:
            Its entry for the manifest; a packed file has another name.
        """
        view = memoryview(self._memory)[: self._bytes]
        blocks = pack_rows(view, self._shape) if pack else None
        if blocks is not None:
            return write_parts(directory, packed_name(name), blocks)
        _write_file(directory / name, self._memory, self._bytes)
        return FileEntry(name, self._bytes, digest(view))


class ShardWriter:
    """Hands out files to fill and writes them in the background, two in memory at most.

    Leaving it as a context manager waits for the last write.
    """

    def __init__(self, directory: Path, largest: int, *, pack: bool = False) -> None:
        """
        Args:
            directory: The index under construction.
            largest: Bytes of the largest file.
            pack: Whether files are packed.
        """
        self._directory = directory
        self._pack = pack
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dualform-shard-writer")
        self._free: queue.Queue[mmap.mmap] = queue.Queue()
        for _ in range(_BUFFERS):
            self._free.put(mmap.mmap(-1, _round_up(largest)))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=error is not None)

    def keys(
        self, name: str, rows: int, d: int, encoding: Encoding, fill: Callable[[ShardFile], None]
    ) -> tuple[ShardFile, Future[FileEntry]]:
        """Fill a keys file, then write it in the background.

        Returns:
            The file, to be read and then let go of, and the future of its entry.
        """
        return self._fill(name, encoding.keys_header(d, rows), rows, d, encoding, fill)

    def values(
        self, name: str, rows: int, d: int, encoding: Encoding, fill: Callable[[ShardFile], None]
    ) -> Future[FileEntry]:
        """Likewise a values file, which nobody reads."""
        header = encoding.values_header(rows, d)
        file, written = self._fill(name, header, rows, d, encoding, fill)
        file.let_go()
        return written

    def _fill(
        self,
        name: str,
        header: bytes,
        rows: int,
        d: int,
        encoding: Encoding,
        fill: Callable[[ShardFile], None],
    ) -> tuple[ShardFile, Future[FileEntry]]:
        file = ShardFile(header, rows, d, encoding, self._free.get(), self._free)
        fill(file)

        def write() -> FileEntry:
            try:
                return file.write(self._directory, name, pack=self._pack)
            finally:
                file.let_go()

        return file, self._thread.submit(write)


def write_parts(directory: Path, name: str, parts: Sequence[bytes | memoryview]) -> FileEntry:
    """Write and fsync a file of these parts, one after the other; its entry for the manifest."""
    hasher, size = xxhash.xxh3_64(), 0
    with open(directory / name, "xb") as file:
        for part in parts:
            file.write(part)
            hasher.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name, size, hasher.hexdigest())


def _round_up(size: int) -> int:
    return max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)


def _write_file(path: Path, memory: mmap.mmap, size: int) -> None:
    """Write the first `size` bytes of page-aligned memory; direct where that is possible."""
    fd = create_direct(path)
    try:
        view = memoryview(memory)
        end = _round_up(size)
        for start in range(0, end, _WRITE):
            write_at(fd, [view[start : min(start + _WRITE, end)]], start)
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)
