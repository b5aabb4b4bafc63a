"""How a request gets its answer: over gRPC, over asyncio gRPC, or in this process.

One small seam: everything above it is the same for all three.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from dualform.client.errors import DualformError, InvalidArgumentError, error_from_code
from dualform.v1 import attribution_pb2 as pb
from dualform.v1.attribution_pb2_grpc import AttributionServiceStub

_METHODS = {
    method.input_type.full_name: method.name
    for method in pb.DESCRIPTOR.services_by_name["AttributionService"].methods
}
_OPTIONS = (
    # What the server sends, the server has bounded.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Retries are the client's own: they can be seen, set and turned off.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


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
    """A blocking channel; safe to use from several threads."""

    def __init__(self, server: str) -> None:
        self._server = checked_address(server)
        self._channel = grpc.insecure_channel(server, options=_OPTIONS)
        self._stub = _stub(self._channel)

    def call(self, request: Message, timeout: float | None) -> Any:
        try:
            return getattr(self._stub, method_of(request))(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_of(error, self._server) from None

    def stream(self, request: Message, timeout: float | None) -> Generator[Any, None, None]:
        call = getattr(self._stub, method_of(request))(request, timeout=timeout)
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_of(error, self._server) from None
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """An asyncio channel, opened by the first call, in its event loop."""

    def __init__(self, server: str) -> None:
        self._server = checked_address(server)
        self._channel: Any = None
        self._stub: Any = None

    async def call(self, request: Message, timeout: float | None) -> Any:
        try:
            return await self._method(request)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_of(error, self._server) from None

    async def stream(self, request: Message, timeout: float | None) -> AsyncGenerator[Any, None]:
        call = self._method(request)(request, timeout=timeout)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise error_of(error, self._server) from None
        finally:
            call.cancel()

    def _method(self, request: Message) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._server, options=_OPTIONS)
            self._stub = _stub(self._channel)
        return getattr(self._stub, method_of(request))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


def method_of(request: Message) -> str:
    """The rpc that takes this request."""
    return _METHODS[request.DESCRIPTOR.full_name]


def checked_address(server: str) -> str:
    """`server`, if it can be one.

    Raises:
        InvalidArgumentError: No port (gRPC would take 443), or a URL.
    """
    if not isinstance(server, str) or not re.fullmatch(
        r"(?!https?:)((unix|unix-abstract|dns|ipv4|ipv6|xds|vsock):.+|.+:\d{1,5})", server
    ):
        raise InvalidArgumentError(
            f"server={server!r} is no address; HOST:PORT is needed, such as localhost:50051",
            field="server",
        )
    return server


def error_of(error: Any, server: str) -> DualformError:
    """A failed call as one of our errors, with the server's reason and field if it sent them."""
    code = error.code().name
    message = error.details() or code
    reason = field = None
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            reason, field = _details(value)
    if code == "UNAVAILABLE" and reason is None:
        message = (
            f"no server answers at {server} ({message}); is `dualform serve` running there, and "
            "is the address right?"
        )
    return error_from_code(code, message, reason=reason, field=field)


def _stub(channel: Any) -> Any:
    make: Any = AttributionServiceStub
    return make(channel)


def _details(value: bytes) -> tuple[str | None, str | None]:
    reason = field = None
    for detail in status_pb2.Status.FromString(value).details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
    return reason or None, field or None
