"""`dualform.v1.AdminService`: what an operator on this machine may tell a running server.

It has an address of its own, on loopback, where health is told too: without TLS and tokens, for
probes inside a container.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from dualform.engine.messages.versions import Change
from dualform.questions.quoted import unicode
from dualform.serve.access import request_id_of
from dualform.serve.config import ConfigError
from dualform.serve.health import HealthBoard
from dualform.serve.lasting import LastingServer
from dualform.serve.reading import compression
from dualform.serve.status import Refusal, refuse
from dualform.v1 import admin_pb2 as pb
from dualform.v1 import admin_pb2_grpc

Reload = Callable[[], Awaitable[Sequence[Change] | Refusal]]


class AdminServer:
    """Answers on its own address.

    Args:
        address: "HOST:PORT" on loopback; port 0 takes a free one.
        reload: Reads the configuration again.
        health: Told here too.
    """

    def __init__(self, address: str, reload: Reload, health: HealthBoard) -> None:
        self._address = address
        self._reload = reload
        self._health = health
        self._server = LastingServer(self._make, lambda server, at: server.add_insecure_port(at))
        self.address = address

    def _make(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *compression(grpc.__version__)])
        stubs: Any = admin_pb2_grpc
        stubs.add_AdminServiceServicer_to_server(_Servicer(self._reload), server)
        self._health.add_to(server)
        return server

    async def start(self) -> None:
        """Listen; `address` then has the port that was taken.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        port = self._server.listen(self._address)
        if port == 0:
            raise ConfigError(
                f"admin: cannot listen on {self._address}: the port is taken or the address is not "
                "of this machine"
            )
        self.address = f"{self._address.rpartition(':')[0]}:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Answer no more."""
        await self._server.stop(0)


class _Servicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, reload: Reload) -> None:
        self._reload = reload

    async def Reload(self, request: pb.ReloadRequest, context: Any) -> pb.ReloadResponse:
        found = await self._reload()
        if isinstance(found, Refusal):
            refuse(context, found, request_id_of(context.invocation_metadata()))
            return pb.ReloadResponse()
        return pb.ReloadResponse(changes=[_message(change) for change in found])


def _message(change: Change) -> pb.Change:
    return pb.Change(
        what=change.what,
        outcome=f"OUTCOME_{change.outcome.upper()}",
        version=change.version,
        detail=unicode(change.detail),
    )
