"""What `dualform serve` does once its arguments are read: serve until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dualform.questions.quoted import unicode
from dualform.serve import policy
from dualform.serve.config import ConfigError, ServerConfig
from dualform.serve.explorer import Explorer, check_installed

if TYPE_CHECKING:
    from dualform.engine.messages.catalog import Catalog

_LOG = logging.getLogger("dualform.serve")


def run(config: ServerConfig, again: Callable[[], ServerConfig] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain; another signal later ends the drain at once.

    SIGHUP reads the configuration again: indexes, certificates and tokens change without a call
    being dropped; what is wrong is logged, and stays as it was.

    Args:
        config: What to serve.
        again: Reads the configuration again; without it SIGHUP looks for new versions of the same.

    Prints "listening on HOST:PORT" on standard output once ready; the log goes to standard error.

    Returns:
        Exit status: 0 after a drain, 1 where gRPC ended and could not be started again, 2 where
        nothing can be served as configured.
    """
    # Its default is to kill, and it may come before there is anything to read again: then it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    policy.apply()
    from dualform.serve.logs import set_up_logs

    set_up_logs(config.log)
    # After the policy: this imports torch and FAISS.
    from dualform.serve.server import open_catalog

    try:
        check_installed(config.explore)
        catalog = open_catalog(config)
        try:
            _report(catalog)
            return asyncio.run(_serve(config, catalog, again))
        finally:
            catalog.close()
    except ConfigError as error:
        print(f"dualform serve: {error}", file=sys.stderr)
        return 2


def check(config: ServerConfig) -> int:
    """Say whether `run` would serve this: all that it needs is opened, made and let go.

    Returns:
        Exit status: 0 where all of it can be served, 2 otherwise, with the reasons.
    """
    policy.apply()
    from dualform.serve.server import open_catalog

    try:
        check_installed(config.explore)
        catalog = open_catalog(config)
        damages = {name: catalog.damage(name) for name in catalog.names}
        for key in asyncio.run(_checked(config, catalog)):
            print(f"{key}: its port is taken now, as by a server that runs")
    except ConfigError as error:
        print(f"dualform serve: {error}", file=sys.stderr)
        return 2
    for name, damage in damages.items():
        print(f"index {name}: {damage or 'can be served'}")
    return 2 if any(damages.values()) else 0


async def _checked(config: ServerConfig, catalog: Catalog) -> list[str]:
    from dualform.serve.server import Server

    hurry = asyncio.Event()
    hurry.set()
    try:
        server = Server(config, catalog)
    except BaseException:
        catalog.close()
        raise
    try:
        return server.check()
    finally:
        await server.drain(hurry)


async def _serve(
    config: ServerConfig, catalog: Catalog, again: Callable[[], ServerConfig] | None = None
) -> int:
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
    server = Server(config, catalog, again)
    reloads: set[asyncio.Task[Any]] = set()

    def reload_soon() -> None:
        task = loop.create_task(server.reload_again())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload_soon)
    # One that came while Python imported is taken now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    try:
        address = await server.start()
        policy.settle()
        print(f"listening on {address}", flush=True)
        async with Explorer(config.explore, address) if config.explore else nullcontext():
            await _either(stop, server.lost)
        _LOG.info("draining: no new questions; running ones finish first")
        await server.drain(hurry)
        _LOG.info("drained")
        return int(server.lost.is_set())
    finally:
        # The loop will leave it to its default, which kills.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _report(catalog: Catalog) -> None:
    damaged = 0
    for name in catalog.names:
        damage = catalog.damage(name)
        if damage is None:
            _LOG.info("index %s is open", name)
        else:
            damaged += 1
            _LOG.error("index %s is not served: %s", name, unicode(damage))
    if damaged == len(catalog.names):
        reasons = "; ".join(f"{name}: {catalog.damage(name)}" for name in catalog.names)
        raise ConfigError(f"none of the indexes can be served: {reasons}")
