"""Anonymous and shared memory of `dualform serve` at its peak, question by question (Linux).

    python -m benchmarks memory INDEX

Outputs of 1,000 queries, then top-k of 64 with k = 500, plain, absolute and per label, and absolute
sums, on every layer, by random queries without sign. Sampled every 5 ms.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.server import Server, serving
from dualform.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("index", type=Path)
    arguments = parser.parse_args()
    with serving(arguments.index) as server:
        ask(server)


def ask(server: Server) -> None:
    """Print the peak while each question is answered, and what is left after it."""
    random, pid = np.random.default_rng(0), server.pid
    print(f"{'at the start':34} {anonymous(pid) / 1e6:12.0f} MB")
    with Client(server.address, timeout=1800) as client:
        for name, layer in client.index().layers.items():
            many = np.abs(random.standard_normal((1000, layer.d_in))).astype(np.float32)
            few = many[:64]
            for what, question in questions(client, name, many, few).items():
                peak = watch(pid, question)
                left = anonymous(pid) / 1e6
                print(f"layer {name:8} {what:20} peak {peak / 1e6:6.0f} MB, then {left:6.0f} MB")


def questions(
    client: Client, layer: str, many: np.ndarray, few: np.ndarray
) -> dict[str, Callable[[], object]]:
    """By what to call them."""
    return {
        "outputs": lambda: client.dual_output(layer, many),
        "top-k absolute": lambda: client.top_k(layer, few, k=500, order="absolute"),
        "top-k": lambda: client.top_k(layer, few, k=500),
        "top-k per label": lambda: client.top_k(layer, few, k=500, group_by="label"),
        "absolute sums": lambda: client.sums(layer, few, group_by="label", absolute=True),
    }


def watch(pid: int, question: Callable[[], object]) -> int:
    """The most bytes while a question is answered."""
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous(pid))
            time.sleep(0.005)

    thread = threading.Thread(target=sample)
    thread.start()
    question()
    done.set()
    thread.join()
    return peak


def anonymous(pid: int) -> int:
    """Bytes of RssAnon and RssShmem."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)))


if __name__ == "__main__":
    main()
