"""A gRPC server of the test's own: does to each call what the test says, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from dualform.client import AsyncClient, Client
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc as rpc

ELSEWHERE = "192.0.2.1:50051"  # RFC 5737: no such machine
LIMITS = pb.Limits(max_k=100, max_queries=100, max_message_bytes=1 << 20)


@contextmanager
def answering(
    behave: Callable[[Any], None],
    *,
    credentials: Any = None,
    host: str = "127.0.0.1",
    options: tuple[tuple[str, int], ...] = (),
    path: Path | None = None,
) -> Iterator[str]:
    """Serves ListIndexes; yields "HOST:PORT", or "unix:PATH".

    Args:
        behave: Called with each call's context first: it may look at it, or abort.
        credentials: Of TLS.
        host: To listen on.
        options: gRPC's, of the server.
        path: Of a socket to listen on in place of `host`.
    """

    class Servicer(rpc.AttributionServiceServicer):  # type: ignore[misc]
        def ListIndexes(self, request: Any, context: Any) -> Any:
            behave(context)
            summary = pb.IndexSummary(name="here", health=pb.HEALTH_SERVING)
            return pb.ListIndexesResponse(indexes=[summary], limits=LIMITS)

    server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
    rpc.add_AttributionServiceServicer_to_server(Servicer(), server)
    listen = f"{host}:0" if path is None else f"unix:{path}"
    port = (
        server.add_insecure_port(listen)
        if credentials is None
        else server.add_secure_port(listen, credentials)
    )
    server.start()
    try:
        yield f"{host}:{port}" if path is None else listen
    finally:
        server.stop(0).wait()


def anyone(context: Any) -> None:
    """Answers."""


def ask_both(address: str, **settings: Any) -> None:
    """One call of each kind of client."""

    async def ask() -> list[Any]:
        async with AsyncClient(address, **settings) as client:
            return await client.indexes()

    with Client(address, **settings) as client:
        (there,) = client.indexes()
    assert there.name == "here"
    assert asyncio.run(ask()) == [there]


def wants_a_token(context: Any) -> None:
    sent = dict(context.invocation_metadata()).get("authorization")
    if sent is None:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
    if sent == "Bearer guest":
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not for guests")
    if sent != "Bearer let-me-in":
        abort(context, grpc.StatusCode.UNAUTHENTICATED, f"what is {len(sent)} long is not known")


def abort(context: Any, code: grpc.StatusCode, message: str, *details: Any) -> None:
    """End the call as the server does: with google.rpc details where there are any."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


def come_back(seconds: float) -> Any:
    """google.rpc.RetryInfo."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(seconds * 1e9))
    return info


def reason(word: str) -> Any:
    """google.rpc.ErrorInfo."""
    return error_details_pb2.ErrorInfo(reason=word, domain="dualform")
