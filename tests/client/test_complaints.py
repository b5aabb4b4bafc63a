"""What users of vector and attribution servers complain about, and does not happen here.

Each is named after the complaint; docs/reliability.md has the table of all, and of tests elsewhere.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import warm
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualform.client import Client, InternalError, ResourceExhaustedError
from dualform.engine.messages.catalog import Catalog
from dualform.serve import ServerLimits
from dualform.v1 import admin_pb2, attribution_pb2

from .memory import D_IN, Memory
from .serving import free_port, serving

ROOT = Path(__file__).resolve().parents[2]
COMPLAINTS = 18


def test_a_huge_k_aborts_the_server(remote: Client, queries: np.ndarray) -> None:
    expected = remote.top_k("fc", queries, k=2)
    for k in (10**9, 2**62):
        with pytest.raises(ResourceExhaustedError, match="16,384"):
            remote.top_k("fc", queries, k=k)
    after = remote.top_k("fc", queries, k=2)
    assert after.rows.tobytes() == expected.rows.tobytes()


class FailsOnTheSecond(Catalog):
    """As a fault of the machine would, in the middle of a batch."""

    asked = 0

    def answer(self, request: Any, stop: Callable[[], bool] | None = None) -> Any:
        type(self).asked += 1
        if self.asked == 2:
            raise RuntimeError("boom")
        return super().answer(request, stop)


def test_errors_are_swallowed_in_batches(memory: Memory, queries: np.ndarray) -> None:
    limits, indexes = ServerLimits(max_queries=4), {"memory": memory.path}
    with (
        serving(indexes, limits=limits, catalog=FailsOnTheSecond(indexes)) as address,
        Client(address) as client,
    ):
        with pytest.raises(InternalError):
            client.sums("fc", queries, group_by="label")
        assert FailsOnTheSecond.asked == 2
        assert client.sums("fc", queries, group_by="label").values.shape[0] == len(queries)


def test_four_megabytes_are_the_most_that_the_client_takes(remote: Client, local: Client) -> None:
    queries = np.random.default_rng(4).standard_normal((1200, D_IN)).astype(np.float32)
    remote_hits, local_hits = (each.top_k("fc", queries, k=600) for each in (remote, local))
    assert remote_hits.rows.nbytes + remote_hits.scores.nbytes > 2 * (4 << 20)
    assert remote_hits.rows.tobytes() == local_hits.rows.tobytes()
    assert remote_hits.scores.tobytes() == local_hits.scores.tobytes()


SLOW_TO_OPEN = """
import pathlib, sys, time
from dualform.engine.api.index import Index
from dualform.serve import ServerConfig, run
opened = Index.open.__func__
def slowly(*arguments, **named):
    time.sleep(1.5)
    return opened(*arguments, **named)
Index.open = classmethod(slowly)
sys.exit(run(ServerConfig({"memory": pathlib.Path(sys.argv[1])}, listen=sys.argv[2])))
"""


def test_health_says_ready_before_it_is(memory: Memory, queries: np.ndarray) -> None:
    address = f"127.0.0.1:{free_port()}"
    early = 0
    with warm.start(SLOW_TO_OPEN, memory.path, address) as server:
        end = time.monotonic() + 60
        while not _serving(address):
            early += 1
            assert time.monotonic() < end, server.errors()
            time.sleep(0.05)
        with Client(address, retry=None, timeout=30) as client:
            assert client.top_k("fc", queries, k=2).rows.shape == (len(queries), 2)
    assert early > 5


def _serving(address: str) -> bool:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        request = health_pb2.HealthCheckRequest(service="dualform.index.memory")
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_two_packages_register_the_same_proto_file() -> None:
    """Names of files and packages begin with ours, so that no other can."""
    for module in (attribution_pb2, admin_pb2):
        assert module.DESCRIPTOR.name.startswith("dualform/v1/")
        assert module.DESCRIPTOR.package == "dualform.v1"


def test_grpcio_is_pinned() -> None:
    text = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0]
    bounds = re.findall(r'"([\w-]+)([^"]*)"', text)
    assert {"numpy", "grpcio", "protobuf"} <= {name for name, _ in bounds}
    assert not [name for name, bound in bounds if not re.fullmatch(r">=[\d.]+", bound)]


def test_every_complaint_has_its_test() -> None:
    """The table has all of them, each with tests that are there."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    table = page.split("## What users of such systems complain about")[1].split("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= COMPLAINTS
    for complaint, _, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, complaint
        for file, name in named:
            assert f"def {name}(" in (ROOT / file).read_text(), (file, name)
