"""The service's methods: bytes in, an answer from the catalog, bytes out.

All methods share one path. Requests are decoded, answered and encoded in the scan's thread, so the
event loop stays free for health checks whatever is asked.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualform.engine.errors import DataLossError, EngineError, InvalidArgumentError
from dualform.engine.requests import Catalog
from dualform.serve.scans import ScanQueue, Stop
from dualform.serve.status import abort, internal_error
from dualform.v1 import attribution_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AttributionService"]
# Answered from memory, at once, however long the queue is.
CHEAP = frozenset({"ListIndexes", "GetIndex"})

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
    return grpc.method_handlers_generic_handler(
        SERVICE.full_name,
        {
            method.name: grpc.unary_unary_rpc_method_handler(
                _handler(method.name, method.input_type.name, catalog, scans, damage_found)
            )
            for method in SERVICE.methods
            if method.name not in ("Explain", "StreamWeights")
        },
    )


def _handler(
    method: str,
    request_name: str,
    catalog: Catalog,
    scans: ScanQueue,
    damage_found: Callable[[], Awaitable[None]],
) -> Callable[[bytes, _Context], Awaitable[bytes]]:
    request_type = getattr(pb, request_name)

    def answer(data: bytes, stop: Stop | None) -> bytes:
        try:
            request = request_type.FromString(data)
        except DecodeError:
            raise InvalidArgumentError(
                f"the bytes are no {request_name}, or its filter is nested too deep",
                reason="UNREADABLE",
            ) from None
        return bytes(catalog.answer(request, stop).SerializeToString())

    async def handle(data: bytes, context: _Context) -> bytes:
        try:
            if method in CHEAP:
                return answer(data, None)
            return await scans.run(lambda stop: answer(data, stop))
        except EngineError as error:
            refusal = error
        except Exception:
            ticket = secrets.token_hex(4)
            _LOG.exception("%s failed [%s]", method, ticket)
            refusal = internal_error(ticket)
        if isinstance(refusal, DataLossError):
            _LOG.error("%s met a damaged index: %s", method, refusal)
            await damage_found()
        await abort(context, refusal)
        raise AssertionError("abort always raises")

    return handle
