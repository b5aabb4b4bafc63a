"""The page in the browser beside the server: `explore:` of the configuration.

It is a process of its own, `dualform explore --server`, that asks as any client does: what it does
holds up no answer. It ends with the server, however that ends: its standard input is a pipe that
the server holds open.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys

from dualform._install import pip_install
from dualform.serve.addresses import EXPLORE
from dualform.serve.config import ConfigError, split_address

_LOG = logging.getLogger("dualform.serve")
_GRACE_S = 10.0


class Explorer:
    """The process, while the block runs.

    Args:
        explore: True for 127.0.0.1:8080, or "HOST:PORT".
        server: Where it asks, "HOST:PORT".

    Raises:
        ConfigError: NiceGUI is not installed.
    """

    def __init__(self, explore: bool | str, server: str) -> None:
        check_installed(explore)
        host, port = split_address("explore", explore if isinstance(explore, str) else EXPLORE)
        asked, at = split_address("listen", server)
        if asked in ("0.0.0.0", "::"):
            asked = "127.0.0.1" if asked == "0.0.0.0" else "::1"
        address = f"[{asked}]:{at}" if ":" in asked else f"{asked}:{at}"
        self._words = ["explore", "--server", address, "--host", host, "--port", str(port)]
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Explorer:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dualform.cli", *self._words, "--while-read"),
            stdin=asyncio.subprocess.PIPE,
        )
        self._watch = asyncio.create_task(self._say_the_end(self._process))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is None or self._watch is None:
            return
        self._watch.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE_S)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _say_the_end(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        _LOG.error("the page (explore) ended with exit status %d; questions are answered", status)


def check_installed(explore: bool | str) -> None:
    """Say before anything is served that the page can't be.

    Raises:
        ConfigError: NiceGUI is not installed.
    """
    if explore and importlib.util.find_spec("nicegui") is None:
        raise ConfigError(f"explore needs nicegui: {pip_install('explore')}")
