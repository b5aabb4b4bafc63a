"""HTTP/2 by hand: what no well-behaved client sends."""

from __future__ import annotations

import os
import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
FRAME = 1 << 14


def connect(address: str, *settings: tuple[int, int]) -> socket.socket:
    """A connection with these settings."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))
    )
    return connection


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of RFC 9113, section 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call(
    stream: int,
    path: str,
    message: bytes = b"",
    *more: tuple[str, str],
    compressed: bool = False,
) -> bytes:
    """A gRPC call of one message; headers are literals that no table keeps (RFC 7541, 6.2.2)."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]
    # As os.fsdecode has bytes that are no UTF-8.
    words = (os.fsencode(word) for header in headers for word in header)
    coded = [bytes([len(word)]) + word for word in words]
    block = b"".join(b"\0" + name + value for name, value in zip(*[iter(coded)] * 2, strict=True))
    body = struct.pack(">?I", compressed, len(message)) + message
    parts = [body[at : at + FRAME] for at in range(0, len(body), FRAME)]
    flags = [0] * (len(parts) - 1) + [END_STREAM]
    data = [frame(DATA, flag, stream, part) for flag, part in zip(flags, parts, strict=True)]
    return frame(HEADERS, END_HEADERS, stream, block) + b"".join(data)
