"""A refused request leaves nothing behind, also where no garbage collector comes by."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from synthetic import make_index

from dualform.engine.errors import InvalidArgumentError
from dualform.serve.status import Refusal, or_refusal
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

from .serving import tensor

D = 64
REQUEST_MIB = 30
TIMES = 5
# Of TIMES * REQUEST_MIB = 150 that a cycle would keep.
MOST_MIB = 65

# A top-k with this k runs until its caller gives up.
HOLDS = 7
SCRIPT = """
import asyncio, gc, pathlib, sys, time
gc.disable()
from dualform.serve import ServerConfig, ServerLimits, command, policy
policy.apply()
from dualform.engine.messages.catalog import Catalog, Limits

class Holding(Catalog):
    def answer(self, request, stop=None):
        while getattr(request, "k", 0) == int(sys.argv[2]) and not stop():
            time.sleep(0.005)
        return super().answer(request, stop)

indexes = {"i": pathlib.Path(sys.argv[1])}
limits = ServerLimits(
    concurrent_scans=1, queued_scans=1, max_queries=1 << 20, waiting_mib=64
)
config = ServerConfig(indexes, listen="127.0.0.1:0", limits=limits)
catalog = Holding(indexes, limits=Limits(limits.max_k, limits.max_queries, limits.max_message_mib))
asyncio.run(command._serve(config, catalog))
"""


class Uncollected:
    """A server whose garbage collector never runs, and a client to it."""

    def __init__(self, process: subprocess.Popen[str], address: str, channel: grpc.Channel) -> None:
        self._process = psutil.Process(process.pid)
        self.address = address
        self.stub = attribution_pb2_grpc.AttributionServiceStub(channel)

    def now(self) -> float:
        """Resident memory, MiB."""
        return float(self._process.memory_info().rss / 2**20)

    def mib(self) -> float:
        """Resident memory once it stands still."""
        seen = 0.0
        while abs(seen - (now := self.now())) > 1:
            seen = now
            time.sleep(0.3)
        return now


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uncollected]:
    keys = np.random.default_rng(0).standard_normal((300, D)).astype(np.float32)
    index: Path = make_index(tmp_path_factory.mktemp("index"), keys, None)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(index), str(HOLDS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().removeprefix("listening on ").strip()
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        yield Uncollected(process, address, channel)
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert "Traceback" not in log


def large(value: float) -> pb.Tensor:
    rows = (REQUEST_MIB << 20) // (4 * D)
    return tensor(np.full((rows, D), value, np.float32))


def refused(call: Callable[[], Any], code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() == code


def grows(server: Uncollected, once: Callable[[], None]) -> float:
    """MiB by which the server grows over TIMES calls, after two that make room for one: the least
    of three rounds, since a leak grows in every one, and what a busy machine still has under way,
    or malloc keeps, does not."""
    once()
    once()
    grown = float("inf")
    for _ in range(3):
        before = server.mib()
        for _ in range(TIMES):
            once()
        grown = min(grown, server.mib() - before)
        if grown < MOST_MIB:
            break
    return grown


def test_wrong_queries(server: Uncollected) -> None:
    request = pb.TopKRequest(layer="fc", k=1, queries=large(np.nan))

    def once() -> None:
        refused(lambda: server.stub.TopK(request), grpc.StatusCode.INVALID_ARGUMENT)

    assert grows(server, once) < MOST_MIB


def test_small_requests_that_may_be_joined(server: Uncollected) -> None:
    queries = tensor(np.full((2000, D), np.nan, np.float32))
    request = pb.TopKRequest(layer="fc", k=1, queries=queries)

    def once() -> None:
        calls = [server.stub.TopK.future(request) for _ in range(60)]
        codes = {call.code() for call in calls}
        assert grpc.StatusCode.INVALID_ARGUMENT in codes
        assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}

    assert grows(server, once) < MOST_MIB


def test_a_full_queue(server: Uncollected) -> None:
    hold = pb.TopKRequest(layer="fc", k=HOLDS, queries=tensor(np.zeros((1, D), np.float32)))
    wait = pb.SumsRequest(layer="fc", group_by="step", queries=hold.queries)
    held = [server.stub.TopK.future(hold), server.stub.Sums.future(wait)]
    time.sleep(0.5)
    request = pb.TopKRequest(layer="fc", k=1, queries=large(0))

    def once() -> None:
        refused(lambda: server.stub.TopK(request), grpc.StatusCode.RESOURCE_EXHAUSTED)

    try:
        assert grows(server, once) < MOST_MIB
    finally:
        for call in held:
            call.cancel()


def test_missed_deadlines(server: Uncollected) -> None:
    request = pb.TopKRequest(layer="fc", k=HOLDS, queries=large(0))

    def once() -> None:
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        refused(lambda: server.stub.TopK(request, timeout=0.5), code)

    assert grows(server, once) < MOST_MIB


def test_wrong_and_cancelled_streams(server: Uncollected) -> None:
    wrong = pb.StreamWeightsRequest(layer="fc", queries=large(np.nan))
    right = pb.StreamWeightsRequest(layer="fc", queries=large(1))

    def once() -> None:
        refused(lambda: next(server.stub.StreamWeights(wrong)), grpc.StatusCode.INVALID_ARGUMENT)
        call = server.stub.StreamWeights(right)
        next(call)
        call.cancel()

    assert grows(server, once) < MOST_MIB


def test_many_large_requests_at_once_are_not_all_in_memory(server: Uncollected) -> None:
    clients, most = 20, 0.0
    request = pb.TopKRequest(layer="fc", k=HOLDS, queries=large(0)).SerializeToString()
    before = server.mib()
    with ExitStack() as channels:
        options = [("grpc.use_local_subchannel_pool", 1)]
        calls = []
        for _ in range(clients):
            channel = channels.enter_context(grpc.insecure_channel(server.address, options))
            call = channel.unary_unary("/dualform.v1.AttributionService/TopK")
            calls.append(call.future(request))
        end = time.monotonic() + 300  # as long as it takes to read them all, on a busy machine
        while sum(call.done() for call in calls) < clients - 3 and time.monotonic() < end:
            most = max(most, server.now())
            time.sleep(0.02)
        for call in calls:
            call.cancel()
        codes = [call.code() for call in calls]
    # Two fit the budget of 64 MiB and wait; the others were read, four at a time, and refused.
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= clients - 3
    # While it is received a message is there twice, while it is worked on three times.
    assert most - before < (4 * 2 + 2 * 3) * REQUEST_MIB < clients * REQUEST_MIB


@pytest.mark.parametrize("kind", [InvalidArgumentError, RuntimeError])
def test_a_refusal_lets_go_of_frames_that_hold_their_own_error(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As contextlib's do in Python 3.12; a bug's frames likewise, once they are in the log."""
    monkeypatch.setattr(logging.getLogger("dualform.serve"), "disabled", True)  # pytest keeps them
    requests: list[weakref.ref[Any]] = []

    def work() -> None:
        request = np.zeros(3)
        requests.append(weakref.ref(request))
        try:
            raise ValueError("too large")
        except ValueError as error:
            held = error
            raise kind(str(held)) from None

    gc.disable()
    try:
        refusal = or_refusal("TopK", work)
        assert isinstance(refusal, Refusal)
        assert requests[0]() is None
    finally:
        gc.enable()
