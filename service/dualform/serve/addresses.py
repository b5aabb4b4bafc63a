"""Whether a server can listen where its configuration says."""

from __future__ import annotations

import errno
import ipaddress
import socket

from dualform.serve.config import ConfigError, ServerConfig, split_address

EXPLORE = "127.0.0.1:8080"
"""Where the page in the browser is, unless said otherwise."""


def check_addresses(config: ServerConfig) -> list[str]:
    """Try all of them, and let go of them again.

    Returns:
        Keys of the configuration, such as "listen", whose port somebody has at this moment.

    Raises:
        ConfigError: An address is not this machine's, or may not be taken, or two are the same.
    """
    addresses = {
        "listen": config.listen,
        "metrics": config.metrics,
        "admin": config.admin,
        "explore": config.explore
        if isinstance(config.explore, str)
        else config.explore and EXPLORE,
    }
    taken: list[str] = []
    mine: list[tuple[str, str, int]] = []
    for name, address in addresses.items():
        if not address:
            continue
        host, port = split_address(name, address)
        reasons: list[OSError | None] = []
        its_own: list[tuple[str, str, int]] = []
        for family, at in _resolved(name, address, host, port):
            for other, ip, its in mine if port else ():
                if its == port and _overlap(ip, at[0]):
                    raise ConfigError(f"{name} and {other} are both {address}: each takes its own")
            reasons.append(_tried(family, at))
            its_own.append((name, at[0], port))
        mine += its_own
        # gRPC is content with one of the addresses that a name has, and would share clients with
        # whoever has another.
        if any(reason is not None and reason.errno == errno.EADDRINUSE for reason in reasons):
            taken.append(name)
        elif all(reasons) and reasons[0] is not None:
            raise ConfigError(f"{name}: cannot listen on {address}: {reasons[0].strerror}")
    return taken


def _resolved(name: str, address: str, host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name}: cannot listen on {address}: {why}") from None
    resolved = [(int(family), (str(at[0]), *at[1:])) for family, _, _, _, at in found]
    # What is everywhere in IPv6 is so in IPv4, and there alone where the system has no IPv6.
    return [*resolved, (socket.AF_INET, ("0.0.0.0", port))] if host == "::" else resolved


def _tried(family: int, at: tuple[str, int]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(at)
    except OSError as error:
        return error
    return None


def _overlap(ip: str, other: str) -> bool:
    """Whether one port of both is the same port: an address that is unspecified is each."""
    one, two = (ipaddress.ip_address(each.partition("%")[0]) for each in (ip, other))
    return one == two or one.is_unspecified or two.is_unspecified
