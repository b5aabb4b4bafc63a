"""`stream_weights`: every weight in row order, the same by every way, and given up in order."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_index

from dualform.client import (
    AsyncClient,
    CancelledError,
    Client,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    Retry,
    UnavailableError,
)
from dualform.engine.messages.catalog import Catalog

from .memory import ROWS, Memory
from .serving import free_port, serving


def test_every_way_gives_the_nearest_float32(
    remote: Client, local: Client, server: str, memory: Memory, queries: np.ndarray
) -> None:
    async def taken(client: AsyncClient) -> list[np.ndarray]:
        async with client:
            chunks = [chunk async for chunk in client.stream_weights("fc", queries)]
        return check([(chunk.start, chunk.weights) for chunk in chunks])

    def check(chunks: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        start = 0
        for first, weights in chunks:
            assert first == start
            start += weights.shape[1]
        assert start == ROWS
        return [weights for _, weights in chunks]

    expected = memory.weights(queries).astype(np.float32)
    ways = [
        check([(chunk.start, chunk.weights) for chunk in client.stream_weights("fc", queries)])
        for client in (remote, local)
    ]
    ways += [
        asyncio.run(taken(client))
        for client in (AsyncClient(server), AsyncClient.local(memory.path))
    ]
    for parts in ways:
        assert all(part.dtype == np.float32 and part.flags.writeable for part in parts)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)


def test_what_is_wrong_is_said(remote: Client, local: Client, queries: np.ndarray) -> None:
    for client in (remote, local):
        # At once, where the client can see it.
        with pytest.raises(InvalidArgumentError, match="float32 is needed"):
            client.stream_weights("fc", queries.astype(np.float64))
        with pytest.raises(NotFoundError) as caught:
            list(client.stream_weights("nope", queries))
        assert caught.value.field == "layer"
        with pytest.raises(InvalidArgumentError) as wrong:
            next(client.stream_weights("fc", queries[:, :3]))
        assert wrong.value.field == "queries"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50,000 rows."""
    keys = np.random.default_rng(0).standard_normal((50_000, 8)).astype(np.float32)
    return make_index(tmp_path_factory.mktemp("long"), keys, None, rows_per_step=5000)


class SlowCatalog(Catalog):
    """Takes its time for each part, and knows whether somebody still wants them."""

    parts = 0
    ended = threading.Event()

    def stream(self, request: object, stop: object = None) -> Iterator[object]:
        type(self).parts = 0
        self.ended.clear()
        try:
            for part in super().stream(request, stop):  # type: ignore[arg-type]
                type(self).parts += 1
                time.sleep(0.02)
                yield part
        finally:
            self.ended.set()


def test_leaving_the_loop_gives_the_rest_up(long: Path) -> None:
    queries = np.ones((200, 8), np.float32)
    with (
        serving({"long": long}, catalog=SlowCatalog({"long": long})) as address,
        Client(address) as client,
    ):
        chunks = client.stream_weights("fc", queries)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
        # The part that is being made is finished; no other is begun.
        assert SlowCatalog.ended.wait(10)
        assert SlowCatalog.parts < 39
        with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.[23]\d* s"):
            list(client.stream_weights("fc", queries, timeout=0.3))

        async def some() -> None:
            async with AsyncClient(address) as other:
                async for _ in other.stream_weights("fc", queries):
                    break
                with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.[23]\d* s"):
                    async for _ in other.stream_weights("fc", queries, timeout=0.3):
                        pass

        asyncio.run(some())


def test_closing_is_no_cancellation_of_who_takes_a_stream(long: Path) -> None:
    """asyncio's CancelledError is nobody's error: a group of tasks ended without one."""
    queries = np.ones((200, 8), np.float32)
    with serving({"long": long}, catalog=SlowCatalog({"long": long})) as address:
        client = Client(address)
        chunks = client.stream_weights("fc", queries)
        next(chunks)
        client.close()
        with pytest.raises(CancelledError):
            list(chunks)

        async def some() -> None:
            other = AsyncClient(address)
            chunks = other.stream_weights("fc", queries)
            await anext(chunks)

            async def rest() -> int:
                return len([chunk async for chunk in chunks])

            taking = asyncio.create_task(rest())
            await asyncio.sleep(0.05)
            await other.close()
            with pytest.raises(CancelledError, match="closed while it asked"):
                await taking
            assert not taking.cancelled()
            async with AsyncClient(address) as other:
                chunks = other.stream_weights("fc", queries)
                await anext(chunks)
                taking = asyncio.create_task(rest())
                await asyncio.sleep(0.05)
                taking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await taking
            assert SlowCatalog.ended.wait(10)

        asyncio.run(some())


def test_a_stream_left_open_at_the_end_of_a_program_says_nothing(long: Path) -> None:
    """Held by a module, it was ended when gRPC's own were gone already."""
    program = (
        "import logging, sys\n"
        "import numpy as np\n"
        "from dualform.client import Client\n"
        "chunks = Client(sys.argv[1]).stream_weights('fc', np.ones((200, 8), np.float32))\n"
        "next(chunks)\n"
        "logging.chunks = chunks\n"
    )
    with serving({"long": long}, catalog=SlowCatalog({"long": long})) as address:
        command = [sys.executable, "-c", program, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert SlowCatalog.ended.wait(10)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_local_stream_that_is_late_or_closed(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = np.ones((64, 8), np.float32)
    client = Client.local(long)
    chunks = client.stream_weights("fc", queries, timeout=60)
    next(chunks)
    # A minute that is not waited for: a first part may take any time on a busy machine.
    now = time.monotonic
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now() + 60)
        with pytest.raises(DeadlineExceededError, match="longer timeout"):
            list(chunks)
    chunks = client.stream_weights("fc", queries)
    next(chunks)
    client.close()
    with pytest.raises(FailedPreconditionError, match="closed"):
        next(chunks)
    with pytest.raises(FailedPreconditionError, match="closed"):
        next(client.stream_weights("fc", queries))


def test_a_cancelled_task_stops_a_local_stream(long: Path) -> None:
    async def main() -> int:
        taken = 0
        async with AsyncClient.local(long) as client:

            async def take() -> None:
                nonlocal taken
                async for _ in client.stream_weights("fc", np.ones((200, 8), np.float32)):
                    taken += 1
                    await asyncio.sleep(0.02)

            task = asyncio.create_task(take())
            while taken < 2:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stopped_at = taken
            await asyncio.sleep(0.2)
            assert taken == stopped_at
        return taken

    assert asyncio.run(main()) < 39


def test_opening_is_tried_again(memory: Memory, queries: np.ndarray) -> None:
    port = free_port()
    with Client(f"127.0.0.1:{port}", retry=Retry(attempts=2, initial=0.01)) as client:
        with pytest.raises(UnavailableError, match="2 tries"):
            next(client.stream_weights("fc", queries))
        patient = Client(f"127.0.0.1:{port}", retry=Retry(attempts=100, initial=0.05, maximum=0.1))
        rows: list[int] = []
        taking = threading.Thread(
            target=lambda: rows.extend(
                chunk.weights.shape[1] for chunk in patient.stream_weights("fc", queries)
            )
        )
        taking.start()
        with serving({"memory": memory.path}, port=port):
            taking.join(30)
        patient.close()
    assert sum(rows) == ROWS


def test_a_stream_is_no_coroutine() -> None:
    assert not inspect.iscoroutinefunction(AsyncClient.stream_weights)
