"""What a server keeps of requests that it refused (Linux).

    python -m benchmarks refused INDEX --requests 10000 --mib 60 [--minutes 30]

In turn: queries with NaN, the same to a stream, a deadline that passes, a stream that is cancelled
after its first part, an index that is not there, a token that is not known, a message over the
limit, and two at once where memory for one is allowed. Prints the server's memory that no file
backs, each time once the server has come to rest, and in the end by how much it grew per thousand
requests over the second half.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.server import serving
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

SERVICE = "dualform.v1.AttributionService"
LIMIT_MIB = 64
TOKEN = "0123456789abcdef"
_KNOWN = (("authorization", f"Bearer {TOKEN}"),)
_UNKNOWN = (("authorization", "Bearer fedcba9876543210"),)
_MOST_REST_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("index", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--mib", type=float, default=60)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most so long")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.txt"
        tokens.write_text(f"refused:{TOKEN}\n")
        tokens.chmod(0o600)
        # So many queries that also rows of a few numbers make 60 MiB.
        limits = f"{{waiting_mib: {LIMIT_MIB}, max_queries: {1 << 20}}}"
        settings = f"tokens: {tokens}\nlimits: {limits}\n"
        with (
            serving(arguments.index, settings) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            _measure(arguments, server.pid, _Requests(channel, arguments.mib))


class _Requests:
    """Ways to be refused, and how each ended."""

    def __init__(self, channel: grpc.Channel, mib: float) -> None:
        make: Any = attribution_pb2_grpc.AttributionServiceStub
        info = (
            make(channel).GetIndex(pb.GetIndexRequest(), metadata=_KNOWN, timeout=60).index.layers
        )[0]
        # Of bytes, so that the client does not encode 60 MiB each time.
        self._unary = channel.unary_unary(f"/{SERVICE}/TopK")
        self._stream = channel.unary_stream(f"/{SERVICE}/StreamWeights")

        def queries(value: float, size: float) -> pb.Tensor:
            shape = (int(size * 2**20) // (4 * info.d_in), info.d_in)
            data = np.full(shape, value, "<f4").tobytes()
            return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape, data=data)

        def top_k(value: float, size: float = mib, index: str = "") -> bytes:
            tensor = queries(value, size)
            request = pb.TopKRequest(index=index, layer=info.name, k=1, queries=tensor)
            return bytes(request.SerializeToString())

        def stream(value: float) -> bytes:
            request = pb.StreamWeightsRequest(layer=info.name, queries=queries(value, mib))
            return bytes(request.SerializeToString())

        wrong, right, nowhere = top_k(np.nan), top_k(1.0), top_k(1.0, index="nowhere")
        wrong_stream, right_stream = stream(np.nan), stream(1.0)
        too_large = top_k(1.0, LIMIT_MIB + 1)
        self._kinds: tuple[Callable[[], Any], ...] = (
            lambda: self._unary(wrong, metadata=_KNOWN),
            lambda: next(self._stream(wrong_stream, metadata=_KNOWN)),
            lambda: self._unary(right, metadata=_KNOWN, timeout=0.1),
            lambda: self._cancelled(right_stream),
            lambda: self._unary(nowhere, metadata=_KNOWN),
            lambda: self._unary(right, metadata=_UNKNOWN),
            lambda: self._unary(too_large, metadata=_KNOWN),
            lambda: self._two_at_once(wrong),
        )
        self.codes: Counter[str] = Counter()

    def ask(self, number: int) -> None:
        """Be refused, in one of the ways in turn."""
        try:
            self._kinds[number % len(self._kinds)]()
            self.codes["OK"] += 1  # small messages may be answered within the deadline
        except grpc.RpcError as error:
            refused: Any = error
            self.codes[refused.code().name] += 1

    def _cancelled(self, request: bytes) -> None:
        call = self._stream(request, metadata=_KNOWN)
        next(call)
        call.cancel()
        for _ in call:  # what was on its way
            pass

    def _two_at_once(self, request: bytes) -> None:
        calls = [self._unary.future(request, metadata=_KNOWN) for _ in range(2)]
        for call in calls:
            self.codes[call.code().name] += 1
        calls[0].result()


def _measure(arguments: argparse.Namespace, pid: int, requests: _Requests) -> None:
    every = max(1, arguments.requests // arguments.samples)
    wanted = {0, 10, 100, *range(0, arguments.requests + 1, every)}
    samples: list[tuple[int, float]] = []
    begin = time.monotonic()
    for number in range(arguments.requests + 1):
        if number in wanted:
            _rest(pid)
            samples.append((number, _anonymous_mb(pid)))
            minutes = (time.monotonic() - begin) / 60
            print(f"{number:6} requests  {samples[-1][1]:7.1f} MB  {minutes:5.1f} min", flush=True)
            if minutes > arguments.minutes:
                break
        if number < arguments.requests:
            requests.ask(number)
    half = [(n, mb) for n, mb in samples if n >= samples[-1][0] / 2]
    at, mb = np.array(half).reshape(-1, 2).T
    slope = np.polyfit(at, mb, 1)[0] * 1000 if len(half) > 1 else float("nan")
    print(f"second half: {slope:+.1f} MB per 1,000 requests; codes {dict(requests.codes)}")


def _rest(pid: int) -> None:
    """Wait until the server works no more: what was given up ends."""
    end = time.monotonic() + _MOST_REST_S
    before = -1.0
    while (now := _processor_s(pid)) - before > 0.02 and time.monotonic() < end:
        before = now
        time.sleep(1)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _anonymous_mb(pid: int) -> float:
    """MB of the process in memory that no file backs."""
    _, resident, of_files, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(of_files)) * 4096 / 1e6
