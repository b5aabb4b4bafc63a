"""A real server on a real socket, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dualform.engine.messages.catalog import Catalog
from dualform.serve import ServerConfig, ServerLimits
from dualform.serve.server import Server, open_catalog


@contextmanager
def serving(
    indexes: Mapping[str, Path],
    *,
    limits: ServerLimits | None = None,
    port: int = 0,
    catalog: Catalog | None = None,
) -> Iterator[str]:
    """Serves; yields "HOST:PORT"; drains at the end.

    Args:
        indexes: By name.
        limits: The server's.
        port: 0 for a free one.
        catalog: Instead of one opened from `indexes`.
    """
    config = ServerConfig(indexes, listen=f"127.0.0.1:{port}", limits=limits or ServerLimits())
    ready = threading.Event()
    ends: list[Callable[[], object]] = []
    address: list[str] = []
    failure: list[BaseException] = []

    async def main() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(told.set))
        server = Server(config, catalog or open_catalog(config))
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
        assert ready.wait(60)
        assert not failure, failure
        yield address[0]
    finally:
        for end in ends:
            with suppress(RuntimeError):  # it has ended, and `failure` says why
                end()
        thread.join(60)
    assert not thread.is_alive()
    assert not failure, failure


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
