"""What a server keeps of requests that it refused (Linux).

    python -m benchmarks refused INDEX --requests 10000 --mib 60

In turn: queries with NaN, queries with NaN to a stream, a deadline that passes, and a stream that
is cancelled. Prints the server's resident memory as it goes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.server import serving
from dualform.v1 import attribution_pb2 as pb
from dualform.v1 import attribution_pb2_grpc

SERVICE = "dualform.v1.AttributionService"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("index", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--mib", type=float, default=60)
    arguments = parser.parse_args()
    with serving(arguments.index) as server, grpc.insecure_channel(server.address) as channel:
        make: Any = attribution_pb2_grpc.AttributionServiceStub
        stub = make(channel)
        info = stub.GetIndex(pb.GetIndexRequest()).index.layers[0]
        rows = int(arguments.mib * 2**20) // (4 * info.d_in)
        wrong, right = (
            pb.Tensor(
                dtype=pb.DATA_TYPE_FLOAT32,
                shape=(rows, info.d_in),
                data=np.full((rows, info.d_in), value, "<f4").tobytes(),
            )
            for value in (np.nan, 1.0)
        )
        top_k = pb.TopKRequest(layer=info.name, k=1, queries=wrong).SerializeToString()
        wrong_stream, right_stream = (
            pb.StreamWeightsRequest(layer=info.name, queries=queries).SerializeToString()
            for queries in (wrong, right)
        )
        # Of bytes, so that the client does not encode 60 MiB each time.
        unary = channel.unary_unary(f"/{SERVICE}/TopK")
        stream = channel.unary_stream(f"/{SERVICE}/StreamWeights")
        begin = time.monotonic()
        for number in range(arguments.requests + 1):
            if number in (0, 10, 100) or number % 1000 == 0:
                time.sleep(3)  # what was given up ends
                minutes = (time.monotonic() - begin) / 60
                resident_mb = resident(server.pid)
                print(f"{number:6} requests  {resident_mb:7.0f} MB  {minutes:5.1f} min", flush=True)
            try:
                match number % 4:
                    case 0:
                        unary(top_k)
                    case 1:
                        next(stream(wrong_stream))
                    case 2:
                        unary(top_k, timeout=0.1)
                    case _:
                        call = stream(right_stream)
                        next(call)
                        call.cancel()
            except grpc.RpcError:
                continue


def resident(pid: int) -> float:
    """MB of the process in memory, mapped files included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6
