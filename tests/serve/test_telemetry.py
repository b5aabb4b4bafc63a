"""Traces: a span for each question, by the official instrumentation, in the caller's trace."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from synthetic import make_index

from dualform._install import pip_install
from dualform.engine.errors import CancelledError
from dualform.v1 import attribution_pb2 as pb

from .raw import call, connect
from .serving import Served, array, serving, tensor

SERVICE = "dualform.v1.AttributionService"
# W3C Trace Context: version, trace, parent, flags.
PARENT = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
KEYS = np.random.default_rng(3).standard_normal((40, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """What the process's only tracer provider, which can be set once, hands its spans to."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def traced(
    exporter: InMemorySpanExporter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    index = make_index(tmp_path_factory.mktemp("index"), KEYS, None)
    with serving({"i": index}, telemetry=True) as served:
        yield served


def only(exporter: InMemorySpanExporter) -> Any:
    (span,) = exporter.get_finished_spans()
    exporter.clear()
    return span


def top_k(**changes: Any) -> pb.TopKRequest:
    queries = tensor(np.full((3, 6), 12.5, np.float32))
    return pb.TopKRequest(**{"layer": "fc", "k": 2, "queries": queries, **changes})


def test_a_question_is_a_span_of_its_callers_trace(
    traced: Served, exporter: InMemorySpanExporter
) -> None:
    exporter.clear()
    traced.stub.TopK(top_k(), metadata=(PARENT, ("x-request-id", "mine")))
    span = only(exporter)
    assert span.name == f"/{SERVICE}/TopK"
    assert span.kind is trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == PARENT[1].split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT[1].split("-")[2]
    known = {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "TopK",
        "rpc.grpc.status_code": 0,
        "dualform.id": "mine",
        "dualform.index": "i",
        "dualform.layer": "fc",
        "dualform.queries": 3,
        "dualform.k": 2,
        "dualform.rows": 40,
    }
    assert known.items() <= dict(span.attributes).items()
    assert "12.5" not in str(span.attributes)


def test_a_refusal_has_its_code(traced: Served, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    with pytest.raises(grpc.RpcError):
        traced.stub.TopK(top_k(layer="nope"))
    span = only(exporter)
    assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    # By OpenTelemetry's conventions a caller's mistake is no error of the server's.
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_stream_is_whole_and_one_span(traced: Served, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    request = pb.StreamWeightsRequest(layer="fc", queries=tensor(np.eye(6, dtype=np.float32)))
    parts = list(traced.stub.StreamWeights(request))
    np.testing.assert_array_equal(np.concatenate([array(p.weights) for p in parts], 1), KEYS.T)
    span = only(exporter)
    assert span.name == f"/{SERVICE}/StreamWeights"
    assert span.attributes["rpc.grpc.status_code"] == 0
    with pytest.raises(grpc.RpcError):
        list(
            traced.stub.StreamWeights(pb.StreamWeightsRequest(layer="no", queries=request.queries))
        )
    refused = only(exporter)
    assert refused.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_missed_deadline_is_an_error(
    traced: Served, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forever(request: Any, stop: Any = None) -> Any:
        while not stop():
            time.sleep(0.005)
        raise CancelledError("given up")

    monkeypatch.setattr(traced.catalog, "answer", forever)
    exporter.clear()
    # By hand: gRPC's client gives up by itself, at times before the server's own clock says so.
    with connect(traced.address) as connection:
        path, request = "/dualform.v1.AttributionService/TopK", top_k().SerializeToString()
        connection.sendall(call(1, path, request, ("grpc-timeout", "200m")))
        end = time.monotonic() + 10
        while not exporter.get_finished_spans() and time.monotonic() < end:
            time.sleep(0.01)
    span = only(exporter)
    assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert span.status.status_code is trace.StatusCode.ERROR


def test_health_checks_are_no_spans(traced: Served, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    traced.health()
    assert not exporter.get_finished_spans()


def test_without_the_extra_it_is_told(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None; "
        "from dualform.serve.telemetry import Telemetry; Telemetry()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert pip_install("telemetry") in done.stderr
