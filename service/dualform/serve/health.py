"""Health after grpc.health.v1: one service per index, one for the API, and "" for the server.

An index is SERVING while it is open and nothing damaged was met in it. The API, and with it the
server, is SERVING while at least one index is.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dualform.engine.messages.catalog import Catalog
from dualform.serve.handlers import SERVICE

HEALTH_SERVICE = health.SERVICE_NAME


def index_service(name: str) -> str:
    """The service name under which health checks ask for one index."""
    return f"dualform.index.{name}"


class HealthBoard:
    """Shows the catalog's state to health checks."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        # Published stubs of this module do not know its asyncio half.
        module: Any = health
        self._servicer = _listing(module.aio.HealthServicer)()
        self._shown: set[str] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def refresh(self) -> None:
        """Set every status from what is known of the indexes now."""
        serving = False
        for name in self._catalog.names:
            healthy = self._catalog.reason(name) is None
            serving = serving or healthy
            await self._servicer.set(index_service(name), _status(healthy))
        names = set(self._catalog.names)
        for name in self._shown - names:
            await self._servicer.set(
                index_service(name), health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            )
        self._shown = names
        for name in ("", SERVICE.full_name):
            await self._servicer.set(name, _status(serving))

    async def drain(self) -> None:
        """NOT_SERVING for good: load balancers send nothing new."""
        await self._servicer.enter_graceful_shutdown()


def _listing(servicer: Any) -> Any:
    """The servicer with `List`, where the installed stubs have it and it does not."""

    class Listing(servicer):  # type: ignore[misc]
        async def List(self, request: Any, context: Any) -> Any:
            statuses: Any = self._server_status
            module: Any = health_pb2
            answers = {
                name: health_pb2.HealthCheckResponse(status=status)
                for name, status in statuses.items()
                if status != health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            }
            return module.HealthListResponse(statuses=answers)

    return Listing


def _status(healthy: bool) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    statuses = health_pb2.HealthCheckResponse
    return statuses.SERVING if healthy else statuses.NOT_SERVING
