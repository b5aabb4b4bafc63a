"""A running server: health beside scans, deadlines, a full queue, many clients, a drain."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import warm
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from synthetic import make_index

from dualform.engine.messages.catalog import Catalog
from dualform.serve import ServerLimits
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import NOT_SERVING, SERVING, Served, array, refusal, serving, tensor

SERVICE = "dualform.v1.AttributionService"


class GatedCatalog(Catalog):
    """A catalog whose scans wait at a gate, as long ones would, and poll `stop` meanwhile."""

    gate = threading.Event()
    started = 0
    stopped = 0

    def answer(self, request: Any, stop: Callable[[], bool] | None = None) -> Any:
        if stop is not None:
            type(self).started += 1
            while not self.gate.wait(0.005):
                if stop():
                    type(self).stopped += 1
                    break
        return super().answer(request, stop)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(3).standard_normal((400, 6)).astype(np.float32)
    labels: list[object] = [row % 3 for row in range(400)]
    return make_index(tmp_path_factory.mktemp("index"), keys, keys[:, :4], label=labels)


@pytest.fixture
def gated(index: Path) -> Iterator[Served]:
    GatedCatalog.gate.clear()
    GatedCatalog.started = GatedCatalog.stopped = 0
    limits = ServerLimits(concurrent_scans=2, queued_scans=3)
    with serving({"i": index}, limits, GatedCatalog) as served:
        yield served
        GatedCatalog.gate.set()


NUMBERS = itertools.count(1)


def question(n: int = 1, k: int = 2) -> pb.TopKRequest:
    """A question with a filter of its own, which all rows pass: it is not joined with others."""
    queries = np.random.default_rng(n).standard_normal((n, 6)).astype(np.float32)
    later = pb.Comparison(
        column="step", operator=pb.OPERATOR_GE, values=[pb.Value(int64_value=-next(NUMBERS))]
    )
    return pb.TopKRequest(
        layer="fc", queries=tensor(queries), k=k, where=pb.Filter(comparison=later)
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_cheap_calls_pass_the_queue(gated: Served) -> None:
    calls = [gated.stub.TopK.future(question()) for _ in range(5)]
    until(lambda: GatedCatalog.started == 2)
    begin = time.monotonic()
    assert gated.health() == SERVING
    assert gated.health("dualform.index.i") == SERVING
    assert gated.stub.ListIndexes(pb.ListIndexesRequest(), timeout=5).indexes[0].name == "i"
    assert gated.stub.GetIndex(pb.GetIndexRequest(), timeout=5).index.name == "i"
    assert time.monotonic() - begin < 2
    assert GatedCatalog.started == 2
    GatedCatalog.gate.set()
    for call in calls:
        assert list(call.result(timeout=10).rows.shape) == [1, 2]


def test_a_full_queue_refuses(gated: Served) -> None:
    calls = [gated.stub.TopK.future(question()) for _ in range(5)]
    until(lambda: GatedCatalog.started == 2)
    # All five are inside once a sixth is refused; calls may arrive out of order.
    refused = refusal(lambda: until_refused(gated))
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert "limits.queued_scans" in refused.message
    assert refused.retry_after is not None
    assert 0 < refused.retry_after <= 30
    GatedCatalog.gate.set()
    for call in calls:
        call.result(timeout=10)
    assert list(gated.stub.TopK(question()).rows.shape) == [1, 2]


def until_refused(served: Served) -> None:
    while True:
        try:
            served.stub.TopK(question(), timeout=0.2)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise


def test_a_deadline_stops_the_scan(gated: Served) -> None:
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as caught:
            gated.stub.TopK(question(), timeout=0.1)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: GatedCatalog.stopped == 3)
    GatedCatalog.gate.set()
    assert list(gated.stub.TopK(question()).rows.shape) == [1, 2]


def test_cancelling_stops_the_scan_and_empties_the_queue(gated: Served) -> None:
    calls = [gated.stub.TopK.future(question()) for _ in range(5)]
    until(lambda: GatedCatalog.started == 2)
    for call in calls:
        call.cancel()
    until(lambda: GatedCatalog.stopped == GatedCatalog.started)
    GatedCatalog.gate.set()
    assert list(gated.stub.TopK(question()).rows.shape) == [1, 2]


def test_a_client_that_vanishes_stops_the_scan(gated: Served) -> None:
    channel = grpc.insecure_channel(gated.address)
    stub = attribution_pb2_grpc.AttributionServiceStub(channel)
    call = stub.TopK.future(question())
    until(lambda: GatedCatalog.started == 1)
    channel.close()
    until(lambda: GatedCatalog.stopped == 1)
    assert call.done()


class BrokenCatalog(Catalog):
    """A catalog with a bug."""

    def answer(self, request: Any, stop: Callable[[], bool] | None = None) -> Any:
        if stop is not None:
            raise KeyError("secret path /etc/shadow")
        return super().answer(request, stop)


def test_a_bug_is_told_to_the_log_only(index: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving({"i": index}, None, BrokenCatalog) as served:
        refused = refusal(lambda: served.stub.TopK(question()))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "secret" not in refused.message
        ticket = refused.message.split()[2].rstrip(":")
        assert f"TopK failed [{ticket}]" in caplog.text
        assert "secret path" in caplog.text
        assert served.health() == SERVING


def test_many_clients_get_the_answers_of_one(index: Path) -> None:
    requests = [question(n, 5) for n in range(1, 65)]
    with serving({"i": index}) as served:
        alone = [array(served.stub.TopK(request).scores) for request in requests]

        def ask(request: pb.TopKRequest) -> np.ndarray:
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(served.address, options=options) as channel:
                stub = attribution_pb2_grpc.AttributionServiceStub(channel)
                return array(stub.TopK(request, timeout=60).scores)

        with ThreadPoolExecutor(64) as clients:
            together = list(clients.map(ask, requests))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_health_can_be_watched(index: Path) -> None:
    with serving({"i": index}) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        request = health_pb2.HealthCheckRequest(service="dualform.index.i")
        statuses = stub.Watch(request, timeout=30)
        assert next(statuses).status == SERVING
        statuses.cancel()


def test_reflection_describes_the_service(index: Path) -> None:
    with serving({"i": index}) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)

        def ask(**request: str) -> Any:
            message = reflection_pb2.ServerReflectionRequest(**request)
            return next(iter(stub.ServerReflectionInfo(iter([message]))))

        listed = {each.name for each in ask(list_services="").list_services_response.service}
        assert listed >= {SERVICE, "grpc.health.v1.Health"}
        found = ask(file_containing_symbol=SERVICE).file_descriptor_response
        file = descriptor_pb2.FileDescriptorProto.FromString(found.file_descriptor_proto[0])
        assert [method.name for method in file.service[0].method] == [
            "ListIndexes",
            "GetIndex",
            "TopK",
            "TopGroups",
            "Attribute",
            "SelfInfluence",
            "Sums",
            "DualOutput",
            "Explain",
            "StreamWeights",
            "GetExamples",
        ]


def test_reflection_answers_under_its_newer_name_too(index: Path) -> None:
    with serving({"i": index}) as served:
        name = "grpc.reflection.v1.ServerReflection"
        call = served.channel.stream_stream(f"/{name}/ServerReflectionInfo")
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(call(iter([request.SerializeToString()]), timeout=10)))
        found = reflection_pb2.ServerReflectionResponse.FromString(answer)
        listed = {each.name for each in found.list_services_response.service}
        assert listed >= {SERVICE, name}


@pytest.mark.skipif(not hasattr(health_pb2, "HealthListRequest"), reason="stubs without List")
def test_health_lists_what_is_served(index: Path) -> None:
    with serving({"i": index}) as served:
        stub: Any = health_pb2_grpc.HealthStub(served.channel)
        listed = stub.List(health_pb2.HealthListRequest(), timeout=10).statuses
        assert {name: each.status for name, each in listed.items()} == dict.fromkeys(
            ("", SERVICE, "dualform.index.i"), SERVING
        )


SCRIPT = """
import sys, pathlib
from dualform.serve import ServerConfig, run
sys.exit(run(ServerConfig({"i": pathlib.Path(sys.argv[1])}, listen=sys.argv[2])))
"""


@pytest.fixture
def process(index: Path) -> Iterator[Callable[..., tuple[warm.Process, str]]]:
    """Starts servers in processes of their own; returns each with its address."""
    started: list[warm.Process] = []

    def start(listen: str = "127.0.0.1:0") -> tuple[warm.Process, str]:
        server = warm.start(SCRIPT, index, listen)
        started.append(server)
        line = server.stdout.readline()
        return server, line.removeprefix("listening on ").strip()

    yield start
    for server in started:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(process: Any, number: int) -> None:
    server, address = process()
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert next(watch).status == SERVING
        stub = attribution_pb2_grpc.AttributionServiceStub(channel)
        assert list(stub.TopK(question(), timeout=60).rows.shape) == [1, 2]
        begin = time.monotonic()
        os.kill(server.pid, number)
        # Load balancers are told first; what still arrives is answered.
        assert next(watch).status == NOT_SERVING
        assert list(stub.TopK(question(), timeout=60).rows.shape) == [1, 2]
        assert server.wait(30) == 0
        assert time.monotonic() - begin < 15
        with pytest.raises(grpc.RpcError) as caught:
            stub.TopK(question(), timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "Traceback" not in server.errors()


GATED_SCRIPT = """
import asyncio, pathlib, sys, threading
sys.path[:0] = sys.argv[3:]
from serve.test_lifecycle import GatedCatalog
from dualform.serve import ServerConfig, command
if float(sys.argv[2]) > 0:
    threading.Timer(float(sys.argv[2]), GatedCatalog.gate.set).start()
indexes = {"i": pathlib.Path(sys.argv[1])}
config = ServerConfig(indexes, listen="127.0.0.1:0")
asyncio.run(command._serve(config, GatedCatalog(indexes)))
"""


@contextmanager
def gated_process(index: Path, opens_after: float) -> Iterator[tuple[warm.Process, list[Any]]]:
    """A server of its own with four questions inside: two at the gate and two behind them."""
    tests = Path(__file__).parents[1]
    server = warm.start(GATED_SCRIPT, index, opens_after, tests)
    try:
        line = server.stdout.readline()
        assert line.startswith("listening on "), server.communicate()[1]
        with grpc.insecure_channel(line.removeprefix("listening on ").strip()) as channel:
            stub = attribution_pb2_grpc.AttributionServiceStub(channel)
            calls = [stub.TopK.future(question()) for _ in range(4)]
            # Answered after the four have arrived: one connection keeps their order.
            stub.ListIndexes(pb.ListIndexesRequest(), timeout=30)
            yield server, calls
    finally:
        server.kill()
        server.communicate()


def test_a_drain_waits_for_the_scans(index: Path) -> None:
    with gated_process(index, opens_after=3) as (server, calls):
        # Twice at once, as `timeout` does: one wish.
        server.terminate()
        server.terminate()
        time.sleep(0.1)
        server.terminate()
        for call in calls:
            assert list(call.result(timeout=30).rows.shape) == [1, 2]
        assert server.wait(30) == 0


def test_a_second_signal_waits_for_nothing(index: Path) -> None:
    with gated_process(index, opens_after=0) as (server, calls):
        begin = time.monotonic()
        server.terminate()
        time.sleep(1)
        server.terminate()
        for call in calls:
            assert call.exception(timeout=30) is not None
        assert server.wait(30) == 0
        # The scans would have been given their grace of 30 s.
        assert time.monotonic() - begin < 20


def test_a_taken_port_is_told(process: Any) -> None:
    _, address = process()
    second, line = process(address)
    assert (second.wait(60), line) == (2, "")
    message = second.errors().splitlines()[-1]
    assert f"cannot listen on {address}" in message
    assert "--port" in message


def test_a_name_that_is_taken_on_one_of_its_addresses_is_told(process: Any) -> None:
    _, address = process()
    port = address.rpartition(":")[2]
    second, line = process(f"localhost:{port}")
    assert (second.wait(60), line) == (2, "")
    assert f"cannot listen on localhost:{port}" in second.errors()


def test_nothing_to_serve_is_told(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    done = warm.run(SCRIPT, tmp_path, "127.0.0.1:0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none of the indexes can be served" in done.stderr
    assert "manifest.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_connects_and_says_nothing_is_let_go(
    digits_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualform.serve.server.GREETING_MS", 500)
    with serving({"digits": digits_index}) as served:
        host, _, port = served.address.rpartition(":")
        for beginning in (b"", b"PRI * HTTP/2.0\r\n"):
            with socket.create_connection((host, int(port)), timeout=20) as silent:
                silent.sendall(beginning)
                while silent.recv(4096):
                    pass  # the server's own greeting
        assert served.health() == SERVING


@pytest.mark.parametrize("opened", [False, True])
def test_sigterm_ends_the_start_of_a_container_s_first_process(index: Path, opened: bool) -> None:
    """The system spares process 1 what signals do by default: nothing may be left to that."""
    command = Path(sysconfig.get_path("scripts")) / "dualform"
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no name space of processes may be made here")
    serve = [*apart, command, "serve", index, "--port", "0"]
    with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: bool(children.read_text()))
        first = Path("/proc") / children.read_text().strip()
        hangup = 1 << (signal.SIGHUP - 1)

        def blocked() -> bool:
            lines = (first / "status").read_text().splitlines()
            line = next(each for each in lines if each.startswith("SigBlk"))
            return bool(int(line.split()[1], 16) & hangup)

        until(blocked)  # its first lines have run
        while opened and "no GPU" not in process.stderr.readline():
            assert process.poll() is None
        os.kill(int(first.name), signal.SIGTERM)
        try:  # where it listened already it has drained
            assert process.wait(20) in (0, 128 + signal.SIGTERM)
        finally:
            process.kill()
