"""How a server is reached: addresses, sockets, proxies and pings, over real sockets."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tempfile
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from dualform.client import (
    AsyncClient,
    Client,
    InvalidArgumentError,
    UnavailableError,
    UnimplementedError,
    _connection,
)
from dualform.client._connection import connection_of
from dualform.v1 import attribution_pb2 as pb

from .answering import ELSEWHERE, LIMITS, answering, anyone, ask_both, wants_a_token
from .http2 import grpc_answer, http2
from .serving import free_port


@pytest.mark.parametrize("port", ["0", "65536", "99999", "50051000"])
@pytest.mark.parametrize("host", ["localhost:", "[::1]:", "dns:///localhost:", "ipv4:127.0.0.1:"])
def test_a_port_that_is_none_is_refused(host: str, port: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match="1 to 65535") as caught:
            kind(host + port)
        assert caught.value.field == "server"


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("dns:///", ""),
        ("dns:///:", ""),
        ("dns:localhost", "names no port"),  # 443 otherwise, without a word
        ("dns:///localhost", "names no port"),
        ("dns:///::1:50051", "in brackets"),
        ("dns://8.8.8.8/localhost:50051", "IP:PORT"),
        ("dns://[bad/localhost:50051", "IP:PORT"),
        ("ipv4:1", "names no port"),
        ("ipv4:127.0.0.1", "names no port"),
        ("ipv4:127.0.0.1:5,127.0.0.1", "names no port"),
        ("ipv4:300.1.1.1:5", ""),
        ("ipv4:1.2.3:5", ""),
        ("ipv4:[::1]:5", ""),
        ("ipv4://x/127.0.0.1:5", ""),
        ("ipv6:[::1", "in brackets"),
        ("ipv6:[::g]:5", "in brackets"),
        ("ipv6:127.0.0.1:5", ""),
        ("unix:", "unix:PATH"),
        ("unix://tmp/socket", "unix:PATH"),
        ("unix-abstract:", "unix-abstract:NAME"),
        ("vsock:", ""),
        (" localhost:50051", ""),
        ("localhost:50051 ", ""),
        ("local host:50051", ""),
        ("localhost:50051/", ""),
        ("localhost:50051,localhost:50052", ""),
        ("localhost:\N{ARABIC-INDIC DIGIT THREE}", ""),
        ("300.1.1.1:5", ""),
        ("a..b:50051", ""),
        (f"{'x' * 64}:50051", ""),
        ("::1:50051", "in brackets"),
        ("fe80::1", "in brackets"),
        ("[::1:50051", "in brackets"),
        ("[::1]", "names no port"),
        ("[localhost]:50051", "in brackets"),
        ("grpc://localhost:50051", "leave out grpc://"),
        ("HTTPS://localhost:50051", "tls=True"),
    ],
)
def test_an_address_that_can_not_be_one_is_refused(server: str, why: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match="HOST:PORT is needed") as caught:
            kind(server)
        assert caught.value.field == "server"
        assert why in str(caught.value)


@pytest.mark.parametrize("port", ["1" * 5000, "0" * 5000])
def test_a_long_port_is_not_all_repeated(port: str) -> None:
    with pytest.raises(InvalidArgumentError, match="1 to 65535") as caught:
        Client(f"localhost:{port}")
    assert len(str(caught.value)) < 400


def test_addresses_of_every_kind_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with answering(anyone) as address:
        port = address.rpartition(":")[2]
        for server in (
            f"localhost:{port}",
            f"LOCALHOST:00{port}",
            f"dns:localhost:{port}",
            f"dns:/localhost:{port}",
            f"DNS:///localhost:{port}",
            f"dns:%6cocalhost:{port}",
            f"dns://127.0.0.1:53/127.0.0.1:{port}",
            f"ipv4:127.0.0.1:{port}",
            f"ipv4:///127.0.0.1:{port}",
            f"ipv4:127.0.0.1:{free_port()},127.0.0.1:{port},",
        ):
            with Client(server, retry=None, timeout=20, token="let-me-in") as client:
                assert client.indexes(), server
    with answering(anyone, path=Path("a socket")):
        for server in ("unix:a socket", "unix:./a%20socket", f"unix://{tmp_path}/a%20socket"):
            with Client(server, retry=None, timeout=20, token="let-me-in") as client:
                assert client.indexes(), server


def test_addresses_of_ipv6_answer() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with answering(anyone, host="[::1]") as address:
        for server in (
            address,
            f"dns:///{address}",
            f"ipv6:{address}",
            f"ipv6:///{address},{address}",
            address.replace("::1", "::1%25lo"),
            address.replace("::1", "::1%lo"),
        ):
            with Client(server, retry=None, timeout=20, token="let-me-in") as client:
                assert client.indexes(), server


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own lengths, and its abstract sockets")
@pytest.mark.parametrize("scheme", ["unix", "unix-abstract"])
def test_a_sockets_name_is_as_long_as_the_system_allows(scheme: str, tmp_path: Path) -> None:
    """What gRPC takes to listen on is taken here, and nothing longer."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    begin = f"{scheme}:{folder}/" if scheme == "unix" else f"{scheme}:{folder.name}"
    longest = begin + "u" * (107 - len(begin) + len(scheme) + 1)
    try:
        server.add_insecure_port(longest)
        with pytest.raises(RuntimeError, match="bind"):
            server.add_insecure_port(longest + "u")
        server.start()
        with (
            Client(longest, retry=None, timeout=20) as client,
            pytest.raises(UnimplementedError),  # it is there, and knows no such method
        ):
            client.indexes()
        for kind in (Client, AsyncClient):
            with pytest.raises(
                InvalidArgumentError, match=r"at most 107 bytes .* has 108"
            ) as caught:
                kind(longest + "u")
            assert caught.value.field == "server"
            kind(longest)
    finally:
        server.stop(0).wait()
        shutil.rmtree(folder)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "ipv4:127.0.0.1", "dns:///localhost"])
@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_this_machine_is_never_asked_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variable: str, host: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy, answering(anyone) as address:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        ask_both(f"{host}:{address.rpartition(':')[2]}", timeout=20)
        proxy.settimeout(0.05)
        with pytest.raises(TimeoutError):
            proxy.accept()


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_elsewhere_the_error_names_the_proxy(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def refuse() -> None:
            while True:
                try:
                    connection, _ = proxy.accept()
                except OSError:
                    return
                with connection:
                    if connection.recv(1000).startswith(b"CONNECT 192.0.2.1:50051"):
                        asked.set()
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

        refusing = threading.Thread(target=refuse)
        refusing.start()
        monkeypatch.setenv(variable, f"http://me:secret@127.0.0.1:{proxy.getsockname()[1]}")
        try:
            with (
                Client(ELSEWHERE, retry=None, timeout=20) as client,
                pytest.raises(UnavailableError, match=f"{variable}=http://127.0.0.1") as caught,
            ):
                client.indexes()
            assert asked.is_set()
            assert "secret" not in str(caught.value)
            assert "no_grpc_proxy" in str(caught.value)
        finally:
            proxy.shutdown(socket.SHUT_RDWR)
            refusing.join(20)


def test_no_proxy_is_named_where_none_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connection_of(ELSEWHERE).proxy is None
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert connection_of("example.org:1").proxy == "http_proxy=http://127.0.0.1:9"
    assert connection_of("unix:/tmp/socket").proxy is None
    monkeypatch.setenv("no_proxy", "other.org, example.org")
    assert connection_of("example.org:1").proxy is None
    monkeypatch.setenv("no_grpc_proxy", "other.org")
    assert connection_of("example.org:1").proxy is not None


def test_a_socket_in_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    path = tmp_path / "socket"
    with answering(wants_a_token, path=path) as address:
        ask_both(address, token="let-me-in")
        ask_both(f"unix://{path}", token="let-me-in")
    with (
        Client(f"unix:{path}", retry=None) as client,
        pytest.raises(UnavailableError, match="No such file") as caught,
    ):
        client.indexes()
    assert "http_proxy" not in str(caught.value)


def test_pings_are_not_more_frequent_than_servers_accept() -> None:
    # gRPC's servers end connections with more than one ping in 5 minutes, by default.
    with Client(f"localhost:{free_port()}") as client:
        options = dict(client._transport._connection._options)  # type: ignore[attr-defined]
    assert options["grpc.keepalive_time_ms"] > 300_000
    # Nor is a connection given up sooner for the pings that measure the line.
    assert options["grpc.http2.ping_timeout_ms"] >= options["grpc.keepalive_time_ms"]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_that_stands_still_is_given_up_by_the_time_of_pings(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is this option that says for how long: with a second, gone long before the deadline."""
    short = {**dict(_connection._OPTIONS), "grpc.http2.ping_timeout_ms": 1000}
    monkeypatch.setattr(_connection, "_OPTIONS", tuple(short.items()))
    answered = grpc_answer(pb.ListIndexesResponse(limits=LIMITS).SerializeToString())
    still, go_on = threading.Event(), threading.Event()

    def answer(stream: int, body: bytes) -> bytes:
        if still.is_set():
            go_on.wait(30)  # nothing else is read or said meanwhile
        return answered(stream, body)

    async def ask(client: Any) -> None:
        end = time.monotonic() + 0.5  # so that there is something to measure
        while time.monotonic() < end:
            said = client.indexes()
            await said if kind is AsyncClient else None
        still.set()
        said = client.indexes()
        await said if kind is AsyncClient else None

    with http2(answer) as address:
        start = time.monotonic()
        try:
            with pytest.raises(UnavailableError, match="ping timeout"):
                asyncio.run(ask(kind(address, retry=None, timeout=30)))
        finally:
            go_on.set()
        assert 1 < time.monotonic() - start < 20
