"""Answers in parts: all rows, at the client's pace, with other questions in between."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import warm
from synthetic import make_index

from dualform.engine.messages.catalog import Catalog
from dualform.serve import ServerLimits, calls
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import Served, array, refusal, serving, tensor

ROWS, D = 60_000, 12


@pytest.fixture(scope="module")
def keys() -> np.ndarray:
    return np.random.default_rng(4).standard_normal((ROWS, D)).astype(np.float32)


@pytest.fixture(scope="module")
def index(keys: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    label = (np.arange(ROWS) % 5).tolist()
    return make_index(
        tmp_path_factory.mktemp("index"),
        keys,
        None,
        rows_per_step=1000,
        shard_rows=25_000,
        label=label,
    )


class CountingCatalog(Catalog):
    """Counts the parts that were computed, and can hold the next one back."""

    parts = 0
    stopped = 0
    gate = threading.Event()

    def stream(self, request: Any, stop: Callable[[], bool] | None = None) -> Iterator[Any]:
        for part in super().stream(request, stop):
            type(self).parts += 1
            while not self.gate.wait(0.005):
                if stop is not None and stop():
                    type(self).stopped += 1
                    return
            yield part


@pytest.fixture
def counting(index: Path) -> Iterator[Served]:
    CountingCatalog.parts = CountingCatalog.stopped = 0
    CountingCatalog.gate.set()
    limits = ServerLimits(concurrent_scans=1, queued_scans=1, max_queries=300)
    with serving({"i": index}, limits, CountingCatalog) as served:
        yield served
        CountingCatalog.gate.set()


def ask(queries: np.ndarray) -> pb.StreamWeightsRequest:
    return pb.StreamWeightsRequest(layer="fc", queries=tensor(queries))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_every_row_in_order(counting: Served, keys: np.ndarray) -> None:
    queries = np.random.default_rng(1).standard_normal((3, D)).astype(np.float32)
    start, parts = 0, []
    for part in counting.stub.StreamWeights(ask(queries)):
        assert part.start == start
        parts.append(array(part.weights))
        start += parts[-1].shape[1]
    weights = np.concatenate(parts, axis=1)
    expected = (queries.astype(np.float64) @ keys.T.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(weights, expected)


def test_a_client_that_does_not_read_holds_the_server_back(
    counting: Served, keys: np.ndarray
) -> None:
    call = counting.stub.StreamWeights(ask(keys[:300]))
    first = next(call)
    assert first.ByteSize() <= 1 << 20
    seen = -1
    while seen != CountingCatalog.parts:
        seen = CountingCatalog.parts
        time.sleep(0.5)
    # What fits into the buffers of both ends, far from the 69 parts there are.
    assert seen < 35
    # It holds no place meanwhile: others are answered.
    question = pb.TopKRequest(layer="fc", queries=tensor(keys[:1]), k=1)
    assert counting.stub.TopK(question, timeout=10).coverage.total == ROWS
    assert sum(array(part.weights).shape[1] for part in call) + first.weights.shape[1] == ROWS


def test_giving_up_stops_between_parts(counting: Served, keys: np.ndarray) -> None:
    call = counting.stub.StreamWeights(ask(keys[:1]))
    next(call)
    CountingCatalog.gate.clear()
    call.cancel()
    call = counting.stub.StreamWeights(ask(keys[:1]), timeout=0.5)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: CountingCatalog.stopped >= 1)
    CountingCatalog.gate.set()
    until(lambda: answered(counting, keys))


def answered(served: Served, keys: np.ndarray) -> bool:
    return len(list(served.stub.StreamWeights(ask(keys[:1]), timeout=10))) > 1


def test_more_streams_than_may_run_and_wait_are_refused(counting: Served, keys: np.ndarray) -> None:
    calls = [counting.stub.StreamWeights(ask(keys[:300])) for _ in range(2)]
    for call in calls:
        next(call)
    refused = refusal(lambda: next(counting.stub.StreamWeights(ask(keys[:1]))))
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert "answers are being sent in parts" in refused.message
    calls[0].cancel()
    until(lambda: _free(counting, keys))
    calls[1].cancel()


def _free(served: Served, keys: np.ndarray) -> bool:
    try:
        return answered(served, keys)
    except grpc.RpcError:
        return False


def test_a_drain_sends_what_was_begun(index: Path, keys: np.ndarray) -> None:
    with warm.start("dualform", "serve", f"i={index}", "--port", 0) as server:
        address = server.stdout.readline().removeprefix("listening on ").strip()
        with grpc.insecure_channel(address) as channel:
            stub = attribution_pb2_grpc.AttributionServiceStub(channel)
            rows = 0
            for part in stub.StreamWeights(ask(keys[:300]), timeout=60):
                if rows == 0:
                    server.send_signal(signal.SIGTERM)
                rows += part.weights.shape[1]
                time.sleep(0.03)
        assert rows == ROWS
        assert server.wait(30) == 0


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"layer": "nope"}, grpc.StatusCode.NOT_FOUND, "layer"),
        ({"index": "nope"}, grpc.StatusCode.NOT_FOUND, "index"),
        (
            {"queries": tensor(np.zeros((1, 5), np.float32))},
            grpc.StatusCode.INVALID_ARGUMENT,
            "queries",
        ),
        (
            {"queries": tensor(np.full((1, D), np.nan, np.float32))},
            grpc.StatusCode.INVALID_ARGUMENT,
            "queries",
        ),
        (
            {"queries": tensor(np.zeros((301, D), np.float32))},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "queries",
        ),
    ],
)
def test_refusals(
    counting: Served, change: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    request = ask(np.zeros((1, D), np.float32))
    given = {"index": "i", "layer": request.layer, "queries": request.queries, **change}
    refused = refusal(lambda: list(counting.stub.StreamWeights(pb.StreamWeightsRequest(**given))))
    assert (refused.code, refused.fields) == (code, [field])


def test_a_stream_that_nobody_reads_ends(
    index: Path, keys: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "UNREAD_S", 1.0)
    CountingCatalog.gate.set()
    limits = ServerLimits(concurrent_scans=1, queued_scans=1, max_queries=300)
    with serving({"i": index}, limits, CountingCatalog) as served:
        unread = [served.stub.StreamWeights(ask(keys[:300])) for _ in range(2)]
        for call in unread:
            next(call)
        until(lambda: _free(served, keys))
        # They had both places: one has ended. On a busy machine the other may be read on.
        for call in unread:
            with suppress(grpc.RpcError):
                list(call)
        ended = next(call for call in unread if call.code() != grpc.StatusCode.OK)
        refused = refusal(lambda: next(ended))
        assert refused.code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert refused.reason == "UNREAD_STREAM"


def test_streams_of_one_token_leave_places_to_others_over_any_number_of_connections(
    index: Path, keys: np.ndarray, tmp_path: Path
) -> None:
    CountingCatalog.gate.set()
    (tmp_path / "tokens").write_text("one:aaaa\ntwo:bbbb\n")
    limits = ServerLimits(concurrent_scans=2, queued_scans=6, max_queries=300)
    with (
        ExitStack() as opened,
        serving({"i": index}, limits, CountingCatalog, tokens=tmp_path / "tokens") as served,
    ):

        def begin(token: str, queries: np.ndarray) -> Any:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = opened.enter_context(grpc.insecure_channel(served.address, options=options))
            stub = attribution_pb2_grpc.AttributionServiceStub(channel)
            call = stub.StreamWeights(
                ask(queries), metadata=[("authorization", f"Bearer {token}")], timeout=20
            )
            opened.callback(call.cancel)
            next(call)
            return call

        for _ in range(4):
            begin("aaaa", keys[:300])
        assert refusal(lambda: begin("aaaa", keys[:1])).reason == "QUEUE_FULL"
        begin("bbbb", keys[:1])


def test_streams_of_one_connection_leave_places_to_others(index: Path, keys: np.ndarray) -> None:
    CountingCatalog.gate.set()
    limits = ServerLimits(concurrent_scans=2, queued_scans=6, max_queries=300)
    with serving({"i": index}, limits, CountingCatalog) as served:
        unread = [served.stub.StreamWeights(ask(keys[:300])) for _ in range(4)]
        for call in unread:
            next(call)
        refused = refusal(lambda: next(served.stub.StreamWeights(ask(keys[:1]))))
        assert refused.reason == "QUEUE_FULL"
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(served.address, options=options) as channel:
            stub = attribution_pb2_grpc.AttributionServiceStub(channel)
            rows = sum(part.weights.shape[1] for part in stub.StreamWeights(ask(keys[:1])))
            assert rows == ROWS
        for call in unread:
            call.cancel()


def test_bytes_of_streams_leave_room_for_others(tmp_path: Path) -> None:
    """Half of what requests may hold is for streams, and half of that for one client's."""
    width, mib = 256, 1 << 20
    keys = np.random.default_rng(1).standard_normal((3000, width)).astype(np.float32)
    large = np.resize(keys, (3 * mib // 2 // (4 * width), width))  # 1.5 MiB
    limits = ServerLimits(waiting_mib=7, max_queries=1 << 20)
    with ExitStack() as opened, serving({"i": make_index(tmp_path, keys, None)}, limits) as served:

        def another() -> attribution_pb2_grpc.AttributionServiceStub:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = opened.enter_context(grpc.insecure_channel(served.address, options=options))
            return attribution_pb2_grpc.AttributionServiceStub(channel)

        def begin(stub: attribution_pb2_grpc.AttributionServiceStub) -> None:
            call = stub.StreamWeights(ask(large), timeout=60)
            opened.callback(call.cancel)
            next(call)

        mine = another()
        begin(mine)
        refused = refusal(lambda: begin(mine))
        assert refused.reason == "QUEUE_FULL"
        assert "this client's requests for streams" in refused.message
        assert refused.retry_after
        begin(another())
        refused = refusal(lambda: begin(another()))
        assert "requests whose answers are streams of 3 MiB are in memory" in refused.message
        for stub in (mine, another()):
            question = pb.TopKRequest(layer="fc", k=1, queries=tensor(large))
            assert array(stub.TopK(question, timeout=60).rows).shape == (len(large), 1)
