"""How long an answer is worked on between two askings whether anybody still waits for it.

    python -m benchmarks stops [--rows 150000] [--only NAME]

Each kind of question is put to a catalog in this process, over random rows 128 wide with a label, a
word and an example, in shards of 16,384. Counted is the processor time of the thread that answers,
which other work on the machine doesn't touch: so this covers every moment of an answer, where
giving up at some moments (`busy`) finds what lasts long by chance.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dualform.engine.messages.catalog import Catalog
from dualform.engine.messages.writing import write
from dualform.index import build_index
from dualform.record import Recorder
from dualform.serve import policy
from dualform.v1 import attribution_pb2 as pb

_D_IN, _D_OUT, _STEP = 128, 16, 128
_AGAIN = 3
_PARTS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=150_000)
    parser.add_argument("--only", default="", help="kinds with this in their names")
    arguments = parser.parse_args()
    policy.apply()
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog({"i": _index(Path(folder), arguments.rows)})
        print("| question | milliseconds | between two askings, most |\n|---|---:|---:|")
        for name, request in _requests():
            if arguments.only in name:
                found = [_asked(catalog, request) for _ in range(_AGAIN)]
                whole, most = (min(each) * 1e3 for each in zip(*found, strict=True))
                print(f"| {name} | {whole:,.0f} | {most:.0f} |", flush=True)
        catalog.close()


def _asked(catalog: Catalog, request: Any) -> tuple[float, float]:
    """Seconds of the answering thread's processor: for all, and the most between two askings."""
    thread = threading.get_ident()
    begin = last = time.thread_time()
    most = 0.0

    def stop() -> bool:
        nonlocal last, most
        if threading.get_ident() == thread:
            now = time.thread_time()
            most, last = max(most, now - last), now
        return False

    if isinstance(request, pb.StreamWeightsRequest):
        for part in itertools.islice(catalog.stream(request, stop), _PARTS):
            part.SerializeToString()
    else:
        write(catalog.answer(request, stop), stop)
    stop()
    return last - begin, most


def _index(folder: Path, rows: int) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_D_IN, _D_OUT))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, folder / "recording") as recorder:
        for first in range(0, rows, _STEP):
            batch = range(first, min(first + _STEP, rows))
            recorder.annotate(
                label=[row % 10 for row in batch],
                word=[f"w{row % 70_000}" for row in batch],
                example=list(batch),
            )
            optimizer.zero_grad()
            target = torch.randn(len(batch), _D_OUT)
            (model(torch.randn(len(batch), _D_IN)) * target).mean().backward()
            optimizer.step()
    build_index(folder / "recording", folder / "index", shard_rows=1 << 14)
    return folder / "index"


def _requests() -> Iterator[tuple[str, Any]]:
    rng = np.random.default_rng(1)

    def queries(n: int) -> pb.Tensor:
        asked = rng.standard_normal((n, _D_IN)).astype("<f4")
        return pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=asked.shape, data=asked.tobytes())

    def about(kind: Callable[..., Any], n: int, **options: Any) -> Any:
        return kind(layer="0", queries=queries(n), **options)

    top_k, groups, sums = pb.TopKRequest, pb.TopGroupsRequest, pb.SumsRequest
    ones = np.zeros((4096, _D_IN), "<f4")
    ones[:, :2] = 1
    ties = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=ones.shape, data=ones.tobytes())
    yield "top-k, 256 queries, k = 100", about(top_k, 256, k=100)
    yield "top-k, 4,096 queries, k = 10", about(top_k, 4096, k=10)
    yield "top-k, 64 queries, k = 3,000", about(top_k, 64, k=3000)
    yield "top-k, one query, k = 16,384", about(top_k, 1, k=16_384)
    yield "top-k, absolute", about(top_k, 256, k=100, order=pb.ORDER_ABSOLUTE)
    yield "top-k, distinct examples", about(top_k, 256, k=100, distinct="example")
    yield "top-k, distinct words", about(top_k, 256, k=100, distinct="word")
    yield "top-k by label", about(top_k, 256, k=100, group_by="label")
    yield "sums by example, 50 queries", about(sums, 50, group_by="example")
    yield "sums by word, 60 queries", about(sums, 60, group_by="word")
    yield "sums by label, absolute", about(sums, 1024, group_by="label", absolute=True)
    yield "best examples, 256 queries", about(groups, 256, by="example", k=10)
    yield "best words, k = 16,384", about(groups, 64, by="word", k=16_384)
    yield "self-influence by example", pb.SelfInfluenceRequest(layer="0", by="example")
    yield "outputs", about(pb.DualOutputRequest, 1024, max_residual=np.inf)
    yield "outputs by word", about(pb.DualOutputRequest, 4, group_by="word", max_residual=np.inf)
    yield "weights, 256 queries, 20 parts", about(pb.StreamWeightsRequest, 256)
    yield (
        "weights, 4,096 queries of ties, 20 parts",
        pb.StreamWeightsRequest(layer="0", queries=ties),
    )


if __name__ == "__main__":
    main()
