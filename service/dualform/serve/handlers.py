"""The service's methods: bytes in, an answer from the catalog, bytes out.

Requests are answered and encoded in the scan's thread, so the event loop stays free for health
checks whatever is asked. Decoded there too, but for those of up to 1 MiB that may be answered
together: whether they are alike must be known before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dualform.engine.errors import EngineError, InvalidArgumentError
from dualform.engine.messages.catalog import Catalog
from dualform.serve.calls import Answer, Call, Calls, Parts
from dualform.serve.costs import Experience, kind_of
from dualform.serve.joined import MOST_BYTES, JoinedScans
from dualform.serve.scans import Asker, ScanQueue, Stop
from dualform.serve.status import Refusal, or_refusal
from dualform.v1 import attribution_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AttributionService"]
# Answered from memory, at once, however long the queue is.
CHEAP = frozenset({"ListIndexes", "GetIndex"})
# Answered together where they differ in nothing but their queries.
JOINED = frozenset({"TopK", "Sums", "DualOutput"})

# Larger requests cost at least so many seconds per byte, which is known before they are decoded.
_SECONDS_PER_BYTE = 1e-8


def attribution_handlers(
    catalog: Catalog, scans: ScanQueue, calls: Calls
) -> grpc.GenericRpcHandler[bytes, bytes]:
    """Handlers of every method of `dualform.v1.AttributionService`.

    Args:
        catalog: Answers.
        scans: Runs what is not cheap.
        calls: What all methods share.
    """
    experience = Experience()
    handlers = {}
    for method in SERVICE.methods:
        own = (method.name, method.input_type.name, catalog, scans, experience)
        handlers[method.name] = (
            calls.stream(method.name, _parts(*own))
            if method.server_streaming
            else calls.unary(method.name, _answer(*own))
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _answer(
    method: str, request_name: str, catalog: Catalog, scans: ScanQueue, experience: Experience
) -> Answer:
    def answer(request: Any, stop: Stop | None) -> bytes:
        return bytes(catalog.answer(request, stop).SerializeToString())

    def answer_all(requests: Sequence[Any], stop: Stop) -> list[bytes | Refusal]:
        if len(requests) == 1:
            return [answer(requests[0], stop)]
        return [
            Refusal.of(found) if isinstance(found, EngineError) else found.SerializeToString()
            for found in catalog.answer_together(requests, stop)
        ]

    joined = JoinedScans(scans, answer_all, method)

    async def answered(call: Call, data: bytes) -> bytes | Refusal:
        if method not in CHEAP and len(data) > MOST_BYTES:
            call.asker.seconds = _SECONDS_PER_BYTE * len(data)
            decoded_there = lambda stop: answer(_decoded(request_name, data), stop)  # noqa: E731
            return await scans.run(decoded_there, what=method, asker=call.asker)
        request = or_refusal(method, lambda: _decoded(request_name, data))
        if isinstance(request, Refusal):
            return request
        if method in CHEAP:
            return or_refusal(method, lambda: answer(request, None))
        kind = kind_of(method, request)
        call.asker.seconds = experience.seconds(kind)
        if method in JOINED:
            key = _key(method, request)
            found = await joined.run(key, request, len(data), call.asker)
        else:
            asked = lambda stop: answer(request, stop)  # noqa: E731
            found = await scans.run(asked, what=method, asker=call.asker)
        if isinstance(found, bytes):
            experience.learn(kind, call.asker.computed_s)
        return found

    return answered


def _parts(
    method: str, request_name: str, catalog: Catalog, scans: ScanQueue, experience: Experience
) -> Parts:
    """An answer in parts: each is computed once the client has taken the one before."""

    async def sent(call: Call, data: bytes) -> AsyncGenerator[bytes | Refusal, None]:
        current: list[Stop] = []
        parts: list[Any] = []

        def next_part(stop: Stop) -> bytes | None:
            current[:] = [stop]
            if not parts:
                request = _decoded(request_name, data)
                parts.append(catalog.stream(request, lambda: current[0]()))
            part = next(parts[0], None)
            return None if part is None else bytes(part.SerializeToString())

        kind = (method, len(data).bit_length())
        asker = call.asker
        asker.seconds = experience.seconds(kind)
        with scans.stream(asker.connection) as refused:
            part: bytes | Refusal | None = refused
            if refused is None:
                part = await scans.run(next_part, what=method, asker=asker)
            while isinstance(part, bytes):
                yield part
                own = Asker(asker.client, asker.connection, experience.seconds(kind))
                part = await scans.run(next_part, what=method, asker=own, admitted=True)
                experience.learn(kind, own.computed_s)
                asker.computed_s += own.computed_s
        if part is not None:
            yield part

    return sent


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
