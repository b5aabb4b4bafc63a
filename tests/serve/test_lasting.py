"""Frames that end gRPC's own server, and that make it quote what callers sent."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import warm
from client.serving import free_port
from grpc_health.v1 import health_pb2, health_pb2_grpc
from synthetic import make_index

from dualform.client import Client
from dualform.client.errors import UnauthenticatedError

from .raw import call, connect

NO_TEXT = os.fsdecode(b"/\xff")
QUERIES = np.ones((1, 6), np.float32)
TOKEN = "0123456789abcdef"


def until_it_serves(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        answer = stub.Check(asked, timeout=20, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def ended(address: str, path: str = NO_TEXT, *more: tuple[str, str]) -> None:
    """A call that no client makes; until the connection is closed, or has answered."""
    with connect(address) as connection:
        connection.sendall(call(1, path, b"", *more))
        connection.settimeout(0.5)
        try:
            while connection.recv(1 << 16):
                pass
        except (TimeoutError, ConnectionError):
            pass


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((30, 6)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("index"), keys, None)


@contextmanager
def command(
    index: Path, folder: Path, *lines: str, before: str = ""
) -> Iterator[tuple[warm.Process, str, Path]]:
    """A server in a process of its own, its address and its log. What gRPC's core may yet call back
    for a server that it lost goes with the process."""
    config, log = folder / "server.yaml", folder / "log"
    config.write_text("\n".join(["listen: 127.0.0.1:0", f"indexes: {{i: {index}}}", *lines]))
    program = (
        f"{before}\nimport sys\nfrom dualform.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    process = warm.start(program, "serve", "--config", config, errors=log.open("w+b"))
    try:
        found = re.search(r"listening on (\S+)", process.stdout.readline())
        assert found, log.read_text()
        yield process, found[1], log
    finally:
        process.kill()
        process.wait()
        process.close()


@pytest.fixture(scope="module")
def ends(index: Path, tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether such a frame ends the library's server: grpcio 1.62's goes on by itself."""
    with command(index, tmp_path_factory.mktemp("ends")) as (_, address, log):
        ended(address)
        until_it_serves(address)
        return "another takes its place" in log.read_text()


@pytest.mark.parametrize("which", ["server", "admin"])
def test_a_method_whose_name_is_no_text_ends_nothing(
    index: Path, tmp_path: Path, which: str
) -> None:
    admin = f"127.0.0.1:{free_port()}"
    with command(index, tmp_path, f"admin: {admin}") as (process, address, log):
        for _ in range(3):
            ended(address if which == "server" else admin)
            until_it_serves(address if which == "server" else admin)
        with Client(address) as client:
            rows = client.top_k("fc", QUERIES, k=1).rows
            assert rows.shape == (1, 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()


def test_after_too_many_the_server_is_lost_and_drains(
    index: Path, ends: bool, tmp_path: Path
) -> None:
    if not ends:
        pytest.skip("this version of grpcio loses no server")
    none = "from dualform.serve import lasting\nlasting._MOST_GONE = 0"
    with command(index, tmp_path, before=none) as (process, address, log):
        ended(address)
        assert process.wait(timeout=60) == 1, log.read_text()
        assert "is not listened on again: the process has to end" in log.read_text()
        assert "drained" in log.read_text()


def test_the_command_goes_on_and_its_log_has_no_token(
    index: Path, ends: bool, tmp_path: Path
) -> None:
    (tmp_path / "tokens.txt").write_text(f"alice:{TOKEN}\n")
    with command(index, tmp_path, "tokens: tokens.txt") as (process, address, log):
        # As pasted, with a space that does not break in Latin-1 behind it.
        wrong = os.fsdecode(b"Bearer " + TOKEN.encode() + b"\xa0")
        ended(address, "/dualform.v1.AttributionService/ListIndexes", ("authorization", wrong))
        ended(address)
        with Client(address, token=TOKEN) as client:
            assert client.top_k("fc", QUERIES, k=1).rows.shape == (1, 1)
        with Client(address, token=f"{TOKEN}0") as client, pytest.raises(UnauthenticatedError):
            client.indexes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
        said = log.read_text()
        assert ("another takes its place" in said) == ends
        assert TOKEN not in said
        assert "reason=BAD_TOKEN" in said
