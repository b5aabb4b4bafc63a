"""A real server on a real socket, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from dualform.engine.messages.catalog import Catalog, Limits
from dualform.serve import ServerConfig, ServerLimits
from dualform.serve.server import Server
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class Served:
    """A running server and one client channel to it."""

    address: str
    channel: grpc.Channel
    catalog: Catalog
    config: ServerConfig
    server: Server
    loop: asyncio.AbstractEventLoop

    def reload(self, config: ServerConfig | None = None) -> None:
        """What SIGHUP does."""
        reloaded = self.server.reload(config or self.config)
        asyncio.run_coroutine_threadsafe(reloaded, self.loop).result(60)

    @property
    def stub(self) -> attribution_pb2_grpc.AttributionServiceStub:
        return attribution_pb2_grpc.AttributionServiceStub(self.channel)

    def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status)


@contextmanager
def serving(
    indexes: Mapping[str, Path],
    limits: ServerLimits | None = None,
    catalog_type: type[Catalog] = Catalog,
    credentials: grpc.ChannelCredentials | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Serve on a free port; drain at the end.

    Args:
        indexes: By name.
        limits: The server's.
        catalog_type: Answers.
        credentials: For the client's channel.
        settings: Other fields of ServerConfig.
    """
    config = ServerConfig(
        indexes, listen="127.0.0.1:0", limits=limits or ServerLimits(), **settings
    )
    served_limits = config.limits
    catalog = catalog_type(
        indexes,
        limits=Limits(
            served_limits.max_k, served_limits.max_queries, served_limits.max_message_mib
        ),
    )
    ready = threading.Event()
    ends: list[Callable[[], object]] = []
    address: list[str] = []
    running: list[Any] = []
    failure: list[BaseException] = []

    async def main() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(told.set))
        server = Server(config, catalog)
        running[:] = [server, loop]
        address.append(await server.start())
        ready.set()
        await told.wait()
        hurry = asyncio.Event()
        hurry.set()
        await server.drain(hurry)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30)
        assert not failure, failure
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        with (
            grpc.insecure_channel(address[0], options=options)
            if credentials is None
            else grpc.secure_channel(address[0], credentials, options=options)
        ) as channel:
            yield Served(address[0], channel, catalog, config, *running)
    finally:
        for end in ends:
            with suppress(RuntimeError):  # it has ended, and `failure` says why
                end()
        thread.join(60)
    assert not thread.is_alive()
    assert not failure, failure


@dataclass(frozen=True)
class Refusal:
    """What a client learns from a failed call."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: list[str]
    retry_after: float | None = None


def refusal(call: Callable[[], Any]) -> Refusal:
    """Make a call that must fail, and read its rich status."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error.code()} {error.details()}"
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for message in (info, bad, retry):
            detail.Unpack(message)
    assert info.domain == "dualform"
    assert status.message == error.details()
    fields = [violation.field for violation in bad.field_violations]
    after = retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else None
    return Refusal(error.code(), status.message, info.reason, fields, after)


def tensor(array: np.ndarray) -> pb.Tensor:
    """A numpy array as the wire has it, written down independently of the code under test."""
    names = {"float32": 1, "float64": 2, "int32": 3, "int64": 4}
    return pb.Tensor(
        dtype=names[array.dtype.name], shape=array.shape, data=np.ascontiguousarray(array).tobytes()
    )


def array(tensor: pb.Tensor) -> np.ndarray:
    """The inverse of `tensor`."""
    names = {1: "<f4", 2: "<f8", 3: "<i4", 4: "<i8"}
    return np.frombuffer(tensor.data, names[tensor.dtype]).reshape(tuple(tensor.shape))


def column(column: pb.Column) -> list[Any]:
    """A metadata column as Python values, None where null."""
    if column.type == pb.COLUMN_TYPE_STRING:
        codes = np.frombuffer(column.data, "<i4")
        values = [column.dictionary[code] if column.dictionary else None for code in codes]
    elif column.type == pb.COLUMN_TYPE_INT64:
        values = np.frombuffer(column.data, "<i8").tolist()
    elif column.type == pb.COLUMN_TYPE_DOUBLE:
        values = np.frombuffer(column.data, "<f8").tolist()
    else:
        values = [bool(value) for value in column.data]
    if not column.valid:
        return values
    return [value if valid else None for value, valid in zip(values, column.valid, strict=True)]
