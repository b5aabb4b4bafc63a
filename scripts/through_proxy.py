"""What passes through a proxy in front of a server, and what one user's questions do to another's.

    python scripts/through_proxy.py localhost:443 --tls ca.pem [--token-of-a A --token-of-b B]

Asks the first index that is served, about its largest layer, as docs/server.md (*Behind a
proxy*) says; the log of the server tells of the deadline and of the cancelled question.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np

from dualform.client import AsyncClient, Client, DeadlineExceededError, Retry

CALLS, USERS_QUESTIONS, QUESTIONS = 2500, 24, 6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("server", help="HOST:PORT of the proxy")
    parser.add_argument("--tls", help="certificates to trust (PEM)")
    parser.add_argument("--token-of-a", default="")
    parser.add_argument("--token-of-b", default="")
    parser.add_argument("--as-b", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    token = given.token_of_b if given.as_b else given.token_of_a
    settings: dict[str, Any] = {"tls": given.tls or False, "token": token, "timeout": 600}
    with Client(given.server, retry=Retry(attempts=50), **settings) as client:
        (info,) = [client.index(index.name) for index in client.indexes()[:1]]
        layer = max(info.layers.values(), key=lambda each: each.rows * each.d_in)
        shape = (4000, layer.d_in)
        queries = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        question = _Question(client, layer.name, queries[:64], info.steps)
        if given.as_b:
            _wait_turns(question)
            return
        ids = [f"{place:05d}{'x' * 15_995}" for place in range(3900)]
        _told("a request of 62 MB", lambda: len(client.examples(ids)))
        _told("an answer in parts", lambda: _parts(client, layer.name, queries[:256]))
        _told(f"{CALLS} calls", lambda: [client.indexes() for _ in range(CALLS)] and "all answered")
        _told("a deadline of 0.5 s", lambda: _late(client, layer.name, queries))
        asyncio.run(_cancelled(given.server, settings, layer.name, queries))
        _beside(question, sys.argv[1:])


class _Question:
    """Sums over all rows; of other questions' kind only if `number` is theirs."""

    def __init__(self, client: Client, layer: str, queries: Any, steps: int) -> None:
        self._client, self._layer, self._queries, self._steps = client, layer, queries, steps

    def ask(self, number: int) -> None:
        where = f"step < {self._steps - number}"  # another filter: it is not joined with others
        self._client.sums(
            self._layer, self._queries, group_by="label", where=where, strategy="scan"
        )


def _told(what: str, ask: Any) -> None:
    begun = time.perf_counter()
    print(f"{what}: {ask()} ({time.perf_counter() - begun:.1f} s)", flush=True)


def _parts(client: Client, layer: str, queries: Any) -> str:
    sizes = [part.weights.nbytes for part in client.stream_weights(layer, queries)]
    return f"{len(sizes)} parts, {sum(sizes) / 1e6:.0f} MB"


def _late(client: Client, layer: str, queries: Any) -> str:
    try:
        client.top_k(layer, queries, k=100, timeout=0.5)
    except DeadlineExceededError:
        return "kept"
    return "answered before"


async def _cancelled(server: str, settings: Any, layer: str, queries: Any) -> None:
    async with AsyncClient(server, **settings) as client:
        asked = asyncio.create_task(client.top_k(layer, queries, k=100))
        await asyncio.sleep(1.5)
        asked.cancel()
        print("a question cancelled after 1.5 s: see the server's log", flush=True)


def _beside(question: _Question, arguments: list[str]) -> None:
    """While A keeps questions going, B asks a few in a process of its own."""
    ends: list[float] = []
    stop = threading.Event()

    def keep_asking(number: int) -> None:
        while not stop.is_set():
            question.ask(number)
            ends.append(time.time())

    threads = [threading.Thread(target=keep_asking, args=(i,)) for i in range(USERS_QUESTIONS)]
    for thread in threads:
        thread.start()
    time.sleep(4)
    other = subprocess.run(
        [sys.executable, __file__, *arguments, "--as-b"], capture_output=True, text=True
    )
    stop.set()
    for thread in threads:
        thread.join()
    assert other.returncode == 0, other.stderr
    waits = [tuple(map(float, line.split())) for line in other.stdout.splitlines()]
    passed = [sum(begun < end < done for end in ends) for begun, done in waits]
    print(f"of A's {USERS_QUESTIONS} questions, answered while one of B's waited: {passed}")


def _wait_turns(question: _Question) -> None:
    for number in range(QUESTIONS):
        begun = time.time()
        question.ask(100 + number)
        print(begun, time.time(), flush=True)


if __name__ == "__main__":
    main()
