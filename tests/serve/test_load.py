"""Under load: clients that ping, cheap questions beside expensive ones."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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

from .serving import SERVING, Served, serving, tensor

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


class Watched(logging.Handler):
    """What the server's log says of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.facts.append(record.__dict__["facts"])

    def of(self, name: str, call: str, index: str) -> list[float]:
        """One fact of all calls of this kind."""
        return [
            each[name]
            for each in self.facts
            if (each["call"], each["index"], each["code"]) == (call, index, "OK")
        ]


@pytest.fixture
def watched() -> Iterator[Watched]:
    handler, logger = Watched(), logging.getLogger("dualform.calls")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = np.random.default_rng(4).standard_normal((40_000, 128)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("large"), keys, None)


@contextmanager
def flood(address: str, clients: int, watched: Watched) -> Iterator[None]:
    """So many clients of their own ask expensive questions without end, none like another."""
    enough = threading.Event()
    queries = tensor(np.random.default_rng(5).standard_normal((128, 128)).astype(np.float32))

    def ask(client: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as channel:
            stub: Any = attribution_pb2_grpc.AttributionServiceStub(channel)
            for number in itertools.count():
                request = pb.TopKRequest(index="large", layer="fc", k=100, queries=queries)
                request.where.comparison.column = "step"
                request.where.comparison.operator = pb.OPERATOR_GE
                request.where.comparison.values.add(int64_value=-clients * number - client)
                stub.TopK(request, timeout=300)
                if enough.is_set():
                    return

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(ask, client) for client in range(clients)]
        end = time.monotonic() + 300
        while len(watched.of("ms", "TopK", "large")) < 2 * clients:
            assert time.monotonic() < end
            time.sleep(0.05)
        yield
        enough.set()
        for each in asked:
            each.result()


@pytest.mark.parametrize("cheap_s", [scans.CHEAP_S, 0.0])
def test_a_flood_of_expensive_questions_does_not_starve_cheap_ones(
    cheap_s: float, index: Path, large: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0: nothing is cheap by the clock, as on a machine that is busy with other work."""
    monkeypatch.setattr(scans, "CHEAP_S", cheap_s)
    limits = ServerLimits(concurrent_scans=2)
    with serving({"small": index, "large": large}, limits) as served:
        tiny = top_k(2)
        tiny.index = "small"
        for _ in range(3):
            served.stub.TopK(tiny, timeout=60)
        with flood(served.address, 3, watched):
            watched.facts.clear()
            for _ in range(30):
                served.stub.TopK(tiny, timeout=60)
                time.sleep(0.02)
    waited, works = watched.of("queued_ms", "TopK", "small"), watched.of("ms", "TopK", "large")
    assert len(waited) == 30
    assert len(works) >= 3
    assert np.median(waited) < np.median(works) / 10
    assert max(waited) < 2 * max(works)


@pytest.mark.slow
@pytest.mark.parametrize("cheap_s", [scans.CHEAP_S, 0.0])
def test_a_flood_of_expensive_questions_does_not_starve_streams(
    cheap_s: float, large: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "CHEAP_S", cheap_s)
    queries = tensor(np.ones((40, 128), np.float32))
    request = pb.StreamWeightsRequest(index="large", layer="fc", queries=queries)
    with serving({"large": large}, ServerLimits(concurrent_scans=2)) as served:
        parts = sum(1 for _ in served.stub.StreamWeights(request, timeout=300))
        assert parts > 6
        with flood(served.address, 3, watched):
            watched.facts.clear()
            assert sum(1 for _ in served.stub.StreamWeights(request, timeout=300)) == parts
    (took,) = watched.of("ms", "StreamWeights", "large")
    (computed,) = watched.of("computed_ms", "StreamWeights", "large")
    # Four clients share two places: each gets half of one. Twice that, and the first part's turn.
    assert took < 2 * 2 * computed + max(watched.of("ms", "TopK", "large"))


@pytest.mark.slow
def test_64_slow_streams_do_not_starve_anyone(index: Path, large: Path, watched: Watched) -> None:
    """Half of them read a part each 0.2 s, half none but the first."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    queries = tensor(np.ones((20, 128), np.float32))
    request = pb.StreamWeightsRequest(index="large", layer="fc", queries=queries)

    def read(call: Any) -> int:
        parts = 0
        for _ in call:
            parts += 1
            time.sleep(0.2)
        return parts

    with serving({"small": index, "large": large}) as served, ExitStack() as stack:
        tiny = top_k(2)
        tiny.index = "small"
        served.stub.TopK(tiny, timeout=60)
        calls: list[Any] = []
        for _ in range(2):
            channel = stack.enter_context(grpc.insecure_channel(served.address, options))
            stub: Any = attribution_pb2_grpc.AttributionServiceStub(channel)
            calls += [stub.StreamWeights(request) for _ in range(32)]
        for call in calls:
            next(call)
        watched.facts.clear()
        with ThreadPoolExecutor(32) as pool:
            slow = [pool.submit(read, call) for call in calls[::2]]
            for _ in range(30):
                served.stub.TopK(tiny, timeout=60)
                time.sleep(0.02)
            parts = sum(1 for _ in served.stub.StreamWeights(request, timeout=300))
            assert parts > 3
            assert {each.result(timeout=300) for each in slow} == {parts - 1}
    waited = watched.of("queued_ms", "TopK", "small")
    streams = watched.of("computed_ms", "StreamWeights", "large")
    part = np.mean(streams) / parts
    assert len(waited) == 30
    # A queue with all of them in it would be 32 parts long.
    assert np.median(waited) < 3 * part
    assert max(waited) < 16 * part
    assert watched.of("queued_ms", "StreamWeights", "large")[0] < 8 * parts * part


def test_the_end_of_a_stream_makes_no_stream_cheap(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Catalog):
        """Each part takes longer than what is cheap; the end comes at once."""

        def stream(self, request: Any, stop: Callable[[], bool] | None = None) -> Iterator[Any]:
            for part in super().stream(request, stop):
                time.sleep(2 * scans.CHEAP_S)
                yield part

    known: list[float | None] = []
    take = scans.ScanQueue._cheap

    def cheap(queue: scans.ScanQueue, asker: scans.Asker) -> bool:
        known.append(asker.seconds)
        return take(queue, asker)

    monkeypatch.setattr(scans.ScanQueue, "_cheap", cheap)
    request = pb.StreamWeightsRequest(layer="fc", queries=tensor(np.ones((2, 6), np.float32)))
    with serving({"i": index}, catalog_type=Slow) as served:
        for _ in range(4):
            assert sum(1 for _ in served.stub.StreamWeights(request, timeout=60)) == 1
    assert len(known) == 8
    assert all(seconds is None or seconds >= 2 * scans.CHEAP_S for seconds in known), known


def test_what_nobody_waits_for_stops_and_health_is_told_meanwhile(large: Path) -> None:
    """By the server's own metric, and as shares of what the question takes when it is waited for:
    how many milliseconds these are is measured by `python -m benchmarks busy`."""
    queries = tensor(np.random.default_rng(6).standard_normal((2048, 128)).astype(np.float32))
    request = pb.TopKRequest(layer="fc", k=100, queries=queries)
    went_on: list[float] = []
    with serving({"large": large}) as served:
        tell = served.server._scans.stopped

        def stopped(what: str, seconds: float) -> None:
            went_on.append(seconds)
            tell(what, seconds)

        served.server._scans.stopped = stopped
        begin = time.monotonic()
        call = served.stub.TopK.future(request)
        checks: list[float] = []
        while not call.done():
            asked = time.monotonic()
            assert served.health() == SERVING
            checks.append(time.monotonic() - asked)
            time.sleep(0.01)
        call.result(timeout=300)
        whole = time.monotonic() - begin
        for number in range(6):
            call = served.stub.TopK.future(request, timeout=0.3 if number % 2 else None)
            until = time.monotonic() + 60
            while not served.server._scans.running:
                assert time.monotonic() < until
                time.sleep(0.002)
            time.sleep(0.1)
            call.cancel()
            while served.server._scans.running:
                assert time.monotonic() < until
                time.sleep(0.002)
    assert len(went_on) == 6
    assert np.median(went_on) < whole / 10, (went_on, whole)
    assert len(checks) > 10
    assert np.median(checks) < whole / 20, (checks, whole)
