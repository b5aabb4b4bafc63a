"""The queue before the scans: how many run at a time, how many may wait, and who gave up.

A scan runs in a thread, never in the event loop. It keeps its place until its thread is done, also
where its caller has gone: giving up only asks it to stop, between two tiles.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from dualform.serve.memory import heap
from dualform.serve.status import Refusal, or_refusal

T = TypeVar("T")
Stop = Callable[[], bool]

_LOOK_AGAIN_S = 0.01


class ScanQueue:
    """Runs at most `concurrent` scans at a time while at most `queued` more wait.

    Belongs to the event loop that first awaits `run`.
    """

    def __init__(self, concurrent: int, queued: int) -> None:
        self._concurrent = concurrent
        self._queued = queued
        self._running = asyncio.Semaphore(concurrent)
        self._free = concurrent
        self._waiting = 0
        self._streams = 0
        self._pool = ThreadPoolExecutor(concurrent, thread_name_prefix="scan")

    async def run(
        self,
        scan: Callable[[Stop], T],
        *,
        what: str = "scan",
        admitted: bool = False,
        starting: Callable[[], None] = lambda: None,
    ) -> T | Refusal:
        """Run `scan(stop)` in a thread once it is its turn.

        Args:
            scan: Called with a function that returns True once the caller has given up.
            what: What the log calls it, should it fail.
            admitted: It was let in already: by `enter` or `stream`.
            starting: Called in the event loop when its turn has come.

        Returns:
            What the scan returned, or a refusal: what it raised, or that the queue is full.

        Raises:
            asyncio.CancelledError: The caller gave up: its deadline passed or it went away.
        """
        if not admitted and (refused := self.enter()):
            return refused
        try:
            await self._running.acquire()
        finally:
            if not admitted:
                self.leave(1)
        self._free -= 1
        starting()
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        future = self._pool.submit(or_refusal, what, lambda: scan(stop.is_set))
        # In this order: a caller's next request must find the place free, and nobody need wait
        # while memory is returned, which can take milliseconds.
        future.add_done_callback(lambda done: self._release(loop))
        answer = asyncio.wrap_future(future)
        future.add_done_callback(lambda done: heap.give_back())
        try:
            return await answer
        finally:
            stop.set()
            # An exception that it holds holds this frame.
            del answer, future

    def enter(self) -> Refusal | None:
        """Begin to wait, which `leave` ends; or a refusal: the queue is full."""
        if self._waiting >= self._queued + self._free:
            running = self._concurrent - self._free
            return _busy(f"{running} scans run and {self._waiting} wait")
        self._waiting += 1
        return None

    def leave(self, count: int) -> None:
        """So many wait no longer."""
        self._waiting -= count

    @contextmanager
    def stream(self) -> Iterator[Refusal | None]:
        """While one answer is sent in parts; between its parts it holds no place.

        Yields:
            None, or a refusal: as many are being sent as may run and wait.
        """
        if self._streams >= self._concurrent + self._queued:
            yield _busy(f"{self._streams} answers are being sent in parts")
            return
        self._streams += 1
        try:
            yield None
        finally:
            self._streams -= 1

    async def drain(self) -> None:
        """Wait until no scan runs or waits, and take every place: nothing starts afterwards."""
        while self._waiting or self._streams:
            await asyncio.sleep(_LOOK_AGAIN_S)
        for _ in range(self._concurrent):
            await self._running.acquire()

    def close(self) -> None:
        """Wait for the threads. Nothing may be asked afterwards."""
        self._pool.shutdown(wait=True)

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        def release() -> None:
            self._free += 1
            self._running.release()

        try:
            loop.call_soon_threadsafe(release)
        except RuntimeError:
            # The loop ended before the thread did: nobody waits for its place any more.
            if not loop.is_closed():
                raise


def _busy(what: str) -> Refusal:
    return Refusal(
        "RESOURCE_EXHAUSTED",
        f"the server is busy: {what}; ask again later, or raise limits.queued_scans in the "
        "server's configuration",
        "QUEUE_FULL",
    )
