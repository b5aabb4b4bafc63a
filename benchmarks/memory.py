"""Anonymous and shared memory of `dualform serve` at its peak, question by question (Linux).

    python -m benchmarks.memory INDEX

Outputs of 1,000 queries, then top-k of 64 with k = 500, plain, absolute and per label, and absolute
sums, on every layer, by random queries without sign. Sampled every 5 ms.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dualform.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("index", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "dualform.cli", "serve", arguments.index, "--port", "0"]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            ask(address(server, log), server.pid)
        finally:
            server.terminate()
            server.wait()


def ask(address: str, pid: int) -> None:
    """Print the peak while each question is answered, and what is left after it."""
    random = np.random.default_rng(0)
    print(f"{'at the start':34} {anonymous(pid) / 1e6:12.0f} MB")
    with Client(address, timeout=1800) as client:
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


def address(server: subprocess.Popen[bytes], log: object) -> str:
    """HOST:PORT, once the server listens."""
    while server.poll() is None:
        text = Path(f"/proc/self/fd/{log.fileno()}").read_text()  # type: ignore[attr-defined]
        if found := re.search(r"listening on (\S+)", text):
            return found[1]
        time.sleep(0.1)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
