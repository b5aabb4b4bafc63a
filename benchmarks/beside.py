"""What a cheap question and a stream wait for beside clients that ask expensive ones without end.

    python -m benchmarks beside --index INDEX --layer LAYER [--clients 2 8] [--others 6]

The cheap question: a top-k of one query, k = 2. The stream: all weights of four queries, read as
they come. The expensive ones: top-k of 128 queries, k = 100, each with a filter of its own, so that
none is answered along with another. All in one run, first alone. `--others` keeps so many processes
busy meanwhile, as on a machine that is not the server's alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.server import serving
from dualform.client import Client

_ASKED = 40
_EVERY_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--layer")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 8])
    parser.add_argument(
        "--others", type=int, default=0, help="processes that keep the machine busy"
    )
    arguments = parser.parse_args()
    with serving(arguments.index) as server, Client(server.address, timeout=600) as client:
        layer = arguments.layer or next(iter(client.index().layers))
        beside = _Beside(client, layer, server.address)
        beside.cheap()
        time.sleep(2)
        with busy(arguments.others):
            load, _, _ = os.getloadavg()
            print(f"load {load:.1f} before, {arguments.others} other processes; milliseconds\n")
            begin = time.monotonic()
            beside.ask_expensive(client, 0)
            print(f"expensive question, alone: {(time.monotonic() - begin) * 1e3:,.0f}\n")
            print(
                "| beside | cheap, median | most | stream | its parts |\n|---|---:|---:|---:|---:|"
            )
            beside.row("nobody")
            for clients in arguments.clients:
                with beside.expensive(clients):
                    beside.row(f"{clients} clients")


class _Beside:
    """Questions of one layer, and who asks them."""

    def __init__(self, client: Client, layer: str, address: str) -> None:
        self._client, self._layer, self._address = client, layer, address
        width = client.index().layers[layer].d_in
        self._queries = np.random.default_rng(0).standard_normal((128, width)).astype(np.float32)

    def ask_expensive(self, client: Client, number: int) -> None:
        client.top_k(self._layer, self._queries, k=100, where=f"step >= {-number}")

    def cheap(self) -> list[float]:
        """Milliseconds of each."""
        found = []
        for _ in range(_ASKED):
            begin = time.monotonic()
            self._client.top_k(self._layer, self._queries[:1], k=2)
            found.append((time.monotonic() - begin) * 1e3)
            time.sleep(_EVERY_S)
        return found

    def row(self, name: str) -> None:
        cheap = self.cheap()
        begin = time.monotonic()
        parts = sum(1 for _ in self._client.stream_weights(self._layer, self._queries[:4]))
        stream = (time.monotonic() - begin) * 1e3
        cells = f"{np.median(cheap):,.0f} | {max(cheap):,.0f} | {stream:,.0f} | {parts}"
        print(f"| {name} | {cells} |", flush=True)

    @contextmanager
    def expensive(self, clients: int) -> Iterator[None]:
        """While so many ask, each over a connection of its own."""
        stop = threading.Event()

        def ask(first: int) -> None:
            with Client(self._address, timeout=600) as client:
                number = first
                while not stop.is_set():
                    self.ask_expensive(client, number)
                    number += clients

        threads = [threading.Thread(target=ask, args=(n + 1,)) for n in range(clients)]
        for thread in threads:
            thread.start()
        time.sleep(5)
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """While so many processes compute."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


if __name__ == "__main__":
    main()
