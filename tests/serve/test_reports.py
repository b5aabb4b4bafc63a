"""What the operator is told: a line per call with its id, and metrics by their official names."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import warm
from prometheus_client.parser import text_string_to_metric_families
from synthetic import make_index

from dualform.engine.messages.catalog import Catalog
from dualform.serve import ServerLimits
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import Served, serving, tensor

ROWS = 40
HELD = 7


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


class HoldingCatalog(Catalog):
    """Top-k with k = HELD waits at a gate, as a long scan would."""

    gate = threading.Event()

    def answer(self, request: Any, stop: Callable[[], bool] | None = None) -> Any:
        if getattr(request, "k", 0) == HELD and stop is not None:
            assert self.gate.wait(60)
        return super().answer(request, stop)


def test_metrics_say_what_waits_what_was_joined_and_how_it_was_answered(index: Path) -> None:
    HoldingCatalog.gate.clear()
    limits = ServerLimits(concurrent_scans=1)
    with serving({"i": index}, limits, HoldingCatalog, metrics="127.0.0.1:0") as served:
        assert served.server._page is not None
        url = f"http://{served.server._page.address}/metrics"

        def value(name: str, **labels: str) -> float | None:
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
            for family in text_string_to_metric_families(text):
                for each in family.samples:
                    if each.name == name and each.labels == labels:
                        return each.value
            return None

        def until(name: str, wanted: float) -> None:
            end = time.monotonic() + 60
            while (found := value(name)) != wanted:
                assert time.monotonic() < end, (name, found)
                time.sleep(0.02)

        before = value("dualform_request_bytes")
        held = served.stub.TopK.future(top_k(k=HELD))
        until("dualform_scans_running", 1)
        # Five alike wait: one scan will answer them. A large one goes by itself.
        alike = [served.stub.TopK.future(top_k()) for _ in range(5)]
        until("dualform_scans_waiting", 5)
        large = tensor(np.zeros((60_000, 6), np.float32))
        refused = served.stub.TopK.future(top_k(k=HELD, queries=large))
        end = time.monotonic() + 60
        while (bytes_held := value("dualform_request_bytes")) == before:
            assert time.monotonic() < end
        assert before == 0
        assert bytes_held == pytest.approx(len(large.data), abs=100)
        time.sleep(0.3)
        HoldingCatalog.gate.set()
        for call in [held, *alike]:
            call.result(timeout=60)
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # limits.max_queries
        until("dualform_request_bytes", 0)
        until("dualform_scans_waiting", 0)
        until("dualform_scans_running", 0)
        method = "dualform.v1.AttributionService/TopK"
        assert value("dualform_joined_total", grpc_method=method) == 5
        assert value("dualform_scans_total") == 3
        queued = {
            bound: value("dualform_queued_seconds_bucket", grpc_method=method, le=bound)
            for bound in ("0.25", "+Inf")
        }
        # The one that was held waited for nothing, six did.
        assert queued == {"0.25": 1, "+Inf": 7}
        total = value("dualform_queued_seconds_sum", grpc_method=method)
        assert total is not None
        assert total > 6 * 0.3
        strategy = served.stub.TopK(top_k(explain_plan=True)).plan.strategy
        name = pb.Strategy.Name(strategy).removeprefix("STRATEGY_").lower()
        assert value("dualform_strategy_total", grpc_method=method, strategy=name) == 7
        # Just written, and read: all of it is in the page cache.
        assert value("dualform_index_resident_ratio", index="i") == 1


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
        ("indexes: {{i: {index}}}\nmemory: 100MiB", 2, "MiB are needed"),
        ("indexes: {{i: {index}}}\nmemory: 8GiB", 0, "index i: can be served"),
        (
            "indexes: {{i: {index}}}\nlisten: 192.0.2.7:0\ninsecure: true",
            2,
            "listen: cannot listen on 192.0.2.7:0",
        ),
        (
            "indexes: {{i: {index}}}\nlisten: nobody.invalid:0\ninsecure: true",
            2,
            "listen: cannot listen on nobody.invalid:0",
        ),
        (
            "indexes: {{i: {index}}}\nlisten: 0.0.0.0:39\ninsecure: true\nmetrics: 127.0.0.1:39",
            2,
            "metrics and listen are both 127.0.0.1:39",
        ),
        (
            "indexes: {{i: {index}}}\nmetrics: localhost:5998\nadmin: 127.0.0.1:5998",
            2,
            "admin and metrics are both 127.0.0.1:5998",
        ),
    ],
)
def test_check_config(index: Path, tmp_path: Path, text: str, status: int, word: str) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(text.format(index=index))
    done = warm.run("dualform", "serve", "--config", config, "--check-config")
    assert done.returncode == status
    assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_check_config_beside_a_server_that_runs(index: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        config.write_text(f"listen: {taken}\nmetrics: 127.0.0.1:0\nindexes: {{i: {index}}}\n")
        done = warm.run("dualform", "serve", "--config", config, "--check-config")
        assert done.returncode == 0, done.stderr
        assert "listen: its port is taken now" in done.stdout
        refused = warm.run("dualform", "serve", "--config", config)
        assert refused.returncode == 2
        assert f"cannot listen on {taken}: the port is taken" in refused.stderr
