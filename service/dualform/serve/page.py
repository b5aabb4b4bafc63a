"""The page that Prometheus reads: over TLS and for bearers of tokens, where questions are so too.

Answered in the event loop that answers questions, each connection within one deadline: a thread
for each, as the library's own server has, is one more for every stranger who connects and waits.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from dualform.serve.access import Access
from dualform.serve.config import ConfigError, split_address
from dualform.serve.status import Refusal
from dualform.serve.tls import Certificates

MOST_CONNECTIONS = 64
"""When one more comes, the oldest ends."""
PATIENCE_S = 10.0
"""A connection must be done after this long, whatever it waits for."""
_MOST_BYTES = 1 << 14
_ASK_FOR_A_TOKEN = "WWW-Authenticate: Bearer\r\n"
_STATUS = {
    200: "OK",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
}

_LOG = logging.getLogger("dualform.serve")


class MetricsPage:
    """One page at /metrics, over HTTP/1.1, one request a connection.

    Args:
        address: "HOST:PORT"; port 0 takes a free one.
        text: Gives content type and page for an Accept header; called in a thread.
        access: Who may read: with tokens, the bearer of one that opens all indexes.
        certificates: For TLS; None without.
    """

    def __init__(
        self,
        address: str,
        text: Callable[[str], tuple[str, bytes]],
        access: Access,
        certificates: Certificates | None,
    ) -> None:
        self.address = address
        self._text = text
        self._access = access
        self._certificates = certificates
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[object], None] = {}

    async def start(self) -> None:
        """Listen; `address` then has the port that was taken.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        host, port = split_address("metrics", self.address)
        try:
            self._server = await asyncio.start_server(
                self._connected,
                host,
                port,
                ssl=self._context(),
                limit=_MOST_BYTES,
                ssl_handshake_timeout=None if self._certificates is None else PATIENCE_S,
            )
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"cannot show metrics on {self.address}: {why}") from None
        taken = self._server.sockets[0].getsockname()[1]
        self.address = f"{self.address.rpartition(':')[0]}:{taken}"

    async def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    def _context(self) -> ssl.SSLContext | None:
        certificates = self._certificates
        if certificates is None:
            return None
        context = certificates.context

        def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = certificates.context

        context.sni_callback = renew
        return context

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = None
        if len(self._open) > MOST_CONNECTIONS:
            # Whoever has been here longest: a page takes no time, strangers who wait take for ever.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        try:
            await asyncio.wait_for(self._answer(reader, writer), PATIENCE_S)
        except (asyncio.TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            pass  # whoever it was has gone, or never meant to read
        except asyncio.CancelledError:
            pass
        except Exception:
            _LOG.exception("the metrics could not be shown")
        finally:
            self._open.pop(task, None)
            # Not waiting for what the other end has not read.
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {
            name.strip().lower(): value.strip()
            for name, colon, value in (line.partition(":") for line in lines)
            if colon
        }
        method, _, rest = first.partition(" ")
        status, kind, page = await self._found(method, rest.partition(" ")[0], headers)
        writer.write(
            (
                f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(page)}\r\nConnection: close\r\n"
                f"{_ASK_FOR_A_TOKEN if status == 401 else ''}\r\n"
            ).encode("latin-1")
            + (b"" if method == "HEAD" else page)
        )
        writer.close()
        await writer.wait_closed()  # once all of it is sent

    async def _found(
        self, method: str, path: str, headers: dict[str, str]
    ) -> tuple[int, str, bytes]:
        status, word = self._refusal(method, path, headers)
        if not status:
            kind, page = await asyncio.to_thread(self._text, headers.get("accept", ""))
            return 200, kind, page
        return status, "text/plain; charset=utf-8", f"{word}\n".encode()

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Why the page is not shown: a status, 0 where it is, and words."""
        given = headers.get("authorization")
        found = self._access.client(() if given is None else (("authorization", given),))
        if isinstance(found, Refusal):
            return 401, found.message
        if found.indexes is not None:
            return 403, "metrics tell of all indexes: they take a token that opens all of them"
        if method not in ("GET", "HEAD"):
            return 405, "GET /metrics"
        if path.partition("?")[0] not in ("/", "/metrics"):
            return 404, "metrics are at /metrics"
        return 0, ""
