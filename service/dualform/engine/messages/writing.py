"""Large answers as bytes, piece by piece: protobuf writes 60 MB in one call, which nobody can give
up, and writes them all to say how many they are.

The bytes are protobuf's (https://protobuf.dev/programming-guides/encoding): messages that hold
arrays are opened, an array's data is taken as it is, and all else is left to protobuf.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any, TypeAlias

from dualform.engine.memory.shards import Stop, check_stop
from dualform.v1 import attribution_pb2 as pb

_LENGTH_FOLLOWS = 2
_BYTES = {
    pb.DATA_TYPE_FLOAT32: 4,
    pb.DATA_TYPE_FLOAT64: 8,
    pb.DATA_TYPE_INT32: 4,
    pb.DATA_TYPE_INT64: 8,
}
_LARGE = {pb.Tensor.DESCRIPTOR, pb.Column.DESCRIPTOR, pb.Example.DESCRIPTOR}

# How many bytes, and what makes them.
_Piece: TypeAlias = tuple[int, Callable[[], bytes]]


def write(message: Any, stop: Stop | None = None) -> bytes:
    """What `message.SerializeToString()` returns.

    Args:
        message: One whose arrays have as many bytes as their shapes say.
        stop: Asked between two pieces.

    Raises:
        CancelledError: `stop` returned True.
    """
    whole = io.BytesIO()  # not a list of pieces, joined: each would be there twice
    for _, made in _pieces(message):
        piece = made()
        check_stop(stop)
        whole.write(piece)
        check_stop(stop)
    return whole.getvalue()


def size(message: Any) -> int:
    """What `message.ByteSize()` returns, of the same messages."""
    return sum(size for size, _ in _pieces(message))


def _pieces(message: Any) -> list[_Piece]:
    if isinstance(message, pb.Tensor) and message.dtype in _BYTES:
        head = pb.Tensor(dtype=message.dtype, shape=message.shape).SerializeToString()
        length = _BYTES[message.dtype] * prod(message.shape)
        if not length:
            return [_known(head)]
        head += _begun(pb.Tensor.DATA_FIELD_NUMBER, length)
        return [_known(head), (length, partial(getattr, message, "data"))]
    if not _holds_arrays(message.DESCRIPTOR):
        return [(message.ByteSize(), message.SerializeToString)]
    found: list[_Piece] = []
    for field, value in message.ListFields():
        if field.message_type is None or not _is_large(field.message_type):
            found.append(_known(type(message)(**{field.name: value}).SerializeToString()))
            continue
        for inner in [value] if hasattr(value, "ListFields") else value:
            pieces = _pieces(inner)
            found += [_known(_begun(field.number, sum(size for size, _ in pieces))), *pieces]
    return found


def _known(piece: bytes) -> _Piece:
    return len(piece), lambda: piece


@cache
def _holds_arrays(kind: Any) -> bool:
    return any(
        field.message_type is not None and _is_large(field.message_type) for field in kind.fields
    )


def _is_large(kind: Any) -> bool:
    return kind in _LARGE or _holds_arrays(kind)


def _begun(number: int, length: int) -> bytes:
    """What stands before so many bytes of a field."""
    return _varint(number << 3 | _LENGTH_FOLLOWS) + _varint(length)


def _varint(value: int) -> bytes:
    """The lowest seven bits first, with the eighth set where more follow."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
