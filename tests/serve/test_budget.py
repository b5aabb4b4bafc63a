"""Memory is admitted before it is taken: the server stays below `memory`, or says what it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from synthetic import make_index

from dualform.engine.errors import ResourceExhaustedError
from dualform.serve.budget import MIB, MemoryBudget
from dualform.serve.config import ConfigError
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import refusal, tensor

ROWS, D = 40_000, 16


def budget(limit: int, used: int = 0, aside: int = 0) -> MemoryBudget:
    return MemoryBudget(limit * MIB, aside * MIB, lambda: used * MIB)


def refused(memory: MemoryBudget, size: int) -> ResourceExhaustedError:
    with pytest.raises(ResourceExhaustedError) as caught:
        memory.take(size * MIB)
    assert caught.value.reason == "MEMORY_LIMIT"
    return caught.value


def test_promises_stay_below_the_limit() -> None:
    memory = budget(100, used=10, aside=20)
    memory.take(60 * MIB)
    busy = refused(memory, 30)
    assert busy.retry_after == 1.0
    assert "up to 30 MiB of memory would be needed" in str(busy)
    assert "of the 100 allowed" in str(busy)
    memory.give(60 * MIB)
    memory.take(70 * MIB)
    memory.give(70 * MIB)


def test_what_never_fits_is_told_without_a_time() -> None:
    never = refused(budget(100, used=10, aside=20), 71)
    assert never.retry_after is None
    assert "70 are left for questions, beside what is in use and 20 for messages" in str(never)
    assert "fewer queries" in str(never)


def test_what_fits_when_messages_on_their_way_in_are_gone_is_told_a_time() -> None:
    used = [10 * MIB]
    memory = MemoryBudget(300 * MIB, 20 * MIB, lambda: used[0])
    memory.check()
    used[0] = 200 * MIB  # for the moment
    assert refused(memory, 100).retry_after == 1.0
    assert refused(memory, 271).retry_after is None
    used[0] = 10 * MIB
    memory.take(270 * MIB)


def test_a_lease_gives_back_what_its_thread_took() -> None:
    memory = budget(100)
    with memory.lease():
        memory.take(50 * MIB)
        other = threading.Thread(target=memory.take, args=(20 * MIB,))
        other.start()
        other.join()
        assert memory.promised == 70 * MIB
        refused(memory, 40)
    assert memory.promised == 20 * MIB  # the other thread had no lease: it gives back itself


def test_what_is_there_already_is_counted_and_never_refused() -> None:
    memory = budget(100)
    memory.hold(90 * MIB)
    assert refused(memory, 20).retry_after is not None
    memory.give(90 * MIB)
    memory.take(100 * MIB)


def test_a_limit_that_leaves_nothing_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="at least 574MiB"):
        budget(500, used=310, aside=200).check()
    budget(600, used=310, aside=200).check()


def test_without_a_limit_everything_is_promised() -> None:
    memory = MemoryBudget(None)
    memory.take(1 << 60)
    memory.hold(1 << 60)
    memory.check()


class Limited:
    """`dualform serve` with so many MiB more than it needs at rest, and who watches it."""

    def __init__(self, process: subprocess.Popen[str], address: str, limit: int) -> None:
        self.address, self.limit = address, limit
        self._process = psutil.Process(process.pid)
        self._over = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Limited:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def now(self) -> int:
        """Bytes that no file backs."""
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, self.now())


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((ROWS, D)).astype(np.float32)
    return make_index(
        tmp_path_factory.mktemp("index"),
        keys,
        rng.standard_normal((ROWS, 8)).astype(np.float32),
        rows_per_step=500,
        label=(np.arange(ROWS) % 7).tolist(),
        single=np.arange(ROWS).tolist(),
    )


def starting(index: Path, folder: Path, limit: int) -> subprocess.Popen[str]:
    """The command, with so many MiB."""
    config = folder / "server.yaml"
    config.write_text(
        f"listen: 127.0.0.1:0\nindexes: {{i: {index}}}\nmemory: {limit}MiB\n"
        "limits: {max_message_mib: 8, queued_scans: 64}\n"
    )
    command = [sys.executable, "-m", "dualform.cli", "serve", "--config", str(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def limited(index: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(limit: int) -> Limited:
        process = starting(index, tmp_path, limit)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), process.communicate(timeout=60)
        return Limited(process, line.removeprefix("listening on ").strip(), limit * MIB)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def least(index: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """MiB that a server says it needs at least, when it is given fewer."""
    found = starting(index, tmp_path_factory.mktemp("least"), 100)
    out, said = found.communicate(timeout=120)
    assert (found.returncode, out) == (2, "")
    told = re.search(r"at least ([0-9,]+)MiB are needed", said)
    assert told, said
    return int(told[1].replace(",", ""))


def questions() -> list[tuple[str, Any]]:
    """Those that take the most: every score is the same, so that nothing can be ruled out."""
    nothing = tensor(np.zeros((256, D), np.float32))
    few = tensor(np.zeros((16, D), np.float32))
    return [
        ("TopK", pb.TopKRequest(layer="fc", queries=nothing, k=50)),
        ("TopK", pb.TopKRequest(layer="fc", queries=few, k=20, group_by="label")),
        ("TopGroups", pb.TopGroupsRequest(layer="fc", queries=nothing, by="single", k=50)),
        ("Sums", pb.SumsRequest(layer="fc", queries=few, group_by="single")),
        ("DualOutput", pb.DualOutputRequest(layer="fc", queries=nothing, group_by="label")),
    ]


@pytest.mark.slow
def test_the_server_stays_below_its_memory(limited: Any, least: int) -> None:
    outcomes: list[str] = []
    with limited(least + 500) as server, grpc.insecure_channel(server.address) as channel:
        stub = attribution_pb2_grpc.AttributionServiceStub(channel)

        def ask(question: tuple[str, Any]) -> None:
            try:
                getattr(stub, question[0])(question[1], timeout=300)
                outcomes.append("OK")
            except grpc.RpcError as error:
                refused: Any = error
                assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, refused
                outcomes.append("refused")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, questions() * 4))
    # How many found room at once is the machine's affair.
    assert len(outcomes) == 20
    assert "OK" in outcomes
    assert server.most < server.limit, f"{server.most / MIB:.0f} of {server.limit / MIB:.0f} MiB"


@pytest.mark.slow
def test_requests_on_their_way_in_stay_below_it_too(limited: Any, least: int) -> None:
    """However many come at once: all are refused here, and none is taken in before its turn."""
    large = tensor(np.full((7 * MIB // (4 * D), D), np.nan, np.float32))
    question = pb.TopKRequest(layer="fc", queries=large, k=1)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with limited(least + 100) as server, ThreadPoolExecutor(32) as pool:

        def ask(_: int) -> set[grpc.StatusCode]:
            with grpc.insecure_channel(server.address, options) as channel:
                stub = attribution_pb2_grpc.AttributionServiceStub(channel)
                return {refusal(lambda: stub.TopK(question, timeout=60)).code for _ in range(8)}

        codes = set().union(*pool.map(ask, range(32)))
    assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}
    assert server.most < server.limit, f"{server.most / MIB:.0f} of {server.limit / MIB:.0f} MiB"


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_estimate(limited: Any, least: int) -> None:
    # What is in use differs from start to start.
    with limited(least + 8) as server, grpc.insecure_channel(server.address) as channel:
        stub = attribution_pb2_grpc.AttributionServiceStub(channel)
        before = server.now()
        found = refusal(lambda: stub.TopK(questions()[0][1], timeout=60))
        assert (found.code, found.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "MEMORY_LIMIT",
        )
        assert "MiB of memory would be needed" in found.message
        assert found.retry_after is None
        # A small one fits.
        one = tensor(np.ones((1, D), np.float32))
        assert stub.TopK(pb.TopKRequest(layer="fc", queries=one, k=3), timeout=60).coverage.rows
        assert server.now() - before < 100 * MIB
