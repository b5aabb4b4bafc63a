"""Health after grpc.health.v1: one service per index, one for the API, and "" for the server.

An index is SERVING while it is open and nothing damaged was met in it. The API, and with it the
server, is SERVING while at least one index is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dualform.engine.messages.catalog import Catalog
from dualform.serve.access import Access, Client
from dualform.serve.handlers import SERVICE
from dualform.serve.status import Refusal

HEALTH_SERVICE = health.SERVICE_NAME
_MOST_NAMED = 8
_OF_INDEX = "dualform.index."
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def index_service(name: str) -> str:
    """The service name under which health checks ask for one index."""
    return f"{_OF_INDEX}{name}"


class HealthBoard:
    """Shows the catalog's state to health checks. Belongs to the event loop that refreshes it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._draining = False
        self.changed = asyncio.Event()
        """Set at the next change; another one waits for the one after."""
        self.statuses: dict[str, int] = {}
        """By service."""

    def add_to(self, server: grpc.aio.Server, access: Access | None = None) -> None:
        """Answer health checks there; with `access` about what the caller may ask about alone."""
        servicer = _Servicer(self, access)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    def refresh(self) -> None:
        """Set every status from what is known of the indexes now."""
        healthy = {name: self._catalog.reason(name) is None for name in self._catalog.names}
        found = {index_service(name): well for name, well in healthy.items()}
        for name in ("", SERVICE.full_name):
            found[name] = any(healthy.values())
        self._show({name: _status(well and not self._draining) for name, well in found.items()})

    def drain(self) -> None:
        """NOT_SERVING for good: load balancers send nothing new."""
        self._draining = True
        self._show(dict.fromkeys(self.statuses, _status(False)))

    def _show(self, statuses: dict[str, int]) -> None:
        if statuses != self.statuses:
            self.statuses = statuses
            self.changed.set()
            self.changed = asyncio.Event()


class _Servicer:
    """grpc.health.v1. The library's own holds a lock while it writes to whoever watches: one that
    does not read would keep every status from changing, and the server from draining."""

    def __init__(self, board: HealthBoard, access: Access | None) -> None:
        self._board = board
        self._access = access

    async def Check(self, request: Any, context: Any) -> Any:
        statuses = self._statuses(context)
        status = statuses.get(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            known = ", ".join([name for name in statuses if name][:_MOST_NAMED])
            context.set_details(f"no such service; there are, beside the nameless one: {known}")
            return health_pb2.HealthCheckResponse()
        return health_pb2.HealthCheckResponse(status=_value(status))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        last: int | None = None
        while True:
            # Before the status is looked at, so that no change is missed.
            changed = self._board.changed
            status = self._statuses(context).get(request.service, int(_UNKNOWN))
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=_value(status))
            await changed.wait()

    async def List(self, request: Any, context: Any) -> Any:
        module: Any = health_pb2  # older stubs do not have it, and do not ask for it
        answers = {
            name: health_pb2.HealthCheckResponse(status=_value(status))
            for name, status in self._statuses(context).items()
        }
        return module.HealthListResponse(statuses=answers)

    def _statuses(self, context: Any) -> dict[str, int]:
        """By service, of those that the caller may know of."""
        found = None if self._access is None else self._access.client(context.invocation_metadata())
        allowed = found.indexes if isinstance(found, Client) else None
        if isinstance(found, Refusal):  # its token is gone since its watch began
            return {}
        if allowed is None:
            return self._board.statuses
        return {
            name: status
            for name, status in self._board.statuses.items()
            if not name.startswith(_OF_INDEX) or name.removeprefix(_OF_INDEX) in allowed
        }


def _value(status: int) -> Any:
    return status


def _status(healthy: bool) -> int:
    statuses = health_pb2.HealthCheckResponse
    return int(statuses.SERVING if healthy else statuses.NOT_SERVING)
