"""The service's methods: bytes in, an answer from the catalog, bytes out.

Requests are answered and encoded in the scan's thread, so the event loop stays free for health
checks whatever is asked. Decoded there too, but for those of up to 1 MiB that may be answered
together: whether they are alike must be known before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualform.engine.errors import DataLossError, EngineError, InvalidArgumentError
from dualform.engine.messages.catalog import Catalog
from dualform.serve.joined import MOST_BYTES, JoinedScans
from dualform.serve.scans import ScanQueue, Stop
from dualform.serve.status import Refusal, or_refusal, refuse
from dualform.v1 import attribution_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AttributionService"]
# Answered from memory, at once, however long the queue is.
CHEAP = frozenset({"ListIndexes", "GetIndex"})
# Answered together where they differ in nothing but their queries.
JOINED = frozenset({"TopK", "Sums", "DualOutput"})

_LOG = logging.getLogger("dualform.serve")
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def attribution_handlers(
    catalog: Catalog, scans: ScanQueue, damage_found: Callable[[], Awaitable[None]]
) -> grpc.GenericRpcHandler[bytes, bytes]:
    """Handlers of every method of `dualform.v1.AttributionService`.

    Args:
        catalog: Answers.
        scans: Runs what is not cheap.
        damage_found: Awaited after an answer failed because of a damaged file.
    """

    handlers = {}
    for method in SERVICE.methods:
        own = (method.name, method.input_type.name, catalog, scans, damage_found)
        handlers[method.name] = (
            grpc.unary_stream_rpc_method_handler(_stream_handler(*own))
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler(_handler(*own))
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _handler(
    method: str,
    request_name: str,
    catalog: Catalog,
    scans: ScanQueue,
    damage_found: Callable[[], Awaitable[None]],
) -> Callable[[bytes, _Context], Awaitable[bytes]]:
    def answer(data: bytes, stop: Stop | None) -> bytes:
        request = _decoded(request_name, data)
        return bytes(catalog.answer(request, stop).SerializeToString())

    def answer_all(requests: Sequence[Any], stop: Stop) -> list[bytes | Refusal]:
        if len(requests) == 1:
            return [bytes(catalog.answer(requests[0], stop).SerializeToString())]
        return [
            Refusal.of(found) if isinstance(found, EngineError) else found.SerializeToString()
            for found in catalog.answer_together(requests, stop)
        ]

    joined = JoinedScans(scans, answer_all, method)

    async def answered(data: bytes) -> bytes | Refusal:
        if method in CHEAP:
            return or_refusal(method, lambda: answer(data, None))
        if method in JOINED and len(data) <= MOST_BYTES:
            request = or_refusal(method, lambda: _decoded(request_name, data))
            if isinstance(request, Refusal):
                return request
            key = _key(method, request)
            return await joined.run(key, request, len(data))
        return await scans.run(lambda stop: answer(data, stop), what=method)

    async def handle(data: bytes, context: _Context) -> bytes:
        found = await answered(data)
        if isinstance(found, Refusal):
            await _refuse(method, found, context, damage_found)
            return b""
        return found

    return handle


def _stream_handler(
    method: str,
    request_name: str,
    catalog: Catalog,
    scans: ScanQueue,
    damage_found: Callable[[], Awaitable[None]],
) -> Callable[[bytes, _Context], AsyncIterator[bytes]]:
    """An answer in parts: each is computed once the client has taken the one before."""

    async def handle(data: bytes, context: _Context) -> AsyncIterator[bytes]:
        current: list[Stop] = []
        parts: Iterator[Any] | None = None

        def next_part(stop: Stop) -> bytes | None:
            nonlocal parts
            current[:] = [stop]
            if parts is None:
                parts = catalog.stream(_decoded(request_name, data), lambda: current[0]())
            part = next(parts, None)
            return None if part is None else bytes(part.SerializeToString())

        with scans.stream() as refused:
            part: bytes | Refusal | None = refused or await scans.run(next_part, what=method)
            while isinstance(part, bytes):
                yield part
                part = await scans.run(next_part, what=method, admitted=True)
        if part is not None:
            await _refuse(method, part, context, damage_found)

    return handle


def _key(method: str, request: Any) -> bytes:
    """The same for requests that differ in nothing but their queries."""
    alike = type(request)()
    alike.CopyFrom(request)
    alike.ClearField("queries")
    return method.encode() + bytes(alike.SerializeToString(deterministic=True))


def _decoded(request_name: str, data: bytes) -> Any:
    try:
        return getattr(pb, request_name).FromString(data)
    except DecodeError:
        raise InvalidArgumentError(
            f"the bytes are no {request_name}, or its filter is nested too deep",
            reason="UNREADABLE",
        ) from None


async def _refuse(
    method: str,
    refusal: Refusal,
    context: _Context,
    damage_found: Callable[[], Awaitable[None]],
) -> None:
    if refusal.code == DataLossError.code:
        _LOG.error("%s met a damaged index: %s", method, refusal.message)
        await damage_found()
    refuse(context, refusal)
