"""What the operator is told: a line per call with its id, and metrics by their official names."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import warm
from prometheus_client.parser import text_string_to_metric_families
from synthetic import make_index

from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import Served, serving, tensor

ROWS = 40


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(3).standard_normal((ROWS, 6)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("index"), keys, None)


@pytest.fixture
def measured(index: Path) -> Iterator[tuple[Served, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with serving({"i": index}, metrics=address) as served:
        yield served, f"http://{address}/metrics"


def top_k(**changes: Any) -> pb.TopKRequest:
    queries = tensor(np.full((3, 6), 12.5, np.float32))
    return pb.TopKRequest(**{"layer": "fc", "k": 2, "queries": queries, **changes})


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    texts = [each.getMessage() for each in caplog.records if each.name == "dualform.calls"]
    return [dict(re.findall(r"(\S+?)=(\S*)", text)) for text in texts]


def test_each_call_has_one_line_and_its_id(
    measured: tuple[Served, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dualform")
    served, _ = measured
    answer, call = served.stub.TopK.with_call(top_k(), metadata=(("x-request-id", "mine-1"),))
    assert not answer.HasField("plan")
    assert dict(call.trailing_metadata())["x-request-id"] == "mine-1"
    with pytest.raises(grpc.RpcError) as caught:
        served.stub.TopK(top_k(layer="nope"), metadata=(("x-request-id", "not a word, at all"),))
    refused: Any = caught.value
    made = dict(refused.trailing_metadata())["x-request-id"]
    assert re.fullmatch("[0-9a-f]{16}", made)
    stream = served.stub.StreamWeights(pb.StreamWeightsRequest(layer="fc", queries=top_k().queries))
    list(stream)
    assert dict(stream.trailing_metadata())["x-request-id"]
    first, second, third = lines(caplog)
    known = {"call": "TopK", "id": "mine-1", "code": "OK", "index": "i", "layer": "fc"}
    assert first.items() >= {**known, "queries": "3", "k": "2", "rows": str(ROWS)}.items()
    assert first["strategy"] in ("scan", "flat", "certified")
    assert float(first["computed_ms"]) <= float(first["ms"])
    assert second.items() >= {"call": "TopK", "id": made, "code": "NOT_FOUND"}.items()
    assert third.items() >= {"call": "StreamWeights", "code": "OK", "queries": "3"}.items()
    assert "12.5" not in caplog.text


def test_what_a_caller_names_cannot_add_lines_to_the_log(
    measured: tuple[Served, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dualform")
    served, _ = measured
    with pytest.raises(grpc.RpcError):
        served.stub.TopK(top_k(layer="x code=OK\nERROR all is lost " + "y" * 5000))
    (text,) = [each.getMessage() for each in caplog.records if each.name == "dualform.calls"]
    assert "\n" not in text
    assert len(text) < 500
    assert 'layer="x code=OK\\nERROR all' in text


def test_a_plan_is_there_for_those_who_ask(measured: tuple[Served, str]) -> None:
    served, _ = measured
    assert served.stub.TopK(top_k(explain_plan=True)).plan.reason
    assert not served.stub.TopK(top_k()).HasField("plan")


def test_metrics_have_their_official_names(measured: tuple[Served, str]) -> None:
    served, url = measured
    for _ in range(3):
        served.stub.TopK(top_k())
    with pytest.raises(grpc.RpcError):
        served.stub.TopK(top_k(k=0))
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    samples = {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    method = ("grpc_method", "dualform.v1.AttributionService/TopK")
    name = "grpc_server_call_duration_seconds_count"
    assert samples[name, (method, ("grpc_status", "OK"))] == 3
    assert samples[name, (method, ("grpc_status", "INVALID_ARGUMENT"))] == 1
    assert samples["dualform_rows_covered_total", (("index", "i"),)] == 3 * ROWS
    assert samples["dualform_scans_waiting", ()] == 0
    served.server._scans.stopped("TopK", 0.07)
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    given_up = 'dualform_stopped_seconds_bucket{grpc_method="%s",le="%s"}'
    assert f"{given_up % (method[1], 0.065)} 0.0" in text
    assert f"{given_up % (method[1], 0.08)} 1.0" in text
    assert samples["process_resident_memory_bytes", ()] > 1e6
    assert samples["process_open_fds", ()] > 3
    version = served.catalog.version("i")
    assert samples["dualform_index_serving", (("index", "i"), ("version", version))] == 1


def test_json_lines(index: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"log: json\nlisten: 127.0.0.1:0\nindexes: {{i: {index}}}\n")
    with warm.start("dualform", "serve", "--config", config) as server:
        address = server.stdout.readline().removeprefix("listening on ").strip()
        with grpc.insecure_channel(address) as channel:
            stub = attribution_pb2_grpc.AttributionServiceStub(channel)
            stub.TopK(top_k(), timeout=60)
        server.terminate()
        assert server.wait(30) == 0
        log = server.errors()
    told = [json.loads(line) for line in log.splitlines()]
    calls = [each for each in told if each["logger"] == "dualform.calls"]
    assert [(each["call"], each["queries"], each["rows"]) for each in calls] == [("TopK", 3, ROWS)]


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [
        ("indexes: {{i: {index}}}", 0, "index i: can be served"),
        ("indexes: {{i: {index}, j: nowhere}}", 2, "index j: "),
        ("indexes: {{i: {index}}}\ntokens: nowhere", 2, "tokens: "),
        ("indexes: {{i: {index}}}\ntls: {{certificate: a, key: b}}", 2, "tls.certificate"),
        ("indexes: {{i: {index}}}\nnonsense: 1", 2, "nonsense"),
    ],
)
def test_check_config(index: Path, tmp_path: Path, text: str, status: int, word: str) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(text.format(index=index))
    done = warm.run("dualform", "serve", "--config", config, "--check-config")
    assert done.returncode == status
    assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
