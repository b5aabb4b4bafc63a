"""Throughput of a server that several clients ask at once, joined and apart.

    python -m benchmarks load --index INDEX --data MNIST_DIR --layer LAYER [--seconds 8]

Each client asks for the best rows of one query, again and again. Requests that differ in nothing
but their queries are answered together; "apart" gives each client a k of its own (10, 11, 12, …),
which keeps them from being joined and changes the work by next to nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memories import recorded
from benchmarks.server import serving
from dualform.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--index", type=Path, required=True, help="of the MNIST study")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds MNIST's files")
    parser.add_argument("--layer", required=True)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    memory = next(
        each for each in recorded(arguments.index, arguments.data) if each.layer == arguments.layer
    )
    results: list[dict[str, Any]] = []
    with serving(arguments.index) as server:
        for clients in arguments.clients:
            for together in (False, True):
                measured = load(
                    server.address,
                    memory.layer,
                    memory.queries,
                    clients,
                    together,
                    arguments.seconds,
                )
                results.append(measured)
                print(measured, file=sys.stderr, flush=True)
    print("| clients | apart, answers/s | median ms | joined, answers/s | median ms | ratio |")
    print("|---:|---:|---:|---:|---:|---:|")
    for apart, joined in zip(results[::2], results[1::2], strict=True):
        cells = [
            f"{each[name]:.1f}" for each in (apart, joined) for name in ("per_second", "median_ms")
        ]
        gain: float = joined["per_second"] / apart["per_second"]
        print(f"| {apart['clients']} | " + " | ".join(cells) + f" | {gain:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def load(
    address: str, layer: str, queries: np.ndarray, clients: int, joined: bool, seconds: float
) -> dict[str, Any]:
    """Answers per second, and the median and the longest wait in milliseconds."""
    waits: list[list[float]] = [[] for _ in range(clients)]
    end = time.monotonic() + seconds

    def ask(number: int) -> None:
        k = 10 if joined else 10 + number
        with Client(address) as client:
            client.top_k(layer, queries[:1], k=k)
            place = number
            while time.monotonic() < end:
                place = (place + clients) % len(queries)
                start = time.perf_counter()
                client.top_k(layer, queries[place : place + 1], k=k)
                waits[number].append(1e3 * (time.perf_counter() - start))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(wait for of_client in waits for wait in of_client)
    return {
        "clients": clients,
        "joined": joined,
        "per_second": len(every) / seconds,
        "median_ms": statistics.median(every),
        "longest_ms": every[-1],
    }
