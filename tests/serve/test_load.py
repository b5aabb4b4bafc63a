"""Under load: clients that ping, cheap questions beside expensive ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from synthetic import make_index

from dualform.engine.messages.catalog import Catalog
from dualform.serve import ServerLimits, scans
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import Served, serving, tensor

EXPENSIVE = 77


class HoldingCatalog(Catalog):
    """Top-k with k = EXPENSIVE waits at a gate, as a long scan would."""

    gate = threading.Event()
    held = 0

    def answer(self, request: Any, stop: Callable[[], bool] | None = None) -> Any:
        if getattr(request, "k", 0) == EXPENSIVE and stop is not None:
            type(self).held += 1
            while not self.gate.wait(0.005) and not stop():
                pass
        return super().answer(request, stop)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(3).standard_normal((400, 6)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("index"), keys, None)


@pytest.fixture
def holding(index: Path) -> Iterator[Served]:
    HoldingCatalog.gate.clear()
    HoldingCatalog.held = 0
    limits = ServerLimits(concurrent_scans=2, queued_scans=16)
    with serving({"i": index}, limits, HoldingCatalog) as served:
        yield served
        HoldingCatalog.gate.set()


def top_k(k: int, n: int = 1) -> pb.TopKRequest:
    return pb.TopKRequest(layer="fc", k=k, queries=tensor(np.ones((n, 6), np.float32)))


def expensive(number: int) -> pb.TopKRequest:
    """One that is joined with no other."""
    request = top_k(EXPENSIVE)
    request.where.comparison.column = "step"
    request.where.comparison.operator = pb.OPERATOR_GE
    request.where.comparison.values.add(int64_value=-number)
    return request


@pytest.mark.slow
def test_a_client_that_pings_keeps_its_call(holding: Served) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(holding.address, options=options) as channel:
        call = attribution_pb2_grpc.AttributionServiceStub(channel).TopK.future(expensive(1))
        # gRPC's own smallest interval is 5 minutes; it counts three pings before it hangs up.
        time.sleep(7)
        assert not call.done(), call.details()
        HoldingCatalog.gate.set()
        assert list(call.result(timeout=10).rows.shape) == [1, EXPENSIVE]


def test_cheap_questions_pass_expensive_ones(
    holding: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "CHEAP_S", 2.0)  # a busy machine's stalls are no questions' costs
    for _ in range(3):  # what they cost is learned
        holding.stub.TopK(top_k(2), timeout=20)
    calls = [holding.stub.TopK.future(expensive(number)) for number in range(12)]
    end = time.monotonic() + 20
    while HoldingCatalog.held < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    for _ in range(20):
        assert list(holding.stub.TopK(top_k(2), timeout=5).rows.shape) == [1, 2]
    assert not any(call.done() for call in calls)
    HoldingCatalog.gate.set()
    for call in calls:
        call.result(timeout=20)
