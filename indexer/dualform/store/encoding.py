"""How keys and values lie in files: the one place that knows how many bytes a row has, and how a
row becomes float32 numbers.

Keys and values are stored as the training run had them: float32, or the 16-bit numbers of mixed
precision, which are exact float32 numbers with half the bytes, or, where a key has a single 1, its
place. Whoever writes says which (`Record.encoding` for a recording's pass), manifests carry the
name, and whoever reads gets float32 numbers that are equal to what was stored.

Rows lie one after the other, `row_bytes(d)` each. A new encoding is a subclass here, listed in
`ENCODINGS`; the engine maps a file as a tensor of its `dtype`, without copying it.
"""

from __future__ import annotations

import io
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

NPY_HEADER_BYTES = 128


class Encoding(ABC):
    """How numbers are stored.

    Attributes:
        name: In manifests.
        stored: The NumPy dtype that has the numbers' bytes, little-endian.
        dtype: The name of the torch dtype that has them.
        keys_file: How the names of files of keys end.
    """

    name: ClassVar[str]
    stored: ClassVar[np.dtype[Any]]
    dtype: ClassVar[str]
    keys_file: ClassVar[str] = "keys.faiss"

    def numbers(self, d: int) -> int:
        """How many stored numbers make a row of d."""
        return d

    def row_bytes(self, d: int) -> int:
        """Bytes of a row of d numbers."""
        return int(self.stored.itemsize) * self.numbers(d)

    @abstractmethod
    def widen(self, rows: np.ndarray, d: int = 0) -> np.ndarray:
        """Stored rows, [n, numbers(d)], as the float32 [n, d] that are equal to them; d is needed
        where `numbers` is another, and rows may have any shape where it is not.

        Raises:
            ValueError: They are no such rows.
        """

    @abstractmethod
    def keys_header(self, d: int, rows: int) -> bytes:
        """The bytes that make rows of keys after them a file: one that `faiss.read_index` opens, or
        where FAISS has no such keys, a .npy file."""

    def values_header(self, rows: int, d: int) -> bytes:
        """The 128 bytes that make rows of values after them a .npy file [rows, d]."""
        return npy_header(self.stored.str, (rows, self.numbers(d)))

    def keys_bytes(self, d: int, rows: int) -> int:
        """Size of a file of keys."""
        return len(self.keys_header(d, rows)) + rows * self.row_bytes(d)

    def values_bytes(self, rows: int, d: int) -> int:
        """Size of a file of values."""
        return NPY_HEADER_BYTES + rows * self.row_bytes(d)


class Float32(Encoding):
    """Keys are a `faiss.IndexFlatIP`."""

    name = dtype = "float32"
    stored = np.dtype("<f4")

    def widen(self, rows: np.ndarray, d: int = 0) -> np.ndarray:
        return rows

    def keys_header(self, d: int, rows: int) -> bytes:
        return b"IxFI" + _index_header(d, rows) + struct.pack("<Q", rows * d)


class Half(Encoding):
    """16 bits a number; keys are a `faiss.IndexScalarQuantizer` for inner products."""

    quantizer: ClassVar[int]  # its ScalarQuantizer::QuantizerType

    def keys_header(self, d: int, rows: int) -> bytes:
        # qtype, rangestat (min-max), its argument, d, bytes of a code, no trained numbers.
        quantizer = struct.pack("<iifQQQ", self.quantizer, 0, 0.0, d, 2 * d, 0)
        return b"IxSQ" + _index_header(d, rows) + quantizer + struct.pack("<Q", 2 * rows * d)

    @abstractmethod
    def narrow(self, rows: np.ndarray) -> np.ndarray:
        """float32 numbers, of any shape, as the nearest stored ones; of two, the even one. What is
        too large becomes infinite."""


class BFloat16(Half):
    """The upper half of a float32."""

    name = dtype = "bfloat16"
    stored = np.dtype("<u2")  # NumPy has no bfloat16: the bits
    quantizer = 7

    def widen(self, rows: np.ndarray, d: int = 0) -> np.ndarray:
        return np.asarray((rows.astype("<u4") << np.uint32(16)).view("<f4"))

    def narrow(self, rows: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(rows, "<f4").view("<u4")
        upper = bits >> np.uint32(16)
        nearest = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
        # A NaN stays one: it must not carry into the sign, nor lose the bits that make it one.
        found = np.where(np.isnan(rows), upper | np.uint32(0x40), nearest)
        return np.asarray(found.astype(self.stored))


class Float16(Half):
    """IEEE half precision."""

    name = dtype = "float16"
    stored = np.dtype("<f2")
    quantizer = 4

    def widen(self, rows: np.ndarray, d: int = 0) -> np.ndarray:
        return np.asarray(rows.astype("<f4"))

    def narrow(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.asarray(rows.astype(self.stored))


class OneHot(Encoding):
    """A row with a single 1: its place, 4 bytes. A row of zeros is -1."""

    name = "one_hot"
    stored = np.dtype("<i4")
    dtype = "int32"
    keys_file = "keys.npy"

    def numbers(self, d: int) -> int:
        return 1

    def widen(self, rows: np.ndarray, d: int = 0) -> np.ndarray:
        places = rows.reshape(-1)
        if places.size and not -1 <= places.min() <= places.max() < d:
            raise ValueError(f"places {places.min()} to {places.max()} in rows of {d:,} numbers")
        wide = np.zeros((len(places), d), np.float32)
        ones = np.flatnonzero(places >= 0)
        wide[ones, places[ones]] = 1
        return wide

    def keys_header(self, d: int, rows: int) -> bytes:
        return self.values_header(rows, d)


FLOAT32 = Float32()
ONE_HOT = OneHot()

ENCODINGS: Mapping[str, Encoding] = {
    kind.name: kind for kind in (FLOAT32, BFloat16(), Float16(), ONE_HOT)
}
"""By name."""


HALVES: Mapping[str, Half] = {
    name: kind for name, kind in ENCODINGS.items() if isinstance(kind, Half)
}
"""Those of 16 bits, by name."""


def encoding(name: object) -> Encoding:
    """An encoding by its name, or ValueError with those there are."""
    if not isinstance(name, str) or name not in ENCODINGS:
        raise ValueError(f"no encoding {name!r:.60}; there are {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    """The 128 bytes that make the numbers after them a .npy file of this shape."""
    buffer = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    data = buffer.getvalue()
    if len(data) != NPY_HEADER_BYTES:
        raise ValueError(f"unexpected .npy header of {len(data)} bytes")
    return data


def _index_header(d: int, rows: int) -> bytes:
    """FAISS's own: d, n, two unused numbers, trained, inner product."""
    inner_product = 0
    return struct.pack("<iqqq?i", d, rows, 1 << 20, 1 << 20, True, inner_product)
