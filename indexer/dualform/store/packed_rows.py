"""Files of rows, packed in blocks that are unpacked one by one (docs/format.md, *Packed files*).

A file of an index's keys or values, without loss and in fewer bytes: whoever needs a row unpacks
the block that it lies in. All blocks of a file are packed the same way, the shortest for some of
them that are spread over it; a block that does not shrink lies as it is.

What a header or a table says is held against what the reader knows, the rows and the bytes of each,
before anything is allocated: a block becomes as many bytes as its rows have, or is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dualform.store.encoding import Encoding
from dualform.store.errors import DamagedError
from dualform.store.files import FileEntry, read_checked
from dualform.store.packing import AS_IT_IS, PACKINGS, Way, measured, packed, unpack

SUFFIX = ".packed"
"""How the names of packed files end, in place of ".faiss" or ".npy"."""

BLOCK_BYTES = 64 << 10
"""Of a block's rows, unpacked: small, so that few rows here and there cost little; smaller ones
would unpack at half the speed."""

_MOST_BLOCK = 1 << 20
"""Bytes that a reader unpacks at most for a block, unless one row has more."""

_MAGIC = b"dualpack"
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("rows", "<u8"),
        ("row_bytes", "<u8"),
        ("number_bytes", "<u8"),
        ("block_rows", "<u8"),
        ("packing", "<u8"),
        ("plain_header", "<u8"),
        ("plain_xxh3", "<u8"),
    ]
)
_END = np.dtype("<u8")
_SAMPLE_BLOCKS = 8
_WORTH = 15 / 16


@dataclass(frozen=True)
class Rows:
    """What a reader knows of a file before it looks at it.

    Attributes:
        rows: How many.
        row_bytes: Of each, unpacked.
        number_bytes: Of each number.
        header: What the plain file starts with.
    """

    rows: int
    row_bytes: int
    number_bytes: int
    header: bytes

    @classmethod
    def of(cls, kind: Encoding, d: int, rows: int, header: bytes) -> Rows:
        """Of so many rows of d numbers in an encoding."""
        return cls(rows, kind.row_bytes(d), kind.stored.itemsize, header)

    @property
    def plain_bytes(self) -> int:
        """Size of the plain file."""
        return len(self.header) + self.rows * self.row_bytes


def packed_name(name: str) -> str:
    """What a file of keys or values is called where it is packed: "keys.packed" of "keys.faiss"."""
    return name.rpartition(".")[0] + SUFFIX


def is_packed(entry: FileEntry) -> bool:
    """Whether a file of keys or values is packed, by its name."""
    return entry.name.endswith(SUFFIX)


def block_rows(row_bytes: int) -> int:
    """How many rows a block has that `pack_rows` makes."""
    return max(1, BLOCK_BYTES // row_bytes)


def least_bytes(rows: int) -> int:
    """Bytes that a packed file has at least."""
    return _HEADER.itemsize + _END.itemsize + min(1, rows)


def way_of(numbers: np.ndarray, each: int) -> Way:
    """The shortest way for the blocks of a file, measured on some that are spread over it.

    Args:
        numbers: uint8 [rows, row_bytes].
        each: Bytes of a number.
    """
    count = block_rows(numbers.shape[1])
    step = max(count, len(numbers) // _SAMPLE_BLOCKS)
    some = [numbers[first : first + count] for first in range(0, len(numbers), step)]
    return measured(np.concatenate(some).reshape(-1).view(f"<u{each}"))


def share_left(numbers: np.ndarray, each: int) -> float:
    """What share of their bytes rows such as these are expected to take, packed: 1 where packing
    does not pay.

    Args:
        numbers: Some of them, uint8 [rows, row_bytes].
        each: Bytes of a number.
    """
    way, step, size = way_of(numbers, each), block_rows(numbers.shape[1]), 0
    for first in range(0, len(numbers), step):
        block = numbers[first : first + step].reshape(-1)
        found = packed(block.view(f"<u{each}"), way)
        size += (block.nbytes if found is None else len(found)) + _END.itemsize
    share = size / max(1, numbers.nbytes)
    return share if share < _WORTH else 1.0


def pack_rows(plain: memoryview, shape: Rows) -> list[bytes] | None:
    """A file of rows, packed; None where that would not pay.

    Args:
        plain: The plain file, header and rows.
        shape: What it is.

    Returns:
        What is to be written, one after the other.
    """
    start = len(shape.header)
    rows = np.frombuffer(plain, np.uint8, shape.rows * shape.row_bytes, start)
    rows = rows.reshape(shape.rows, shape.row_bytes)
    way = way_of(rows, shape.number_bytes)
    if way is AS_IT_IS:
        return None
    step = block_rows(shape.row_bytes)
    blocks = []
    for first in range(0, shape.rows, step):
        block = rows[first : first + step].reshape(-1)
        blocks.append(packed(block.view(f"<u{shape.number_bytes}"), way) or block.tobytes())
    ends = np.cumsum([len(block) for block in blocks]).astype(_END)
    header = np.zeros(1, _HEADER)
    header["magic"] = _MAGIC
    header["rows"], header["row_bytes"] = shape.rows, shape.row_bytes
    header["number_bytes"], header["block_rows"] = shape.number_bytes, step
    header["packing"] = PACKINGS.index(way.packing)
    header["plain_header"] = start
    header["plain_xxh3"] = xxhash.xxh3_64_intdigest(plain)
    found = [header.tobytes(), ends.tobytes(), *blocks]
    return found if sum(map(len, found)) < _WORTH * shape.plain_bytes else None


class PackedRows:
    """A packed file's bytes, as rows.

    Args:
        data: The whole file; nothing of it is copied.
        shape: What its rows are.

    Attributes:
        block_rows: Rows of each block but the last, which may have fewer.
        blocks: How many.
        packing: The way that they are packed.

    Raises:
        ValueError: The header or the table is not one of such rows; it says which field.
    """

    def __init__(self, data: memoryview, shape: Rows) -> None:
        self._shape = shape
        if len(data) < _HEADER.itemsize:
            raise ValueError(f"{len(data):,} bytes hold no header of a packed file")
        header = np.frombuffer(data, _HEADER, 1)[0]
        if header["magic"] != _MAGIC:
            raise ValueError("it does not begin as a packed file")
        for field, expected in (
            ("rows", shape.rows),
            ("row_bytes", shape.row_bytes),
            ("number_bytes", shape.number_bytes),
            ("plain_header", len(shape.header)),
        ):
            if int(header[field]) != expected:
                raise ValueError(
                    f"its header has {field} {int(header[field]):,} where the manifest makes it "
                    f"{expected:,}"
                )
        self.block_rows = int(header["block_rows"])
        most = max(1, _MOST_BLOCK // shape.row_bytes)
        if not 1 <= self.block_rows <= most:
            raise ValueError(f"its header has block_rows {self.block_rows:,}, not 1 to {most:,}")
        if not 0 < int(header["packing"]) < len(PACKINGS):
            raise ValueError(f"its header has packing {int(header['packing'])}, which there is not")
        self.packing = PACKINGS[int(header["packing"])]
        self._plain = int(header["plain_xxh3"])
        self.blocks = math.ceil(shape.rows / self.block_rows)
        start = _HEADER.itemsize + self.blocks * _END.itemsize
        if len(data) < start:
            raise ValueError(f"{len(data):,} bytes hold no table of {self.blocks:,} blocks")
        ends = np.frombuffer(data, _END, self.blocks, _HEADER.itemsize)
        if int(ends[-1]) != len(data) - start:
            raise ValueError(
                f"its table ends at {int(ends[-1]):,} of {len(data) - start:,} bytes of blocks"
            )
        sizes = np.diff(ends.astype(np.int64), prepend=0)
        whole = np.full(self.blocks, self.block_rows * shape.row_bytes)
        whole[-1] = self.rows_of(self.blocks - 1) * shape.row_bytes
        wrong = np.flatnonzero((sizes < 1) | (sizes > whole))
        if wrong.size:
            number = int(wrong[0])
            raise ValueError(
                f"its table gives block {number} {int(sizes[number]):,} bytes, of rows that take "
                f"{int(whole[number]):,}"
            )
        self._blocks = data[start:]
        self._ends = ends

    def rows_of(self, number: int) -> int:
        """How many rows a block has."""
        return min(self.block_rows, self._shape.rows - number * self.block_rows)

    def unpack(self, number: int, out: np.ndarray) -> None:
        """Fill `out`, contiguous and as many bytes as the block's rows have.

        Raises:
            ValueError: The block is not one of such rows.
        """
        first = int(self._ends[number - 1]) if number else 0
        block = self._blocks[first : int(self._ends[number])]
        bits = out.reshape(-1).view(np.uint8)
        if len(block) == bits.nbytes:
            bits[...] = np.frombuffer(block, np.uint8)
            return
        try:
            unpack(block, self.packing, bits.view(f"<u{self._shape.number_bytes}"))
        except ValueError as error:
            raise ValueError(f"block {number}: {error}") from None

    def all(self) -> Iterator[np.ndarray]:
        """All rows, uint8 [n, row_bytes], block by block; one is valid until the next.

        Raises:
            ValueError: A block is not what was packed, or all are not the plain file.
        """
        hasher = xxhash.xxh3_64(self._shape.header)
        room = np.empty((min(self.block_rows, self._shape.rows), self._shape.row_bytes), np.uint8)
        for number in range(self.blocks):
            rows = room[: self.rows_of(number)]
            self.unpack(number, rows)
            hasher.update(rows.data)
            yield rows
        if hasher.intdigest() != self._plain:
            raise ValueError("its rows do not have the digest of the plain file")


def read_rows(directory: Path, entry: FileEntry, shape: Rows, remedy: str) -> Any:
    """A file of keys or values, packed or plain, as its rows: uint8 [rows, row_bytes].

    Raises:
        DamagedError: It is not what was written.
    """
    data = read_checked(directory, entry, remedy)
    if not is_packed(entry):
        if data[: len(shape.header)] != shape.header or len(data) != shape.plain_bytes:
            raise DamagedError(directory / entry.name, "its header is not the manifest's", remedy)
        rows = np.frombuffer(data, np.uint8, offset=len(shape.header))
        return rows.reshape(shape.rows, shape.row_bytes)
    found, first = np.empty((shape.rows, shape.row_bytes), np.uint8), 0
    try:
        for rows in PackedRows(memoryview(data), shape).all():
            found[first : first + len(rows)] = rows
            first += len(rows)
    except ValueError as error:
        raise DamagedError(directory / entry.name, str(error), remedy) from None
    return found
