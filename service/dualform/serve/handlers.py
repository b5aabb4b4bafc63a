"""The service's methods: bytes in, an answer from the catalog, bytes out.

Requests are answered and encoded in the scan's thread, so the event loop stays free for health
checks whatever is asked. Decoded there too, but for those of up to 1 MiB that may be answered
together: whether they are alike must be known before.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualform.engine.errors import DataLossError, EngineError, InvalidArgumentError
from dualform.engine.messages.catalog import Catalog
from dualform.serve.joined import MOST_BYTES, JoinedScans
from dualform.serve.scans import ScanQueue, Stop
from dualform.serve.status import abort, internal_error
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

    def answer_all(requests: Sequence[Any], stop: Stop) -> Sequence[bytes | EngineError]:
        if len(requests) == 1:
            return [bytes(catalog.answer(requests[0], stop).SerializeToString())]
        return [
            found if isinstance(found, EngineError) else bytes(found.SerializeToString())
            for found in catalog.answer_together(requests, stop)
        ]

    joined = JoinedScans(scans, answer_all)
    handlers = {}
    for method in SERVICE.methods:
        own = (method.name, method.input_type.name, catalog, scans, damage_found)
        handlers[method.name] = (
            grpc.unary_stream_rpc_method_handler(_stream_handler(*own))
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler(_handler(*own, joined))
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _handler(
    method: str,
    request_name: str,
    catalog: Catalog,
    scans: ScanQueue,
    damage_found: Callable[[], Awaitable[None]],
    joined: JoinedScans,
) -> Callable[[bytes, _Context], Awaitable[bytes]]:
    def answer(data: bytes, stop: Stop | None) -> bytes:
        request = _decoded(request_name, data)
        return bytes(catalog.answer(request, stop).SerializeToString())

    async def handle(data: bytes, context: _Context) -> bytes:
        try:
            if method in CHEAP:
                return answer(data, None)
            if method in JOINED and len(data) <= MOST_BYTES:
                request = _decoded(request_name, data)
                return await joined.run(_key(method, request), request, len(data))
            return await scans.run(lambda stop: answer(data, stop))
        except Exception as error:
            refusal = error
        raise await _refused(method, refusal, context, damage_found)

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

        try:
            with scans.stream():
                part = await scans.run(next_part)
                while part is not None:
                    yield part
                    part = await scans.run(next_part, admitted=True)
            return
        except Exception as error:
            refusal = error
        raise await _refused(method, refusal, context, damage_found)

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


async def _refused(
    method: str,
    error: Exception,
    context: _Context,
    damage_found: Callable[[], Awaitable[None]],
) -> AssertionError:
    """End the call with what the error tells its caller."""
    if isinstance(error, EngineError):
        refusal = error
    else:
        ticket = secrets.token_hex(4)
        _LOG.error("%s failed [%s]", method, ticket, exc_info=error)
        refusal = internal_error(ticket)
    if isinstance(refusal, DataLossError):
        _LOG.error("%s met a damaged index: %s", method, refusal)
        await damage_found()
    await abort(context, refusal)
    return AssertionError("abort always raises")
