"""How a request gets its answer: over gRPC, over asyncio gRPC, or in this process.

One small seam: everything above it is the same for all three.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from dualform.client._between import error_between
from dualform.client._connection import TOKEN, Connection
from dualform.client._fork import use_asyncio, use_channels
from dualform.client.errors import (
    CancelledError,
    DualformError,
    FailedPreconditionError,
    InternalError,
    bad_answer,
    error_from_code,
)
from dualform.v1 import attribution_pb2 as pb
from dualform.v1.attribution_pb2_grpc import AttributionServiceStub

_METHODS = {
    method.input_type.full_name: method.name
    for method in pb.DESCRIPTOR.services_by_name["AttributionService"].methods
}


# Metadata in which the server says what its log calls the call.
_REQUEST_ID = "x-request-id"
_CLOSED = "this client was closed while it asked; make a new one"


class Transport(Protocol):
    """Answers one request."""

    def call(self, request: Message, timeout: float | None) -> Any:
        """The response message. Raises DualformError; `timeout` in seconds, None for no limit."""

    def stream(self, request: Message, timeout: float | None) -> Generator[Any, None, None]:
        """The response messages of an answer in parts; closing it gives the rest up."""

    def close(self) -> None:
        """Gives back what is held."""


class AsyncTransport(Protocol):
    """Answers one request in an event loop."""

    async def call(self, request: Message, timeout: float | None) -> Any:
        """As Transport.call."""

    def stream(self, request: Message, timeout: float | None) -> AsyncGenerator[Any, None]:
        """As Transport.stream."""

    async def close(self) -> None:
        """As Transport.close."""


class GrpcTransport:
    """A blocking channel; safe to use from several threads, and in a child after a fork.

    A child opens a channel of its own: two processes on one socket would read each other's answers.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inherited: list[Any] = []
        self._open()

    def call(self, request: Message, timeout: float | None) -> Any:
        try:
            return self._method(request)(
                request, timeout=timeout, metadata=self._connection.metadata
            )
        except grpc.RpcError as error:
            raise error_of(error, self._connection, timeout) from None
        except ValueError as error:  # its channel was closed meanwhile
            raise closed_meanwhile(error) from None

    def stream(self, request: Message, timeout: float | None) -> Generator[Any, None, None]:
        try:
            call = self._method(request)(
                request, timeout=timeout, metadata=self._connection.metadata
            )
        except ValueError as error:
            raise closed_meanwhile(error) from None
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_of(error, self._connection, timeout) from None
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def _open(self) -> None:
        use_channels()
        self._process = os.getpid()
        self._channel = self._connection.channel()
        self._stub = _stub(self._channel)

    def _method(self, request: Message) -> Any:
        if self._process != os.getpid():
            # Kept: closing it would say good-bye on the parent's socket.
            self._inherited.append((self._channel, self._stub))
            self._open()
        return getattr(self._stub, method_of(request))


class AsyncGrpcTransport:
    """A channel for each event loop that asks, opened by its first call.

    Loops may come one after the other (`asyncio.run` twice) or run in several threads at once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inherited: list[Any] = []
        self._closed = False
        self._start()

    async def call(self, request: Message, timeout: float | None) -> Any:
        try:
            call = self._method(request)(
                request, timeout=timeout, metadata=self._connection.metadata
            )
            with self._running(call):
                return await _outcome(call)
        except grpc.RpcError as error:
            raise error_of(error, self._connection, timeout) from None
        except grpc.aio.UsageError as error:
            raise closed_meanwhile(error) from None
        except KeyError as error:
            raise _unknown_status(error) from None

    async def stream(self, request: Message, timeout: float | None) -> AsyncGenerator[Any, None]:
        try:
            call = self._method(request)(
                request, timeout=timeout, metadata=self._connection.metadata
            )
        except grpc.aio.UsageError as error:
            raise closed_meanwhile(error) from None
        parts = aiter(call)
        try:
            with self._running(call):
                while True:
                    yield await _outcome(anext(parts))
        except StopAsyncIteration:
            return
        except grpc.RpcError as error:
            raise error_of(error, self._connection, timeout) from None
        except KeyError as error:
            raise _unknown_status(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            opened = self._of_loop.pop(asyncio.get_running_loop(), None)
            self._of_loop.clear()
        if opened is not None:
            channel, _, calls = opened
            for call in list(calls):  # an older gRPC's own close misses some
                call.cancel()
            await channel.close()
        # Other loops' channels close once nobody holds them: when their running calls are done.

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        # A channel, its stub, and the calls that run.
        self._of_loop: dict[asyncio.AbstractEventLoop, tuple[Any, Any, set[Any]]] = {}

    @contextmanager
    def _running(self, call: Any) -> Iterator[None]:
        opened = self._of_loop.get(asyncio.get_running_loop())
        calls = set() if opened is None else opened[2]
        calls.add(call)
        try:
            yield
        finally:
            calls.discard(call)

    def _method(self, request: Message) -> Any:
        use_asyncio()
        loop = asyncio.get_running_loop()
        if self._process != os.getpid():
            self._inherited.append(self._of_loop)
            self._start()
        with self._lock:
            if self._closed:  # between two tries, or two parts of a question
                raise _closed()
            for other in [other for other in self._of_loop if other.is_closed()]:
                del self._of_loop[other]
            if loop not in self._of_loop:
                channel = self._connection.channel_of_loop()
                self._of_loop[loop] = (channel, _stub(channel), set())
            return getattr(self._of_loop[loop][1], method_of(request))


def method_of(request: Message) -> str:
    """The rpc that takes this request."""
    return _METHODS[request.DESCRIPTOR.full_name]


def error_of(error: Any, connection: Connection, timeout: float | None) -> DualformError:
    """A failed call as one of our errors, with what the server sent along, if it did.

    `timeout` is what the call had, seconds.
    """
    code = error.code().name
    message = error.details() or code
    sent = _Details()
    request_id: str | None = None
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            sent = _details(value)
        elif key == _REQUEST_ID and isinstance(value, str):
            request_id = value
    if sent.reason is None:
        between = error_between(code, message, connection, timeout)
        if between is not None:
            between.retry_after, between.request_id = sent.retry_after, request_id
            return between
    if code == "UNAUTHENTICATED" and sent.reason is None and not connection.metadata:
        message = f"{message}; give a token: token=, or {TOKEN} in the environment"
    return error_from_code(
        code,
        message,
        reason=sent.reason,
        field=sent.field,
        retry_after=sent.retry_after,
        request_id=request_id,
    )


def closed_meanwhile(error: Exception) -> DualformError:
    """A call that met a channel which another thread or task had closed."""
    if "closed" in str(error):
        return _closed()
    return InternalError(f"{type(error).__name__}: {error}")


async def _outcome(waited: Awaitable[Any]) -> Any:
    """What comes of a call: closing its channel cancels it, and not the task that waits for it.

    Raises:
        CancelledError: Its channel was closed; asyncio's, where the task is cancelled.
    """
    # Cancelled with the task, a gather raises that; of a call that is cancelled it says so.
    found: Any = (await asyncio.gather(waited, return_exceptions=True))[0]
    if isinstance(found, asyncio.CancelledError):
        raise CancelledError(_CLOSED)
    if isinstance(found, BaseException):
        raise found
    return found


def _closed() -> FailedPreconditionError:
    return FailedPreconditionError(_CLOSED, reason="CLOSED")


def _unknown_status(error: KeyError) -> InternalError:
    """What the asyncio of older gRPC makes of a status that is none of its codes."""
    return bad_answer(f"it ends with the status {error}, which is none of gRPC's")


@dataclass(frozen=True)
class _Details:
    """What a server sends beside code and message; seconds."""

    reason: str | None = None
    field: str | None = None
    retry_after: float | None = None


def _stub(channel: Any) -> Any:
    make: Any = AttributionServiceStub
    return make(channel)


def _details(value: object) -> _Details:
    """What of the details can be read; the rest is left out, since code and message say enough."""
    found, status = _Details(), status_pb2.Status()
    if not isinstance(value, bytes) or not _parsed(status, value):
        return found
    for detail in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        again = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR) and _parsed(info, detail.value):
            found = replace(found, reason=info.reason or None)
        elif detail.Is(bad.DESCRIPTOR) and _parsed(bad, detail.value) and bad.field_violations:
            found = replace(found, field=bad.field_violations[0].field or None)
        elif detail.Is(again.DESCRIPTOR) and _parsed(again, detail.value):
            seconds = again.retry_delay.seconds + again.retry_delay.nanos * 1e-9
            found = replace(found, retry_after=max(0.0, seconds))
    return found


def _parsed(message: Message, value: bytes) -> bool:
    try:
        message.ParseFromString(value)
    except DecodeError:
        return False
    return True
