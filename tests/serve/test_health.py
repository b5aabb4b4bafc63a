"""Health as it is told to those who may know, whatever those do who watch it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from synthetic import make_index

from dualform.serve.server import LOOK_S

from .raw import INITIAL_WINDOW_SIZE, call, connect
from .serving import NOT_SERVING, SERVING, Served, serving

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
BOB = (("authorization", "Bearer bbbb"),)
ALL = (("authorization", "Bearer aaaa"),)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(3).standard_normal((20, 6)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("index"), keys, None)


@pytest.fixture
def guarded(index: Path, tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "tokens").write_text("all:aaaa\nbob:bbbb:one\n")
    with serving({"one": index, "two": index}, tokens=tmp_path / "tokens") as served:
        yield served


def request(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def test_a_token_learns_of_its_indexes_alone(guarded: Served) -> None:
    stub: Any = health_pb2_grpc.HealthStub(guarded.channel)
    for service in ("", "dualform.v1.AttributionService", "dualform.index.one"):
        assert stub.Check(request(service), metadata=BOB).status == SERVING
    for hidden in ("dualform.index.two", "dualform.index.never"):
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(request(hidden), metadata=BOB)
        error: Any = refused.value
        assert error.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(request(hidden), metadata=BOB, timeout=20)
        assert next(watch).status == UNKNOWN
        watch.cancel()
    assert stub.Check(request("dualform.index.two"), metadata=ALL).status == SERVING
    if hasattr(health_pb2, "HealthListRequest"):
        for metadata, names in ((BOB, {"one"}), (ALL, {"one", "two"})):
            listed = stub.List(health_pb2.HealthListRequest(), metadata=metadata).statuses
            assert set(listed) == {
                *("", "dualform.v1.AttributionService"),
                *(f"dualform.index.{name}" for name in names),
            }


def test_what_is_found_and_mended_between_two_looks_is_told(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question met it and health said so; when the server looks again, all is well."""
    with serving({"i": index}) as served:

        async def met() -> int:
            with monkeypatch.context() as patch:
                patch.setattr(served.catalog, "reason", lambda name: "rows are nowhere")
                await served.server._refresh()
            return served.server._health.statuses["dualform.index.i"]

        time.sleep(1.5 * LOOK_S)
        assert asyncio.run_coroutine_threadsafe(met(), served.loop).result(60) == NOT_SERVING
        end = time.monotonic() + 60
        while served.health("dualform.index.i") != SERVING:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_who_watches_and_does_not_read_keeps_nobody_from_anything(index: Path) -> None:
    with ExitStack() as silent:
        with serving({"one": index}) as served:
            connection = silent.enter_context(connect(served.address, (INITIAL_WINDOW_SIZE, 0)))
            for number in range(1, 100, 2):
                connection.sendall(call(number, "/grpc.health.v1.Health/Watch"))
            stub = health_pb2_grpc.HealthStub(served.channel)
            watches = [stub.Watch(request(""), timeout=30) for _ in range(2)]
            assert [next(watch).status for watch in watches] == [SERVING] * 2
            served.reload()
            watches[0].cancel()
            served.loop.call_soon_threadsafe(served.server._health.drain)
            assert next(watches[1]).status == NOT_SERVING
            begin = time.monotonic()
        # It has drained, while the silent one was there.
        assert time.monotonic() - begin < 20
