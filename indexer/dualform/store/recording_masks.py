"""Bitmaps that two records share: what is zero of a layer's values after ReLU is, of the next
layer's keys too.

A record packed as `masked` is one packed as `planes` without its bitmap, and says where in the same
file that lies (docs/format-recording.md, *Packing*).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

MASKED = "masked"

_ELSEWHERE = struct.Struct("<QQ")
"""At which byte of the .bin file the bitmap starts, and its bytes there."""

_SIZE = struct.Struct("<Q")
_SIZE_AT = 16  # of the bitmap, in the header of planes

_RECENT = 4
"""So many bitmaps are remembered: a layer's values and the next one's keys are neighbours."""


class RecentMasks:
    """The bitmaps of the records that were packed last."""

    def __init__(self) -> None:
        self._recent: deque[tuple[bytes, int]] = deque(maxlen=_RECENT)

    def clear(self) -> None:
        """Another file begins."""
        self._recent.clear()

    def shorten(self, data: bytes, width: int, place: int) -> bytes | None:
        """A record packed as planes, as `masked`; None where its bitmap is none of the last ones.

        Args:
            data: The record.
            width: Bytes of its numbers.
            place: Where it is going to lie.
        """
        start = _header_bytes(width)
        size = _SIZE.unpack_from(data, _SIZE_AT)[0]
        if size <= _ELSEWHERE.size:
            return None
        bitmap = data[start : start + size]
        for known, where in self._recent:
            if known == bitmap:
                head = _with_size(data[:start], 0)
                return _ELSEWHERE.pack(where, size) + head + data[start + size :]
        self._recent.append((bitmap, place + start))
        return None


def with_mask(
    data: bytes | bytearray, width: int, numbers: int, read: Callable[[int, int], bytes | bytearray]
) -> bytes:
    """A record packed as `masked`, as planes.

    Args:
        data: The record.
        width: Bytes of its numbers.
        numbers: How many there are.
        read: So many bytes of its file from a place on.

    Raises:
        ValueError: It is something else.
    """
    start = _ELSEWHERE.size + _header_bytes(width)
    if len(data) < start:
        raise ValueError(f"{len(data):,} bytes hold no header")
    place, size = _ELSEWHERE.unpack_from(data)
    if size > -(-numbers // 8) or place >= 2**62:
        raise ValueError(f"a bitmap of {size:,} bytes at byte {place:,} for {numbers:,} numbers")
    head = _with_size(bytes(data[_ELSEWHERE.size : start]), size)
    return head + read(place, size) + data[start:]


def _header_bytes(width: int) -> int:
    return 8 * (3 + width)


def _with_size(header: bytes, size: int) -> bytes:
    return header[:_SIZE_AT] + _SIZE.pack(size) + header[_SIZE_AT + _SIZE.size :]
