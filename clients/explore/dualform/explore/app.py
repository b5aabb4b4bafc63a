"""The page's own small web server, on this machine alone."""

from __future__ import annotations

import ipaddress
import json
import signal
import socket
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from nicegui import ui
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dualform.client import DualformError, InvalidArgumentError
from dualform.explore.model import Model
from dualform.explore.page import Page
from dualform.explore.payloads import media_of
from dualform.explore.queries import Uploads
from dualform.explore.sources import Sources

PORT = 8080


def run(
    sources: Sources,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    browse: bool = False,
    model: Model | None = None,
    names: Sequence[Sequence[str]] = (),
) -> int:
    """Serve the page until SIGTERM or SIGINT.

    Prints "exploring at http://HOST:PORT" once it can be opened.

    Args:
        sources: Whom it asks.
        host: An address of this machine's loopback.
        port: 0 for a free one.
        browse: Open it in a browser.
        model: To ask about what it is given, and about the whole network.
        names: Of output units, as `read_names` gives them; used where a last layer has as many.

    Returns:
        Exit status: 0.

    Raises:
        InvalidArgumentError: Another host, no port, or one that is taken.
    """
    bound = _bound(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
    app = FastAPI(openapi_url=None, lifespan=_closing(sources))
    # A page of somebody else's whose name is made to lead here may not ask.
    app.add_middleware(
        TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]", "::1"]
    )
    uploads = Uploads(model)

    @app.get("/payload")
    async def payload(index: str, id: str) -> Response:
        return await _payload(sources, index, id)

    @app.get("/upload")
    async def upload(digest: str) -> Response:
        try:
            return _picture(uploads.kept(digest).payload)
        except DualformError:
            return Response(status_code=404)

    @ui.page("/", title="dualform explorer", language="en-US")
    def page(request: Request) -> None:
        Page(sources, uploads, names, request.url.query)

    ui.run_with(
        app,
        title="dualform explorer",
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        favicon="◧",
        # On a busy machine a browser is silent for longer than the three seconds of NiceGUI: then
        # its page would be loaded anew, and what was clicked meanwhile would be lost.
        reconnect_timeout=10.0,
    )
    # NiceGUI looks for its server among all objects, and some of torch's warn when looked at.
    warnings.filterwarnings("ignore", message=".*torch", category=FutureWarning)
    server = _Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1), address, browse
    )
    # uvicorn ends well on these, and then raises them once more.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[bound])
    return 0


def _closing(sources: Sources) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await sources.close()

    return lifespan


class _Server(uvicorn.Server):
    """Says where it is once it is there."""

    def __init__(self, config: uvicorn.Config, address: str, browse: bool) -> None:
        super().__init__(config)
        self._address, self._browse = address, browse

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"exploring at {self._address}", flush=True)
        if self._browse:
            import webbrowser

            webbrowser.open(self._address)


def _bound(host: str, port: int) -> socket.socket:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise InvalidArgumentError(
            f"host={host!r}: the page asks nobody who they are, so it is on this machine alone: "
            "127.0.0.1; from another machine, ssh -L 8080:127.0.0.1:8080 leads there",
            field="host",
        )
    if not 0 <= port <= 65535:
        raise InvalidArgumentError(
            f"port={port} is none; 1 to 65535 are, and 0 is for any that is free", field="port"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidArgumentError(
            f"port {port} of {host} can't be had ({error.strerror}); name another one, or 0 for "
            "any that is free",
            field="port",
        ) from None


async def _payload(sources: Sources, index: str, example: str) -> Response:
    """A picture that was kept, as a picture and nothing else."""
    try:
        source = await sources.named(index)
        if source is None:
            return Response(status_code=404)
        kept: Any = (await source.asked().examples([json.loads(example)], index=source.index))[0]
    except ValueError:
        return Response(status_code=404)
    except DualformError:
        return Response(status_code=503)
    return _picture(kept)


def _picture(kept: Any) -> Response:
    media = media_of(kept) if isinstance(kept, bytes) else None
    if media is None:
        return Response(status_code=404)
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, max-age=3600"}
    return Response(kept, media_type=media, headers=headers)
