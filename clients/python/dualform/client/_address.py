"""Addresses as gRPC takes them, taken apart: what can't be one is refused before it is asked.

gRPC itself says so with the first call, as a defect (INTERNAL) or as a server that is not there.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import unquote

from dualform.client.errors import InvalidArgumentError

# The path of a socket with its final zero (sun_path).
_SOCKET_BYTES = 104 if sys.platform == "darwin" else 108
_SCHEME = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|xds|vsock):", re.IGNORECASE)
# Schemes without hosts: what follows them.
_OTHERS = {"xds": ".+", "vsock": "[0-9]{1,10}:[0-9]{1,10}"}
_AUTHORITY = re.compile(r"//([^/?#]*)")
_HOST_AND_PORT = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):([0-9]+)")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_LONGEST_NAME = 253  # RFC 1035, in text
_SHOWN = 100


@dataclass(frozen=True)
class Address:
    """What an address says.

    Attributes:
        scheme: In small letters; "dns" where none is written.
        hosts: Names and IP addresses, without brackets; none of sockets, xds and vsock.
    """

    scheme: str
    hosts: tuple[str, ...] = ()

    @property
    def loopback(self) -> bool:
        """Whether it stays on this machine."""
        if self.scheme.startswith("unix"):
            return True
        return bool(self.hosts) and all(map(_on_this_machine, self.hosts))


def address_of(server: str) -> Address:
    """What `server` says.

    Raises:
        InvalidArgumentError: It can't be an address: no port (gRPC would take 443), none of 1 to
            65535, a URL, an IPv6 address without brackets, a path that is too long for a socket.
    """
    if not isinstance(server, str) or not server.isprintable():
        _refuse(server)
    found = _SCHEME.match(server)
    if found is None:
        url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", server)
        if url:
            _refuse(server, f"leave out {url[0]} (TLS is tls=True)")
        return Address("dns", (_host(server, unquote(server)),))
    scheme, rest = found[1].lower(), server[found.end() :]
    authority = _AUTHORITY.match(rest)
    within = authority[1] if authority else ""
    path = unquote(rest[authority.end() :] if authority else rest)
    if scheme.startswith("unix"):
        _check_socket(server, scheme, within, path)
        return Address(scheme)
    if scheme in _OTHERS:
        if not re.fullmatch(_OTHERS[scheme], rest):
            _refuse(server)
        return Address(scheme)
    hosts = _hosts(server, scheme, within, re.sub(r"[?#].*", "", path).removeprefix("/"))
    return Address(scheme, hosts)


def target(server: str) -> str:
    """As gRPC takes it: older ones know schemes in small letters alone."""
    found = _SCHEME.match(server)
    return server if found is None else found[1].lower() + server[found.end(1) :]


def _hosts(server: str, scheme: str, authority: str, path: str) -> tuple[str, ...]:
    """Of dns, ipv4 and ipv6."""
    if scheme == "dns":
        if authority:
            _check_name_server(server, authority)
        return (_host(server, path),)
    hosts = tuple(_host(server, part) for part in path.split(",") if part)
    kind = ipaddress.IPv4Address if scheme == "ipv4" else ipaddress.IPv6Address
    if authority or not hosts or not all(_is(kind, host) for host in hosts):
        _refuse(server)
    return hosts


def _host(server: str, text: str) -> str:
    """The host of HOST:PORT or [IPV6]:PORT."""
    parts = _HOST_AND_PORT.fullmatch(text)
    if parts is None:
        bare = re.sub(r"[\[\]]", "", text)
        with_brackets = text == f"[{bare}]"
        if text and (with_brackets or ":" not in text):
            _refuse(server, "it names no port (that of `dualform serve` is 50051)")
        if any(_is(ipaddress.IPv6Address, part) for part in (bare, bare.rpartition(":")[0])):
            _refuse(server, "an IPv6 address stands in brackets, as in [::1]:50051")
        _refuse(server)
    within, name, port = parts.groups()
    if within is None and not _is_name(name):
        _refuse(server)
    if within is not None and not _is(ipaddress.IPv6Address, within):
        _refuse(server, "only an IPv6 address stands in brackets, as in [::1]:50051")
    # gRPC would take it modulo 65,536.
    digits = port.lstrip("0")
    if not digits or len(digits) > 5 or int(digits) > 65535:
        raise InvalidArgumentError(
            f"server={_shown(server)}: {_cut(port)} is no port; 1 to 65535 are, and `dualform "
            "serve` takes 50051 unless told otherwise",
            field="server",
        )
    return str(within or name)


def _is_name(name: str) -> bool:
    labels = name.removesuffix(".").split(".")
    if len(labels) == 4 and all(re.fullmatch("[0-9]+", label) for label in labels):
        return all(len(label) < 4 and int(label) < 256 for label in labels)
    return len(name) <= _LONGEST_NAME and all(_LABEL.fullmatch(label) for label in labels)


def _is(kind: type, host: str) -> bool:
    """Whether it is an IP address of this kind."""
    try:
        kind(host)
    except ValueError:
        return False
    return True


def _check_socket(server: str, scheme: str, authority: str, path: str) -> None:
    if authority or not path:
        _refuse(server, f"a socket's is {scheme}:{'PATH' if scheme == 'unix' else 'NAME'}")
    size = len(path.encode(errors="surrogateescape"))
    # An abstract name begins with a zero, a path ends with one.
    if size >= _SOCKET_BYTES:
        raise InvalidArgumentError(
            f"server={_shown(server)}: a socket's {'path' if scheme == 'unix' else 'name'} has at "
            f"most {_SOCKET_BYTES - 1} bytes on this system, and this one has {size}",
            field="server",
        )


def _check_name_server(server: str, authority: str) -> None:
    parts = _HOST_AND_PORT.fullmatch(authority)
    kind = ipaddress.IPv4Address if parts is None or parts[1] is None else ipaddress.IPv6Address
    if parts is None or not _is(kind, parts[1] or parts[2]):
        _refuse(server, "a name server before it is IP:PORT, as in dns://8.8.8.8:53/HOST:PORT")


def _on_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _refuse(server: object, why: str = "") -> NoReturn:
    raise InvalidArgumentError(
        f"server={_shown(server)} is no address; HOST:PORT is needed, such as localhost:50051"
        + (f": {why}" if why else ""),
        field="server",
    )


def _shown(server: object) -> str:
    return _cut(repr(server))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
