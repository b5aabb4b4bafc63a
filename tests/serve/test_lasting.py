"""Frames that end gRPC's own server, and that make it quote what callers sent."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import warm
from grpc_health.v1 import health_pb2, health_pb2_grpc
from synthetic import make_index

from dualform.client import Client
from dualform.client.errors import UnauthenticatedError
from dualform.serve import lasting

from .raw import call, connect
from .serving import serving

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


@pytest.fixture(scope="module")
def ends(index: Path) -> bool:
    """Whether such a frame ends the library's server: grpcio 1.62's goes on by itself."""
    before = len(lasting._GONE)
    with serving({"i": index}) as served:
        ended(served.address)
        until_it_serves(served.address)
    return len(lasting._GONE) > before


@pytest.mark.parametrize("which", ["server", "admin"])
def test_a_method_whose_name_is_no_text_ends_nothing(index: Path, which: str) -> None:
    with serving({"i": index}, admin="127.0.0.1:0") as served:
        assert served.server._admin is not None
        address = served.address if which == "server" else served.server._admin.address
        for _ in range(3):
            ended(address)
            until_it_serves(address)
        with Client(served.address) as client:
            rows = client.top_k("fc", QUERIES, k=1).rows
            assert rows.shape == (1, 1)


def test_after_too_many_the_server_is_lost_and_drains(
    index: Path, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ends:
        pytest.skip("this version of grpcio loses no server")
    monkeypatch.setattr(lasting, "_MOST_GONE", 0)
    with serving({"i": index}) as served:
        ended(served.address)
        end = time.monotonic() + 20
        while not served.server.lost.is_set():
            assert time.monotonic() < end
            time.sleep(0.01)


def test_the_command_goes_on_and_its_log_has_no_token(
    index: Path, ends: bool, tmp_path: Path
) -> None:
    (tmp_path / "tokens.txt").write_text(f"alice:{TOKEN}\n")
    config = tmp_path / "server.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nindexes: {{i: {index}}}\ntokens: tokens.txt\n")
    log = tmp_path / "log"
    process = warm.start("dualform", "serve", "--config", config, errors=log.open("w+b"))
    try:
        found = re.search(r"listening on (\S+)", process.stdout.readline())
        assert found, log.read_text()
        # As pasted, with a space that does not break in Latin-1 behind it.
        wrong = os.fsdecode(b"Bearer " + TOKEN.encode() + b"\xa0")
        ended(found[1], "/dualform.v1.AttributionService/ListIndexes", ("authorization", wrong))
        ended(found[1])
        with Client(found[1], token=TOKEN) as client:
            assert client.top_k("fc", QUERIES, k=1).rows.shape == (1, 1)
        with Client(found[1], token=f"{TOKEN}0") as client, pytest.raises(UnauthenticatedError):
            client.indexes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
        said = log.read_text()
        assert ("another takes its place" in said) == ends
        assert TOKEN not in said
        assert "reason=BAD_TOKEN" in said
    finally:
        process.kill()
        process.wait()
        process.close()
