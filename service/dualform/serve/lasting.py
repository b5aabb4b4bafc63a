"""A gRPC server that goes on where the library's own has ended by itself.

The library's loop that takes calls decodes a method's name as it comes: a frame whose path is no
UTF-8, from anybody, ends it (grpcio 1.85), and with it the server, while the process goes on.
Another takes its place then, at the same address.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from functools import partial

import grpc

_LOG = logging.getLogger("dualform.serve")
# The system may take a moment to let go of the address.
_PAUSES_S = (0.0, 0.05, 0.2, 1.0, 3.0)
_MOST_GONE = 1000
_GONE: list[grpc.aio.Server] = []


class LastingServer:
    """Belongs to the running event loop.

    Args:
        make: A new server with everything that it answers.
        listen: Has a server listen at an address, "HOST:PORT"; the port, 0 where it can't.

    Attributes:
        lost: Set where no other takes the place of one that ended, as after the thousandth (each
            keeps some memory): nobody is answered.
    """

    def __init__(
        self,
        make: Callable[[], grpc.aio.Server],
        listen: Callable[[grpc.aio.Server, str], int],
    ) -> None:
        self._make = make
        self._listen = listen
        self._server = make()
        self._address = ""
        self._stopping = False
        self._replacing: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()

    def listen(self, address: str) -> int:
        """Take the address; the port, 0 where that can't be had."""
        port = self._port(self._server, address)
        self._address = f"{address.rpartition(':')[0]}:{port}"
        return port

    async def start(self) -> None:
        """Answer, at the address that was taken."""
        before = asyncio.all_tasks()
        await self._server.start()
        for task in asyncio.all_tasks() - before:
            if not inspect.iscoroutine(task.get_coro()):  # the library's, which are compiled
                task.add_done_callback(partial(self._ended, self._server))

    async def stop(self, grace: float) -> None:
        """Answer no more: what is being answered has so many seconds."""
        self._stopping = True
        if self._replacing is not None:
            await self._replacing
        if self._server not in _GONE:
            await self._server.stop(grace)

    def _port(self, server: grpc.aio.Server, address: str) -> int:
        try:
            return self._listen(server, address)
        except RuntimeError:
            return 0

    def _ended(self, server: grpc.aio.Server, task: asyncio.Task[object]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not self._stopping and server is self._server and self._replacing is None:
            _LOG.error("gRPC's server ended by itself (%r): another takes its place", error)
            self._replacing = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        # It shuts itself down, and calls that run end as they would. It must neither be told once
        # more nor be freed: gRPC's core would call back what is not there.
        _GONE.append(self._server)
        for pause in _PAUSES_S if len(_GONE) < _MOST_GONE else ():
            await asyncio.sleep(pause)
            self._server = self._make()
            if self._port(self._server, self._address):
                self._replacing = None
                await self.start()
                return
        _LOG.error("%s is not listened on again: the process has to end", self._address)
        self.lost.set()
