"""Where the server is and how it is reached: address, TLS, token, proxies, keepalive.

A `Connection` makes channels, as many as processes and event loops need, all alike.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dualform.client._address import Address, address_of, target
from dualform.client.errors import InvalidArgumentError

Tls = bool | str | Path
TOKEN = "DUALFORM_TOKEN"

_OPTIONS = (
    # What the server sends, the server has bounded.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The server compresses nothing, and a few bytes of another one's could become gigabytes here.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Retries are the client's own: they can be seen, set and turned off.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: what connecting may take, to a busy server or a far one, TLS included.
    # The pauses between attempts stay as short as the others say.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A server that went away without a word is noticed, also without a deadline. Servers end a
    # connection that pings more often than every 5 minutes, unless they say otherwise.
    ("grpc.keepalive_time_ms", 330_000),
    # Of a ping, it is the one below that counts; this is how long the other machine may be silent.
    ("grpc.keepalive_timeout_ms", 20_000),
    # A process may stand still for as long, and answer: it was stopped, or its machine swaps. gRPC
    # pings while answers come, too, to measure the line, and would wait a minute for those.
    ("grpc.http2.ping_timeout_ms", 350_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_NO_PROXY = (("grpc.enable_http_proxy", 0),)
# In the order in which gRPC looks.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_PASSED_BY = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class Connection:
    """Checked settings of a connection; `connection_of` makes one.

    Attributes:
        server: The address as given.
        loopback: Whether it stays on this machine.
        proxy: The environment's proxy on the way there, as "VARIABLE=URL" without its password.
        credentials: Of TLS; None for none.
        metadata: What goes with every call.
    """

    server: str
    loopback: bool
    proxy: str | None
    credentials: Any
    metadata: tuple[tuple[str, str], ...]

    def channel(self) -> Any:
        """A blocking channel."""
        if self.credentials is None:
            return grpc.insecure_channel(target(self.server), options=self._options)
        return grpc.secure_channel(target(self.server), self.credentials, options=self._options)

    def channel_of_loop(self) -> Any:
        """A channel of the running event loop."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(target(self.server), options=self._options)
        return grpc.aio.secure_channel(target(self.server), self.credentials, options=self._options)

    @property
    def _options(self) -> tuple[tuple[str, int], ...]:
        # A proxy is elsewhere: its loopback is not this one.
        return _OPTIONS + _NO_PROXY if self.loopback else _OPTIONS

    def __repr__(self) -> str:
        # Errors show frames, and a token is nobody's business.
        return f"Connection({self.server!r}, tls={self.credentials is not None})"


def connection_of(
    server: str,
    tls: Tls = False,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    token: str | None = None,
) -> Connection:
    """Settings as `Client` takes them, checked.

    Raises:
        InvalidArgumentError: No address, files that can't be read, a certificate without TLS or
            without its key, or a token that would travel in the clear.
    """
    address = address_of(server)
    loopback = address.loopback
    credentials = _credentials(tls, certificate, key)
    secret, origin = (token, "token=") if token is not None else (os.environ.get(TOKEN), TOKEN)
    metadata: tuple[tuple[str, str], ...] = ()
    if secret is not None and not (isinstance(secret, str) and secret == ""):
        # Never the token itself: messages are logged.
        if not isinstance(secret, str) or not re.fullmatch(r"[!-~]+", secret):
            raise InvalidArgumentError(
                f"the token of {origin} is no token: printable ASCII without spaces is needed",
                field="token",
            )
        if credentials is None and not loopback:
            raise InvalidArgumentError(
                f"the token of {origin} would travel to {server} for all to read; connect with "
                "tls=True, or tls='ca.pem' for a certificate of your own (token='' sends none)",
                field="token",
            )
        metadata = (("authorization", f"Bearer {secret}"),)
    return Connection(
        server, loopback, None if loopback else _proxy_to(address), credentials, metadata
    )


def _proxy_to(address: Address) -> str | None:
    variable = next((name for name in _PROXIES if os.environ.get(name)), None)
    if variable is None or not address.hosts:
        return None
    excepted = next((os.environ[name] for name in _PASSED_BY if os.environ.get(name)), "")
    endings = [ending.strip() for ending in excepted.split(",") if ending.strip()]
    if all(any(host.endswith(ending) for ending in endings) for host in address.hosts):
        return None
    return f"{variable}={re.sub('//[^/@]*@', '//', os.environ[variable])}"


def _credentials(tls: Tls, certificate: str | Path | None, key: str | Path | None) -> Any:
    if not isinstance(tls, (bool, str, Path)) or tls == "":
        raise InvalidArgumentError(
            f"tls={tls!r}: True, or the path of the certificates to trust (PEM), is needed",
            field="tls",
        )
    if (certificate is None) != (key is None):
        field = "key" if key is None else "certificate"
        raise InvalidArgumentError(
            f"{field}= is missing: a client's certificate and its key go together", field=field
        )
    if tls is False:
        if certificate is not None:
            raise InvalidArgumentError(
                "certificate= and key= without tls=: say tls=True, or tls='ca.pem'",
                field="certificate",
            )
        return None
    return grpc.ssl_channel_credentials(
        None if tls is True else _pem(tls, "tls", "CERTIFICATE"),
        None if key is None else _pem(key, "key", "PRIVATE KEY"),
        None if certificate is None else _pem(certificate, "certificate", "CERTIFICATE"),
    )


def _pem(path: str | Path, field: str, what: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except (OSError, TypeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidArgumentError(f"{field}={path!r} can't be read: {why}", field=field) from None
    if not re.search(rb"-----BEGIN [A-Z ]*" + what.encode() + rb"-----", content):
        raise InvalidArgumentError(
            f"{field}={path!r} holds no {what.lower()} in PEM (-----BEGIN {what}-----)",
            field=field,
        )
    return content
