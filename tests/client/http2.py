"""Just enough of HTTP/2 to answer like a proxy, or like nothing that gRPC knows."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
GRPC = (("content-type", "application/grpc"),)
# What is sent on a stream as the answer to a request's body.
Answer = Callable[[int, bytes], bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113, section 4.1."""
    head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags))
    return head + struct.pack(">I", stream) + payload


def headers(stream: int, *pairs: tuple[str, str], end: bool = False) -> bytes:
    """A header block of literals without indexing (RFC 7541, section 6.2.2)."""
    block = b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in pairs
    )
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block)


def status(code: int, *more: tuple[str, str], page: bytes = b"") -> Answer:
    """An answer in HTTP alone, as a proxy's page of an error."""

    def answer(stream: int, body: bytes = b"") -> bytes:
        head = headers(stream, (":status", str(code)), *more, end=not page)
        return head + (frame(DATA, END_STREAM, stream, page) if page else b"")

    return answer


def grpc_answer(*messages: bytes, code: str = "0") -> Answer:
    """An answer of gRPC's: so many messages, then the status."""

    def answer(stream: int, body: bytes = b"") -> bytes:
        parts = [b"\x00" + struct.pack(">I", len(message)) + message for message in messages]
        return (
            headers(stream, (":status", "200"), *GRPC)
            + b"".join(frame(DATA, 0, stream, part) for part in parts)
            + headers(stream, ("grpc-status", code), end=True)
        )

    return answer


@contextmanager
def http2(answer: Answer, calls: list[int] | None = None, greeting_s: float = 0.0) -> Iterator[str]:
    """Answers each call, once its body is there, with frames; yields "HOST:PORT".

    Args:
        answer: Makes the frames.
        calls: Gets the stream of each call.
        greeting_s: Before a connection's first word, seconds.
    """

    def speak(connection: socket.socket) -> None:
        _receive(connection, len(PREFACE))
        time.sleep(greeting_s)
        connection.sendall(frame(SETTINGS, 0, 0, b""))
        bodies: dict[int, bytes] = {}
        while True:
            head = _receive(connection, 9)
            size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = _receive(connection, size)
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            stream = int.from_bytes(head[5:], "big")
            if kind not in (HEADERS, DATA):
                continue
            bodies[stream] = bodies.get(stream, b"") + (payload if kind == DATA else b"")
            if payload and kind == DATA:
                room = struct.pack(">I", len(payload))
                connection.sendall(frame(WINDOW_UPDATE, 0, 0, room))
            if flags & END_STREAM:
                if calls is not None:
                    calls.append(stream)
                connection.sendall(answer(stream, bodies.pop(stream)))

    with spoken(speak) as address:
        yield address


@contextmanager
def spoken(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """Says to each connection what `speak` does; yields "HOST:PORT"."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError):
            speak(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads: list[threading.Thread] = []
        connections: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    threads.append(threading.Thread(target=serve, args=connections[-1:]))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join(20)
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(20)


def _receive(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        some = connection.recv(size - len(found))
        if not some:
            raise EOFError
        found += some
    return found
