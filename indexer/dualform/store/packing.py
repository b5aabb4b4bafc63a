"""Packing: the same numbers in fewer bytes, bit for bit (docs/format-recording.md, *Packing*).

What keys and values have too much of is zeros, numbers that come again, and exponents that are
alike. Nothing here knows what a number means: all are bit patterns of 1, 2, 4 or 8 bytes, so NaNs,
their payloads and the sign of a zero come back as they were.

Which way is the shortest is measured, on a part of the numbers, by `measured`; `packed` goes that
way, and `unpack` comes back. Sizes are looked at before memory is taken: what is unpacked is never
larger than the memory that it goes to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

PLAIN = "plain"
ZSTD = "zstd"
PLANES = "planes"

PACKINGS = (PLAIN, ZSTD, PLANES)
"""Names, as tables have them: as they are; one Zstandard frame; numbers other than the common one,
byte by byte."""

MOST_BYTES = 256 << 20
"""Of numbers that are packed together, unpacked: what a reader has to believe a table at most."""

_MEASURED_BYTES = 512 << 10
"""Of the numbers that ways are tried on."""

_WORTH = 15 / 16
"""What does not shrink to so much stays as it is."""

_COMMON_OF = 512
"""So many numbers say which one is common."""

_LEVEL = 1


@dataclass(frozen=True)
class Way:
    """How to pack.

    Attributes:
        packing: Its name.
        common: With planes, the number that is left out, as an unsigned integer; None for none.
        planes: Which of the planes are compressed, the lowest byte's first.
        bitmap: Whether that of the numbers that differ is.
    """

    packing: str = PLAIN
    common: int | None = None
    planes: tuple[bool, ...] = ()
    bitmap: bool = False


AS_IT_IS = Way()


def measured(numbers: np.ndarray) -> Way:
    """The shortest way for these numbers and their like, from the first half MiB of them.

    Args:
        numbers: Contiguous, of 1, 2, 4 or 8 bytes each.
    """
    bits = _bits(numbers)
    bits = bits[: _MEASURED_BYTES // bits.itemsize]
    if not len(bits):
        return AS_IT_IS
    best, least = AS_IT_IS, _WORTH * bits.nbytes
    for way in (_planes_way(bits, _common(bits)), Way(ZSTD)):
        size = sum(map(_size, _pack(bits, way)))
        if size < least:
            best, least = way, size
    return best


def packed(numbers: np.ndarray, way: Way) -> bytes | None:
    """Numbers packed; None where that is no shorter, or they are too many.

    Args:
        numbers: Contiguous, of 1, 2, 4 or 8 bytes each.
    """
    if way is AS_IT_IS or not 0 < numbers.nbytes <= MOST_BYTES:
        return None
    parts = _pack(_bits(numbers), way)
    return b"".join(parts) if sum(map(_size, parts)) < numbers.nbytes else None


def unpack(data: bytes | bytearray | memoryview, packing: str, out: np.ndarray) -> None:
    """The numbers that were packed.

    Args:
        data: What `packed` gave.
        packing: Its name.
        out: As many numbers as there were, contiguous, of as many bytes; filled.

    Raises:
        ValueError: The data is something else.
    """
    bits = _bits(out)
    if bits.nbytes > MOST_BYTES:
        raise ValueError(f"{bits.nbytes:,} bytes; packed ones are at most {MOST_BYTES:,}")
    if packing == ZSTD:
        bits[...] = np.frombuffer(expanded(data, bits.nbytes), bits.dtype)
    elif packing == PLANES:
        _from_planes(data, bits)
    else:
        raise ValueError(f"no packing {packing!r:.60}")


def _pack(bits: np.ndarray, way: Way) -> Sequence[Any]:
    if way.packing == ZSTD:
        return [compressed(bits)]
    kept, bitmap = bits, np.empty(0, np.uint8)
    if way.common is not None:
        differs = bits != way.common
        where = np.flatnonzero(differs)  # with take, four times as fast as the mask
        if len(where) < len(bits):
            kept, bitmap = bits.take(where), np.packbits(differs, bitorder="little")
    parts = [bitmap, *_planes(kept)]
    parts = [
        _shorter(part) if compress else part
        for part, compress in zip(parts, (way.bitmap, *way.planes), strict=True)
    ]
    header = np.array([way.common or 0, len(kept), *map(_size, parts)], "<u8")
    return [header, *parts]


def _from_planes(data: bytes | bytearray | memoryview, bits: np.ndarray) -> None:
    """Fill `bits` from a header, the bitmap of numbers that differ, and their planes."""
    width, n = bits.itemsize, len(bits)
    if len(data) < 8 * (3 + width):
        raise ValueError(f"{len(data):,} bytes hold no header")
    common, kept, *sizes = np.frombuffer(data, "<u8", 3 + width).tolist()
    if kept > n or common >> (8 * width):
        raise ValueError(f"{kept:,} numbers beside {common:#x}, of {n:,} with {width} bytes each")
    whole = [0 if kept == n else -(-n // 8), *[kept] * width]
    if sum(sizes) != len(data) - 8 * (3 + width) or any(
        size > most for size, most in zip(sizes, whole, strict=True)
    ):
        raise ValueError(f"parts of {sizes} bytes in {len(data):,}")
    place, parts = 8 * (3 + width), []
    for size, most in zip(sizes, whole, strict=True):
        part = memoryview(data)[place : place + size]
        place += size
        found = part if size == most else expanded(part, most)
        parts.append(np.frombuffer(found, np.uint8))
    bitmap, *planes = parts
    numbers = _joined(planes, bits.dtype)
    if kept == n:
        bits[...] = numbers
        return
    where = np.flatnonzero(np.unpackbits(bitmap, bitorder="little").view(bool))  # 6 times as fast
    if len(where) != kept or (kept and where[-1] >= n):
        raise ValueError(f"a bitmap of {len(where):,} numbers, not of {kept:,}")
    bits[...] = common
    bits[where] = numbers


def _planes_way(bits: np.ndarray, common: int | None) -> Way:
    """Which of bitmap and planes are worth compressing."""
    way = Way(PLANES, common, (False,) * bits.itemsize)
    _, *parts = _pack(bits, way)
    bitmap, *planes = (
        len(part) > 0 and _size(_shorter(part)) < _WORTH * len(part) for part in parts
    )
    return Way(PLANES, common, tuple(planes), bitmap)


def _common(bits: np.ndarray) -> int | None:
    """The most common number, where leaving it out saves more than the bitmap takes."""
    sample = bits[:: max(1, len(bits) // _COMMON_OF)]
    found, counts = np.unique(sample, return_counts=True)
    most = int(counts.argmax())
    saved = int(counts[most]) * bits.itemsize
    return int(found[most]) if saved > len(sample) / 8 else None


def _planes(bits: np.ndarray) -> list[np.ndarray]:
    """Byte 0 of all numbers, byte 1 of all, ...: uint8, one after the other."""
    kind = bits.dtype.type
    return [(bits >> kind(8 * place)).astype(np.uint8) for place in range(bits.itemsize)]


def _joined(planes: Sequence[np.ndarray], dtype: np.dtype[Any]) -> np.ndarray:
    """What `_planes` took apart."""
    numbers = planes[0].astype(dtype)
    for place, plane in enumerate(planes[1:], 1):
        numbers |= plane.astype(dtype) << dtype.type(8 * place)
    return numbers


def _bits(numbers: np.ndarray) -> np.ndarray:
    """The numbers' bit patterns, in a row: the same memory."""
    return numbers.reshape(-1).view(f"<u{numbers.itemsize}")


def _shorter(part: np.ndarray) -> Any:
    """A frame of these bytes, or they themselves where it is no shorter."""
    frame = compressed(part)
    return frame if len(frame) < len(part) else part


def _size(part: Any) -> int:
    return part.nbytes if isinstance(part, np.ndarray) else len(part)


def compressed(part: np.ndarray) -> bytes:
    """A Zstandard frame of an array's bytes."""
    found: bytes = _codec().compress(part, asbytes=True)
    return found


def expanded(data: Any, size: int) -> Any:
    """What a frame holds, which must be so many bytes; no more than these are taken.

    Raises:
        ValueError: It is no frame, or of more or fewer.
    """
    if not size:
        raise ValueError("a frame of nothing")
    try:
        return _codec().decompress(data, decompressed_size=size)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(str(error)) from None


@functools.cache
def _codec() -> Any:
    return pa.Codec("zstd", compression_level=_LEVEL)
