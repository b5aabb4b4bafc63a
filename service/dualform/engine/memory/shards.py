"""A layer's shards as memory: mapped, checked on first use, and cut into tiles.

A mapped file is read-only to us and never changes after publication; one that does is noticed
before the next question to it. Keys and values are as the index has them; what is computed with is
a tile in float32, small enough to stay in the processor's cache: the mapped numbers where they lie,
or a copy of what is narrower or lies apart. Mapped keys are unaligned: a FAISS header has an odd
number of bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
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
from dualform.engine.memory.weights import ONE_BY_ONE, faiss_is_there
from dualform.engine.rows.table import Table
from dualform.store.encoding import FLOAT32, Encoding
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, check_digest_of, check_size, identity, opened, status
from dualform.store.index import REBUILD

TILE_BYTES = 4 << 20
"""Bytes of a tile's keys: about what stays in cache between the copy and the product."""

ONE_QUERY_BYTES = 64 << 20
"""Likewise for a single query, which reads its keys once, where they lie."""

TILE_WEIGHTS = 4 << 20
"""Weights of a tile, queries times rows, at most: what bounds a scan's memory."""

_SCATTERED = 64
"""Fewer than one row in so many are read one by one, not with what lies around them."""

Stop = Callable[[], bool]


class RowFile(ABC):
    """One published file of rows, each of the same length; checked before its bytes are first used.

    Args:
        directory: The index.
        entry: The file's name, size and digest.
        rows: How many.
        d: Numbers of each.
        encoding: How the numbers are stored.

    Attributes:
        d: Numbers of a row.
        path: Where the file is.
        in_place: Whether rows are float32 as they lie.

    Raises:
        DamagedError: The file is missing, no file, or has the wrong size.
    """

    in_place = False

    def __init__(
        self, directory: Path, entry: FileEntry, rows: int, d: int, encoding: Encoding
    ) -> None:
        self._directory = directory
        self._entry = entry
        self.d = d
        self._shape = (rows, encoding.numbers(d))
        self._dtype = getattr(torch, encoding.dtype)
        self._lock = threading.Lock()
        self._content: Any = None
        self._memory: Any = None
        self._identity: tuple[int, ...] = ()
        self._adopted = False
        self.path = check_size(directory, entry, REBUILD)
        self._name = str(self.path)

    @abstractmethod
    def copy(self, which: np.ndarray | slice, out: torch.Tensor) -> torch.Tensor:
        """Rows, by indices or a slice, copied to `out`, float32 [n, d]; returns that.

        Raises:
            DamagedError: The file does not hold what was written, or has changed since it did.
        """

    def pick(self, which: np.ndarray | slice) -> torch.Tensor:
        """Rows likewise, float32 [n, d]; a view where that is possible."""
        count = len(range(self._shape[0])[which]) if isinstance(which, slice) else len(which)
        return self.copy(which, torch.empty((count, self.d), dtype=torch.float32, device="cpu"))

    @abstractmethod
    def pick_units(self, which: np.ndarray, units: slice) -> torch.Tensor:
        """Of rows, int64 [n], some of their numbers: float32 [n, units]; not of places of ones."""

    def expect(self, *, scattered: bool) -> None:
        """Map the rows, and say how they are read next: a few of them, or from end to end.

        Raises:
            DamagedError: As `copy`.
        """
        self._used()

    def check_unchanged(self) -> None:
        """Raise DamagedError where the file is not the one any more that is mapped."""
        if self._identity:  # not mapped yet: nothing to compare with
            with self._lock:
                self._check_unchanged()

    def adopt(self, other: RowFile) -> None:
        """Use another's memory where it has mapped, and so checked, the very same file."""
        if self._entry != other._entry or not other._identity:
            return
        with suppress(OSError):
            if identity(os.lstat(self._name)) == other._identity:
                self._content, self._memory = other._content, other._memory
                self._identity, self._adopted = other._identity, True

    def check(self) -> None:
        """Read the whole file, whether it was read before or not.

        Raises:
            DamagedError: It does not hold what was written, or what the index says of it.
        """
        known, adopted = self._content is not None, self._adopted
        content = self._used()
        self._adopted = False
        if adopted:  # it was read for the version before
            return
        if known:  # or else it was read just now
            with opened(self._directory, self._entry, REBUILD) as fd:
                check_digest_of(fd, self._directory, self._entry, REBUILD)
            with self._damage():
                self._check_content(content)
        with self._damage():
            self._check_rest(content)

    def mapped(self) -> tuple[int, int] | None:
        """The address and the bytes of the mapped file; None before it is first used."""
        memory = self._memory
        return None if memory is None else (ctypes.addressof(memory), len(memory))

    @abstractmethod
    def _read(self, memory: Any) -> Any:
        """What the mapped bytes are; ValueError says what they are not."""

    @abstractmethod
    def _check_content(self, content: Any) -> None:
        """ValueError where it is not what the index says of it."""

    @abstractmethod
    def _check_rest(self, content: Any) -> None:
        """The same, of what a first use does not look at."""

    def _used(self) -> Any:
        """The content, once it was looked at that the file is what was mapped."""
        with self._lock:
            self._check_unchanged()
            if self._content is None:
                self._content = self._map()
            return self._content

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

    def _map(self) -> Any:
        with opened(self._directory, self._entry, REBUILD) as fd:
            found = os.fstat(fd)
            check_digest_of(fd, self._directory, self._entry, REBUILD)
            memory = map_file(fd, self._entry.bytes)
        with self._damage():
            content = self._read(memory)
            self._check_content(content)
        self._memory, self._identity = memory, identity(found)
        return content

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """A ValueError says what the file is not."""
        try:
            yield
        except ValueError as error:
            raise DamagedError(self.path, str(error), REBUILD) from None


class ShardFile(RowFile):
    """A file of rows as they are, mapped.

    Args:
        directory, entry, encoding: As for any.
        shape: Number of rows, and of numbers per row.
        header: What the file starts with.
        wrong: Says what is wrong with the rows, given as `rows` gives them, or None where they are
            what the index says of them; asked once, when they are first used.
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
        super().__init__(directory, entry, *shape, encoding)
        self._header = header
        self.in_place = self._dtype is torch.float32
        self._wrong = wrong
        self._scattered = False

    def rows(self) -> torch.Tensor:
        """The rows as stored, mapped and unaligned: `copy` or `pick` takes numbers from them.

        Raises:
            DamagedError: The file does not hold what was written, or has changed since it did.
        """
        rows: torch.Tensor = self._used()
        return rows

    def copy(self, which: np.ndarray | slice, out: torch.Tensor) -> torch.Tensor:
        source = self.rows()
        if self._dtype is torch.int32:  # places of ones
            return widened(pick_stored(source, which), out)
        return copy_rows(source, which, out)

    def pick(self, which: np.ndarray | slice) -> torch.Tensor:
        return super().pick(which) if self._dtype is torch.int32 else pick(self.rows(), which)

    def pick_units(self, which: np.ndarray, units: slice) -> torch.Tensor:
        # Stored numbers of 16 bits are float32 ones.
        return torch.index_select(self.rows()[:, units], 0, torch.from_numpy(which)).float()

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

    def _read(self, memory: Any) -> torch.Tensor:
        if bytes(memory[: len(self._header)]) != self._header:
            raise ValueError("its header is not the manifest's")
        count = self._shape[0] * self._shape[1]
        flat = torch.frombuffer(memory, dtype=self._dtype, count=count, offset=len(self._header))
        return flat.view(self._shape)

    def _check_content(self, content: torch.Tensor) -> None:
        what = None if self._wrong is None else self._wrong(content)
        if what is not None:
            raise ValueError(what)

    def _check_rest(self, content: torch.Tensor) -> None:
        """There is no more: the digest is that of the rows."""


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
        faiss: Whether FAISS, where it is installed, multiplies its rows with a few queries.
    """

    table: Table
    start: int
    rows: int
    keys: RowFile
    values: RowFile | None
    sketch: ShardFile | None
    max_norm: float
    finite: np.ndarray = field(repr=False)
    faiss: bool = False

    @property
    def files(self) -> list[RowFile]:
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

    def mapped_keys(self) -> torch.Tensor:
        """Its keys as they lie, float32 [rows, d], mapped and unaligned: not of packed ones, nor of
        other encodings (`Layer.keys_are_mapped`)."""
        assert isinstance(self.keys, ShardFile)
        return self.keys.rows()

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
        once: bool = False,
        stop: Stop | None = None,
    ) -> Iterator[Tile]:
        """Cut the selected rows into tiles, in order of position; one is valid until the next.

        Args:
            selected: bool [rows].
            queries: How many queries the tiles will be multiplied with.
            values: Whether tiles carry values.
            once: Whether keys and values are multiplied and not looked at again: then tiles of all
                rows for a single query may be large.
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
        faiss = self._multiplied_by_faiss(queries)
        in_place = self.keys.in_place and (faiss or queries > ONE_BY_ONE)
        width = max(file.d for file in files)
        step = tile_rows(width, queries, once=once and in_place and count == self.rows)
        finite = None if self.finite.all() else self.finite
        read = self._reader(in_place, min(step, count))
        for inside, positions in self._pieces(selected, count, step):
            check_stop(stop)
            tile_keys = read(inside)
            tile_values = None if value_file is None else value_file.pick(inside)
            tile_finite = None if finite is None else finite[inside]
            yield Tile(
                self.table, positions, tile_keys, tile_values, self.max_norm, tile_finite, faiss
            )

    def _multiplied_by_faiss(self, queries: int) -> bool:
        return self.faiss and queries <= ONE_BY_ONE and faiss_is_there()

    def _reader(self, in_place: bool, most: int) -> Callable[[np.ndarray | slice], torch.Tensor]:
        """Gives keys, up to so many at a time: those in a row where they lie, if that is asked for,
        others in memory that is used again."""
        room: list[torch.Tensor] = []

        def read(inside: np.ndarray | slice) -> torch.Tensor:
            if in_place and isinstance(inside, slice):
                return self.keys.pick(inside)
            if not room:
                room.append(torch.empty((most, self.keys.d), dtype=torch.float32, device="cpu"))
            count = inside.stop - inside.start if isinstance(inside, slice) else len(inside)
            return self.keys.copy(inside, room[0][:count])

        return read

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


def tile_rows(width: int, queries: int, *, once: bool = False) -> int:
    """How many rows of so many floats a tile has that is multiplied with so many queries; `once` as
    for `Shard.tiles`."""
    size = ONE_QUERY_BYTES if once and queries == 1 else TILE_BYTES
    return max(64, min(size // FLOAT32.row_bytes(width), TILE_WEIGHTS // queries))


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


def widened(stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rows as they are stored, in `out`, float32 [n, d]: places of ones, int32 [n, 1], none where
    it is -1, or numbers."""
    if stored.dtype is not torch.int32:
        return out.copy_(stored)
    out.zero_()
    wide = stored[:, 0].long()
    return out.scatter_(1, wide.clamp(min=0)[:, None], (wide >= 0).float()[:, None])
