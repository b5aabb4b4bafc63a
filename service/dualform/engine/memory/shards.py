"""A layer's shards as memory: mapped, checked on first use, and cut into tiles.

A mapped file is read-only to us and never changes after publication. The keys of an IndexFlatIP
file start at byte 45, so the mapped floats are unaligned: a tile is a copy in aligned memory, small
enough to stay in the processor's cache, which measured as fast as aligned maps would be.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dualform.engine.errors import CancelledError
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.table import Table
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_digest, check_size
from dualform.store.index import (
    FAISS_HEADER_BYTES,
    NPY_HEADER_BYTES,
    REBUILD,
    faiss_header,
    npy_header,
)

TILE_BYTES = 4 << 20
"""Bytes of a tile's keys: about what stays in cache between the copy and the product."""

TILE_WEIGHTS = 4 << 20
"""Weights of a tile, queries times rows, at most: what bounds a scan's memory."""

_SCATTERED = 64
"""Fewer than one row in so many are read one by one, not with what lies around them."""

Stop = Callable[[], bool]


class ShardFile:
    """One published file of float32 rows [rows, d]; checked before its bytes are first used.

    Args:
        directory: The index.
        entry: The file's name, size and digest.
        rows: Number of rows.
        d: Floats per row.
        kind: "keys", "values" or "sketch".

    Raises:
        DamagedError: The file is missing, or has the wrong size.
    """

    def __init__(self, directory: Path, entry: FileEntry, rows: int, d: int, kind: str) -> None:
        self._directory = directory
        self._entry = entry
        self._shape = (rows, d)
        self._header = FAISS_HEADER_BYTES if kind == "keys" else NPY_HEADER_BYTES
        self._expected = faiss_header(d, rows) if kind == "keys" else npy_header(rows, d)
        self._lock = threading.Lock()
        self._rows: torch.Tensor | None = None
        self._memory: mmap.mmap | None = None
        self._scattered = False
        self.path = check_size(directory, entry, REBUILD)

    def rows(self) -> torch.Tensor:
        """The rows, float32 [rows, d], mapped and unaligned: copy before computing.

        Raises:
            DamagedError: The file does not hold what was written.
        """
        with self._lock:
            # Reading beyond the end of a file that was cut off under the map would be fatal.
            check_size(self._directory, self._entry, REBUILD)
            if self._rows is None:
                check_digest(self._directory, self._entry, REBUILD)
                self._rows = self._map()
            return self._rows

    def expect(self, *, scattered: bool) -> None:
        """Say how the rows are read next: a few of them, or from end to end.

        Around each page that is missing the system reads 128 KiB, which helps a scan, and is fifty
        times too much for a row here and there.
        """
        memory = self._memory
        if memory is None or scattered == self._scattered or not hasattr(mmap, "MADV_RANDOM"):
            return
        self._scattered = scattered
        memory.madvise(mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL)

    def mapped(self) -> tuple[int, int] | None:
        """The address and the bytes of the mapped rows; None before they are first used."""
        rows = self._rows
        return None if rows is None else (rows.data_ptr(), rows.nbytes)

    def _map(self) -> torch.Tensor:
        with open(self.path, "rb") as file:
            # A private map: torch wants writable memory, and nothing written would reach the file.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if memory[: self._header] != self._expected:
            raise DamagedError(self.path, "its header is not the manifest's", REBUILD)
        self._memory = memory
        count = self._shape[0] * self._shape[1]
        flat = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=self._header)
        return flat.view(self._shape)


@dataclass(frozen=True)
class Shard:
    """One shard of one layer.

    Attributes:
        table: The rows of its layer's row space.
        start: Position of its first row.
        rows: Number of rows.
        keys: Its keys.
        values: Its values, or None in an index without.
        sketch: Its keys' sketches, or None without any.
        max_norm: Upper bound of its finite keys' Euclidean norms.
        nonfinite: Half-open ranges inside the shard whose keys are not finite.
    """

    table: Table
    start: int
    rows: int
    keys: ShardFile
    values: ShardFile | None
    sketch: ShardFile | None
    max_norm: float
    nonfinite: tuple[tuple[int, int], ...]

    def tiles(
        self,
        selected: np.ndarray,
        queries: int,
        *,
        values: bool = False,
        device: torch.device | None = None,
        stop: Stop | None = None,
    ) -> Iterator[Tile]:
        """Cut the selected rows into tiles, in order of position.

        Args:
            selected: bool [rows].
            queries: How many queries the tiles will be multiplied with.
            values: Whether tiles carry values.
            device: Where tiles are put; None for the CPU. A tile is valid until the next.
            stop: Asked between tiles; True raises CancelledError.
        """
        count = int(np.count_nonzero(selected))
        if count == 0:
            return
        chosen = None if count == self.rows else np.flatnonzero(selected)
        keys = self.keys.rows()
        own_values = self.values.rows() if values and self.values is not None else None
        scattered = is_scattered(count, self.rows)
        self.keys.expect(scattered=scattered)
        if own_values is not None and self.values is not None:
            self.values.expect(scattered=scattered)
        widest = max(keys.shape[1], 0 if own_values is None else own_values.shape[1])
        step = tile_rows(widest, queries)
        finite = self.finite() if self.nonfinite else None
        scratch = torch.empty((min(step, count), keys.shape[1]), dtype=torch.float32, device="cpu")
        for first in range(0, count, step):
            check_stop(stop)
            last = min(first + step, count)
            if chosen is None:
                inside: np.ndarray | slice = slice(first, last)
                positions = np.arange(self.start + first, self.start + last)
            else:
                inside = as_slice(chosen[first:last])
                positions = self.start + chosen[first:last]
            tile_keys = _copy(keys, inside, scratch[: last - first])
            tile_values = None if own_values is None else pick(own_values, inside)
            if device is not None and device.type != "cpu":
                tile_keys = tile_keys.to(device)
                tile_values = None if tile_values is None else tile_values.to(device)
            own_finite = None if finite is None else finite[inside]
            yield Tile(self.table, positions, tile_keys, tile_values, self.max_norm, own_finite)

    def finite(self) -> np.ndarray:
        """Which rows' keys are finite, bool [rows]."""
        mask = np.ones(self.rows, bool)
        for first, last in self.nonfinite:
            mask[first:last] = False
        return mask


def is_scattered(count: int, rows: int) -> bool:
    """Whether so few rows of a shard are read that each is better read alone."""
    return count < rows // _SCATTERED


def tile_rows(width: int, queries: int) -> int:
    """How many rows of so many floats a tile has that is multiplied with so many queries."""
    return max(64, min(TILE_BYTES // (4 * width), TILE_WEIGHTS // queries))


def check_stop(stop: Stop | None) -> None:
    """Raise CancelledError once the caller has given up."""
    if stop is not None and stop():
        raise CancelledError("the caller gave up; the scan stopped between two tiles")


def as_slice(indices: np.ndarray) -> np.ndarray | slice:
    """Contiguous ascending indices as a slice: reading a run is cheaper than gathering it.

    Args:
        indices: int64 [n], n >= 1.
    """
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def _copy(source: torch.Tensor, which: np.ndarray | slice, out: torch.Tensor) -> torch.Tensor:
    if isinstance(which, slice):
        return out.copy_(source[which])
    return torch.index_select(source, 0, torch.from_numpy(which), out=out)


def pick(source: torch.Tensor, which: np.ndarray | slice) -> torch.Tensor:
    """Rows of a tensor, by indices or a slice; a view where it is a slice."""
    return source[which] if isinstance(which, slice) else source[torch.from_numpy(which)]
