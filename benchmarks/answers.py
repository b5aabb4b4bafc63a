"""Everything but top-k's peers: sums, outputs, gRPC on top, growth with the memory, a cold disk.

    python -m benchmarks answers --data MNIST_DIR [--index INDEX] [--json OUT]

Each figure is a ratio inside one run, or milliseconds in process where the aim is a time. Aims:
signed sums per class under 2 ms for up to 64 queries; the unfiltered dual output of one query under
2 ms; absolute sums at least 0.8 of the rate of the same product; gRPC at most 1.5 ms on top of the
same answer in process; a certified top-k whose time per row does not rise from a
sixteenth of the memory to all of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cold import bytes_read, forget
from benchmarks.memories import Memory, recorded, trained
from benchmarks.server import serving
from benchmarks.timing import Times, interleaved, turns
from dualform.client import Client
from dualform.engine import Index

_TILE = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST's files")
    parser.add_argument("--index", type=Path, help="of the MNIST study, with its trained weights")
    parser.add_argument("--steps", type=int, default=5000, help="to train without --index")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        scratch = Path(folder)
        index = arguments.index or trained(arguments.data, scratch, arguments.steps)
        memories = recorded(index, arguments.data)
        result = {
            "sums": [sums(memory, arguments.rounds) for memory in memories],
            "absolute": [absolute(memory, 3) for memory in memories],
            "outputs": [outputs(memory, arguments.rounds) for memory in memories],
            "grpc": grpc(memories, arguments.rounds),
            "cold": [cold(memory) for memory in memories],
            "growth": growth(arguments.data, index, scratch, arguments.rounds),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def sums(memory: Memory, rounds: int) -> dict[str, Any]:
    """Signed class sums over all rows, in process."""
    with memory.open() as index:
        times = interleaved(
            {
                str(n): partial(index.sums, memory.layer, memory.queries[:n], "label")
                for n in (1, 8, 64)
            },
            rounds,
        )
    return {"memory": memory.title, "ms": _medians(times)}


def absolute(memory: Memory, rounds: int) -> dict[str, Any]:
    """Absolute class sums of 64 queries beside the product of the same shape."""
    queries = memory.queries[:64]
    with memory.open() as index:
        layer = index.layers[memory.layer]
        keys = torch.cat([shard.mapped_keys().clone() for shard in layer.shards])
        asked = torch.from_numpy(queries)

        def product() -> None:
            for start in range(0, len(keys), _TILE):
                asked @ keys[start : start + _TILE].T

        times = interleaved(
            {
                "product": product,
                "sums": lambda: index.sums(memory.layer, queries, "label", absolute=True),
            },
            rounds,
        )
    return {
        "memory": memory.title,
        "ms": _medians(times),
        "rate_to_product": times["product"].median / times["sums"].median,
    }


def outputs(memory: Memory, rounds: int) -> dict[str, Any]:
    """The unfiltered dual output of the trained layer, and a filtered one, in process."""
    with memory.open() as index:
        one = memory.queries[:1]
        times = interleaved(
            {
                "n=1": lambda: index.dual_output(memory.layer, one),
                "n=64": lambda: index.dual_output(memory.layer, memory.queries[:64]),
            },
            rounds,
        )
        masked = interleaved({"n=1, 100 steps at the end": lambda: _late(index, memory, one)}, 3)
    return {"memory": memory.title, "ms": _medians({**times, **masked})}


def _late(index: Index, memory: Memory, queries: np.ndarray) -> object:
    return index.dual_output(memory.layer, queries, at_step=index.steps - 1)


def grpc(memories: list[Memory], rounds: int) -> list[dict[str, Any]]:
    """The same answers over a real socket and from the SDK's local mode: medians of single calls,
    in turns of ten. A call right after another contestant's finds the caches that this one left."""
    found = []
    with (
        serving(memories[0].path) as server,
        Client(server.address) as remote,
        Client.local(memories[0].path, device="cpu") as local,
    ):
        for memory in memories:
            times = turns(
                {
                    f"{question}, {where}": partial(ask, client, memory.layer, memory.queries[:1])
                    for where, client in (("local", local), ("grpc", remote))
                    for question, ask in (("top-k", _top_k), ("sums", _sums))
                },
                rounds,
                10,
            )
            ms = _medians(times)
            on_top = {of: ms[f"{of}, grpc"] - ms[f"{of}, local"] for of in ("top-k", "sums")}
            found.append({"memory": memory.title, "ms": ms, "on_top_ms": on_top})
    return found


def _top_k(client: Client, layer: str, queries: np.ndarray) -> object:
    return client.top_k(layer, queries, k=10)


def _sums(client: Client, layer: str, queries: np.ndarray) -> object:
    return client.sums(layer, queries, group_by="label")


def cold(memory: Memory) -> dict[str, Any]:
    """Bytes that one query reads from the disk when nothing of the layer is in memory."""
    result: dict[str, Any] = {"memory": memory.title}
    one = memory.queries[:1]
    with memory.open() as index:
        layer = index.layers[memory.layer]
        asked = {
            "certified": partial(index.top_k, memory.layer, one, 10, strategy="certified"),
            "scan": partial(index.top_k, memory.layer, one, 10, strategy="scan"),
        }
        for run in asked.values():  # every file is checked when it is first used
            run()
        result["keys_bytes"] = layer.rows * layer.d_in * 4
        for strategy, run in asked.items():
            forget(index, memory.layer)
            result[f"{strategy}_bytes"] = bytes_read(run)
        forget(index, memory.layer)
        asked["certified"]()
        forget(index, memory.layer, sketches=False)
        result["certified_bytes_with_sketches_in_memory"] = bytes_read(asked["certified"])
    return result


def growth(data: Path, largest: Path, scratch: Path, rounds: int) -> list[dict[str, Any]]:
    """Certified top-k of one query over memories of growing size: nanoseconds per row."""
    found = []
    with Index.open(largest, device="cpu") as index:
        whole = index.steps
    for steps in (whole // 16, whole // 4, whole):
        path = largest if steps == whole else trained(data, scratch, steps)
        for memory in recorded(path, data):
            with memory.open() as index:
                rows = index.layers[memory.layer].rows
                times = interleaved(
                    {
                        "certified": partial(
                            index.top_k, memory.layer, memory.queries[:1], 10, strategy="certified"
                        )
                    },
                    rounds,
                )
            median = times["certified"].median
            found.append(
                {
                    "memory": memory.title,
                    "rows": rows,
                    "ms": median,
                    "ns_per_row": 1e6 * median / rows,
                }
            )
    return found


def _medians(times: dict[str, Times]) -> dict[str, float]:
    return {name: measured.median for name, measured in times.items()}


if __name__ == "__main__":
    main()
