"""A layer's shards as memory: mapped, checked on first use, and cut into tiles.

A mapped file is read-only to us and never changes after publication; one that does is noticed
before the next question to it. Keys and values are as the index has them; what is computed with is
a tile in float32, a copy in aligned memory, small enough to stay in the processor's cache. The
mapped numbers are unaligned: a FAISS header has an odd number of bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualform.engine.errors import CancelledError, DataLossError
from dualform.engine.memory.mapped import advise, map_file
from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.table import Table
from dualform.store.encoding import FLOAT32, Encoding
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_digest_of, check_size, identity, opened, status
from dualform.store.index import REBUILD

TILE_BYTES = 4 << 20
"""Bytes of a tile's keys: about what stays in cache between the copy and the product."""

TILE_WEIGHTS = 4 << 20
"""Weights of a tile, queries times rows, at most: what bounds a scan's memory."""

_SCATTERED = 64
"""Fewer than one row in so many are read one by one, not with what lies around them."""

Stop = Callable[[], bool]


class ShardFile:
    """One published file of rows, each of the same length; checked before its bytes are first used.

    Args:
        directory: The index.
        entry: The file's name, size and digest.
        shape: Number of rows, and of numbers per row.
        header: What the file starts with.
        encoding: How the numbers are stored.
        wrong: Says what is wrong with the rows, given as `rows` gives them, or None where they are
            what the index says of them; asked once, when they are first used.

    Attributes:
        d: Numbers of a row.

    Raises:
        DamagedError: The file is missing, no file, or has the wrong size.
    """

    def __init__(
        self,
        directory: Path,
        entry: FileEntry,
        shape: tuple[int, int],
        header: bytes,
        encoding: Encoding = FLOAT32,
        wrong: Callable[[torch.Tensor], str | None] | None = None,
    ) -> None:
        self._directory = directory
        self._entry = entry
        self.d = shape[1]
        self._shape = (shape[0], encoding.numbers(shape[1]))
        self._header = header
        self._dtype = getattr(torch, encoding.dtype)
        self._wrong = wrong
        self._lock = threading.Lock()
        self._rows: torch.Tensor | None = None
        self._memory: Any = None
        self._identity: tuple[int, ...] = ()
        self._scattered = self._adopted = False
        self.path = check_size(directory, entry, REBUILD)
        self._name = str(self.path)

    def rows(self) -> torch.Tensor:
        """The rows as stored, mapped and unaligned: `copy` or `pick` takes numbers from them.

        Raises:
            DamagedError: The file does not hold what was written, or has changed since it did.
        """
        with self._lock:
            self._check_unchanged()
            if self._rows is None:
                self._rows = self._map()
            return self._rows

    def copy(self, which: np.ndarray | slice, out: torch.Tensor) -> torch.Tensor:
        """Rows, by indices or a slice, copied to `out`, float32 [n, d]; returns that.

        Raises:
            DamagedError: As `rows`.
        """
        source = self.rows()
        if self._dtype is torch.int32:  # places of ones
            return _one_hot(pick_stored(source, which)[:, 0], out)
        return copy_rows(source, which, out)

    def pick(self, which: np.ndarray | slice) -> torch.Tensor:
        """Rows likewise, float32 [n, d]; a view where that is possible.

        Raises:
            DamagedError: As `rows`.
        """
        source = self.rows()
        if self._dtype is torch.int32:
            places = pick_stored(source, which)[:, 0]
            return _one_hot(places, torch.empty((len(places), self.d), device="cpu"))
        return pick(source, which)

    def check_unchanged(self) -> None:
        """Raise DamagedError where the file is not the one any more that is mapped."""
        if self._identity:  # not mapped yet: nothing to compare with
            with self._lock:
                self._check_unchanged()

    def adopt(self, other: ShardFile) -> None:
        """Use another's memory where it has mapped, and so checked, the very same file."""
        if self._entry != other._entry or not other._identity:
            return
        with suppress(OSError):
            if identity(os.lstat(self._name)) == other._identity:
                self._rows, self._memory = other._rows, other._memory
                self._identity, self._adopted = other._identity, True

    def check(self) -> None:
        """Read the whole file, whether it was read before or not.

        Raises:
            DamagedError: It does not hold what was written, or what the index says of it.
        """
        known = self._rows is not None
        rows = self.rows()
        if not known or self._adopted:  # it was read just now, or for the version before
            self._adopted = False
            return
        with opened(self._directory, self._entry, REBUILD) as fd:
            check_digest_of(fd, self._directory, self._entry, REBUILD)
        self._check_rows(rows)

    def expect(self, *, scattered: bool) -> None:
        """Map the rows, and say how they are read next: a few of them, or from end to end.

        Around each page that is missing the system reads 128 KiB, which helps a scan, and is fifty
        times too much for a row here and there.

        Raises:
            DamagedError: As `rows`.
        """
        self.rows()
        memory = self._memory
        if memory is None or scattered == self._scattered or not hasattr(mmap, "MADV_RANDOM"):
            return
        self._scattered = scattered
        advise(memory, mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL)

    def mapped(self) -> tuple[int, int] | None:
        """The address and the bytes of the mapped rows; None before they are first used."""
        rows = self._rows
        return None if rows is None else (rows.data_ptr(), rows.nbytes)

    def _check_unchanged(self) -> None:
        """A look at the file: reading beyond the end of one that was cut off would be fatal."""
        if not self._identity:
            return
        try:
            same = identity(os.lstat(self._name)) == self._identity
        except OSError:
            same = False
        if not same:
            status(self._directory, self._entry, REBUILD)  # says more of some changes
            raise DamagedError(self.path, "it was changed after it had been checked", REBUILD)

    def _map(self) -> torch.Tensor:
        with opened(self._directory, self._entry, REBUILD) as fd:
            found = os.fstat(fd)
            check_digest_of(fd, self._directory, self._entry, REBUILD)
            memory = map_file(fd, self._entry.bytes)
        if bytes(memory[: len(self._header)]) != self._header:
            raise DamagedError(self.path, "its header is not the manifest's", REBUILD)
        count = self._shape[0] * self._shape[1]
        flat = torch.frombuffer(memory, dtype=self._dtype, count=count, offset=len(self._header))
        rows = flat.view(self._shape)
        self._check_rows(rows)
        self._memory, self._identity = memory, identity(found)
        return rows

    def _check_rows(self, rows: torch.Tensor) -> None:
        what = None if self._wrong is None else self._wrong(rows)
        if what is not None:
            raise DamagedError(self.path, what, REBUILD)


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
        finite: bool [rows]: which of its keys are finite.
    """

    table: Table
    start: int
    rows: int
    keys: ShardFile
    values: ShardFile | None
    sketch: ShardFile | None
    max_norm: float
    finite: np.ndarray = field(repr=False)

    @property
    def files(self) -> list[ShardFile]:
        """Those that it has."""
        return [file for file in (self.keys, self.values, self.sketch) if file is not None]

    def adopt(self, other: Shard) -> None:
        """Use another version's memory as far as it is of the very same files; what is said of the
        keys must be the same too."""
        if self.max_norm != other.max_norm or not np.array_equal(self.finite, other.finite):
            return
        for file, theirs in (
            (self.keys, other.keys),
            (self.values, other.values),
            (self.sketch, other.sketch),
        ):
            if file is not None and theirs is not None:
                file.adopt(theirs)

    def sketches(self) -> torch.Tensor:
        """Its keys' sketches, float32 [rows, m + 1].

        Raises:
            DataLossError: The file does not hold what was written: what goes without sketches is
                answered all the same.
        """
        assert self.sketch is not None
        with spared():
            return self.sketch.rows()

    def tiles(
        self,
        selected: np.ndarray,
        queries: int,
        *,
        values: bool = False,
        stop: Stop | None = None,
    ) -> Iterator[Tile]:
        """Cut the selected rows into tiles, in order of position; one is valid until the next.

        Args:
            selected: bool [rows].
            queries: How many queries the tiles will be multiplied with.
            values: Whether tiles carry values.
            stop: Asked between tiles; True raises CancelledError.
        """
        count = int(np.count_nonzero(selected))
        if count == 0:
            return
        scattered = is_scattered(count, self.rows)
        value_file = self.values if values else None
        files = [file for file in (self.keys, value_file) if file is not None]
        for file in files:
            file.expect(scattered=scattered)
        step = tile_rows(max(file.d for file in files), queries)
        finite = None if self.finite.all() else self.finite
        scratch = torch.empty((min(step, count), self.keys.d), dtype=torch.float32, device="cpu")
        for inside, positions in self._pieces(selected, count, step):
            check_stop(stop)
            tile_keys = self.keys.copy(inside, scratch[: len(positions)])
            tile_values = None if value_file is None else value_file.pick(inside)
            tile_finite = None if finite is None else finite[inside]
            yield Tile(self.table, positions, tile_keys, tile_values, self.max_norm, tile_finite)

    def _pieces(
        self, selected: np.ndarray, count: int, step: int
    ) -> Iterator[tuple[np.ndarray | slice, np.ndarray]]:
        """The `count` selected rows, up to `step` at a time: where in the shard they are, and their
        positions in the layer, int64 [n]."""
        chosen = None if count == self.rows else np.flatnonzero(selected)
        for first in range(0, count, step):
            last = min(first + step, count)
            if chosen is None:
                yield slice(first, last), np.arange(self.start + first, self.start + last)
            else:
                inside = chosen[first:last]
                yield as_slice(inside), self.start + inside


@contextmanager
def spared() -> Iterator[None]:
    """Damage to a file that makes answers cheaper: a refusal, but not of what goes without it."""
    try:
        yield
    except DamagedError as error:
        raise DataLossError(str(error)) from None


def is_scattered(count: int, rows: int) -> bool:
    """Whether so few rows of a shard are read that each is better read alone."""
    return count < rows // _SCATTERED


def tile_rows(width: int, queries: int) -> int:
    """How many rows of so many floats a tile has that is multiplied with so many queries."""
    return max(64, min(TILE_BYTES // FLOAT32.row_bytes(width), TILE_WEIGHTS // queries))


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


def copy_rows(source: torch.Tensor, which: np.ndarray | slice, out: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, by indices or a slice, copied to `out`, float32 [n, d]; returns that."""
    if isinstance(which, slice):
        return out.copy_(source[which])
    indices = torch.from_numpy(which)
    if source.dtype == out.dtype:
        return torch.index_select(source, 0, indices, out=out)
    return out.copy_(torch.index_select(source, 0, indices))


def pick(source: torch.Tensor, which: np.ndarray | slice) -> torch.Tensor:
    """Rows of a tensor in float32, by indices or a slice; a view where that is possible."""
    return pick_stored(source, which).float()


def pick_stored(source: torch.Tensor, which: np.ndarray | slice) -> torch.Tensor:
    """Rows of a tensor as they are, by indices or a slice; a view where that is possible."""
    if isinstance(which, slice):
        return source[which]
    return torch.index_select(source, 0, torch.from_numpy(which))  # a quarter of indexing's time


def _one_hot(places: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rows with a 1 in these places, int32 [n], none where it is -1, in `out`, float32 [n, d]."""
    out.zero_()
    wide = places.long()
    return out.scatter_(1, wide.clamp(min=0)[:, None], (wide >= 0).float()[:, None])
