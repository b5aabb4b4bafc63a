"""What `dualform serve` does once its arguments are read: serve until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING

from dualform.serve import policy
from dualform.serve.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from dualform.engine.messages.catalog import Catalog

_LOG = logging.getLogger("dualform.serve")


def run(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; another signal later ends the drain at once.

    Prints "listening on HOST:PORT" on standard output once ready; the log goes to standard error.

    Returns:
        Exit status: 0 after a drain, 2 where nothing can be served as configured.
    """
    policy.apply()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("dualform").setLevel(logging.INFO)
    # After the policy: this imports torch and FAISS.
    from dualform.serve.server import open_catalog

    try:
        catalog = open_catalog(config)
        _report(catalog)
        asyncio.run(_serve(config, catalog))
    except ConfigError as error:
        print(f"dualform serve: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(config: ServerConfig, catalog: Catalog) -> None:
    from dualform.serve.server import NOTICE_S, Server

    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    told_at = 0.0

    def told() -> None:
        nonlocal told_at
        if not stop.is_set():
            told_at = loop.time()
            stop.set()
        # Supervisors send one signal to the process and again to its group: that is one wish.
        elif loop.time() - told_at > NOTICE_S:
            hurry.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    server = Server(config, catalog)
    address = await server.start()
    print(f"listening on {address}", flush=True)
    await stop.wait()
    _LOG.info("draining: no new questions; running ones finish first")
    await server.drain(hurry)
    _LOG.info("drained")


def _report(catalog: Catalog) -> None:
    damaged = 0
    for name in catalog.names:
        damage = catalog.damage(name)
        if damage is None:
            _LOG.info("index %s is open", name)
        else:
            damaged += 1
            _LOG.error("index %s is not served: %s", name, damage)
    if damaged == len(catalog.names):
        reasons = "; ".join(f"{name}: {catalog.damage(name)}" for name in catalog.names)
        raise ConfigError(f"none of the indexes can be served: {reasons}")
