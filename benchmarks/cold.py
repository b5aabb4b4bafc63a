"""Letting go of an index's pages, and counting what a question reads from the disk again."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dualform.engine import Index
from dualform.engine.memory.shards import ShardFile

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4


def forget(index: Index, layer: str, *, sketches: bool = True) -> None:
    """Drop the layer's mapped files from this process and from the page cache.

    Args:
        index: Open.
        layer: Whose keys and values.
        sketches: Drop its sketches too.

    Raises:
        OSError: The kernel refuses.
    """
    for path, address, size in _mapped(index, layer, sketches):
        start = address - address % mmap.PAGESIZE
        length = address + size - start
        if _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), f"madvise on {path.name}")
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_read(run: Callable[[], object]) -> int:
    """What this process had the disk read while `run` ran."""
    before = _read_bytes()
    run()
    return _read_bytes() - before


def _read_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    raise RuntimeError("/proc/self/io has no read_bytes")


def _mapped(index: Index, layer: str, sketches: bool) -> Iterator[tuple[Path, int, int]]:
    for shard in index.layers[layer].shards:
        for file in (shard.keys, shard.values, shard.sketch if sketches else None):
            if isinstance(file, ShardFile):
                rows = file.rows()
                yield file.path, rows.data_ptr(), rows.numel() * 4
