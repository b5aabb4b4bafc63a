"""The queue before the scans, with threads that wait where a scan would compute."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from dualform.serve.scans import ScanQueue
from dualform.serve.status import Refusal


class Gate:
    """Scans that report in and wait to be let go, or to be told to stop."""

    def __init__(self) -> None:
        self.started = 0
        self.running = 0
        self.most = 0
        self.stopped = 0
        self.open = threading.Event()
        self._lock = threading.Lock()

    def scan(self, stop: Callable[[], bool]) -> str:
        with self._lock:
            self.started += 1
            self.running += 1
            self.most = max(self.most, self.running)
        while not self.open.wait(0.005):
            if stop():
                with self._lock:
                    self.stopped += 1
                break
        with self._lock:
            self.running -= 1
        return "answer"

    async def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("places", [1, 2])
def test_one_call_after_the_other_never_waits_in_the_queue(places: int) -> None:
    async def main() -> None:
        queue = ScanQueue(places, 0)

        async def caller() -> None:
            for _ in range(200):
                assert await queue.run(lambda stop: "answer") == "answer"

        await asyncio.gather(*(caller() for _ in range(places)))
        queue.close()

    asyncio.run(main())


def test_never_more_than_allowed_at_a_time() -> None:
    async def main() -> None:
        queue, gate = ScanQueue(3, 100), Gate()
        tasks = [asyncio.create_task(queue.run(gate.scan)) for _ in range(20)]
        await gate.until(lambda: gate.running == 3)
        await asyncio.sleep(0.05)
        gate.open.set()
        assert await asyncio.gather(*tasks) == ["answer"] * 20
        assert (gate.started, gate.most) == (20, 3)
        queue.close()

    asyncio.run(main())


def test_a_full_queue_refuses_and_recovers() -> None:
    async def main() -> None:
        queue, gate = ScanQueue(1, 2), Gate()
        tasks = [asyncio.create_task(queue.run(gate.scan)) for _ in range(3)]
        await gate.until(lambda: gate.running == 1)
        full = await queue.run(gate.scan)
        assert isinstance(full, Refusal)
        assert "1 scans run and 2 wait" in full.message
        assert full.reason == "QUEUE_FULL"
        gate.open.set()
        await asyncio.gather(*tasks)
        assert await queue.run(gate.scan) == "answer"
        queue.close()

    asyncio.run(main())


def test_giving_up_stops_the_scan_and_keeps_its_place_until_it_has_stopped() -> None:
    async def main() -> None:
        queue, gate = ScanQueue(1, 10), Gate()
        first = asyncio.create_task(queue.run(gate.scan))
        await gate.until(lambda: gate.running == 1)
        second = asyncio.create_task(queue.run(gate.scan))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await gate.until(lambda: gate.started == 2)
        assert (gate.stopped, gate.most) == (1, 1)
        gate.open.set()
        assert await second == "answer"
        queue.close()

    asyncio.run(main())


def test_giving_up_while_waiting_never_runs_and_frees_the_queue() -> None:
    async def main() -> None:
        queue, gate = ScanQueue(1, 1), Gate()
        first = asyncio.create_task(queue.run(gate.scan))
        await gate.until(lambda: gate.running == 1)
        for _ in range(5):
            waiting = asyncio.create_task(queue.run(gate.scan))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        gate.open.set()
        await first
        assert gate.started == 1
        assert await queue.run(gate.scan) == "answer"
        queue.close()

    asyncio.run(main())


def test_an_error_in_a_scan_frees_its_place() -> None:
    def broken(stop: Callable[[], bool]) -> None:
        raise KeyError("bug")

    async def main() -> None:
        queue = ScanQueue(1, 0)
        for _ in range(3):
            refused = await queue.run(broken)
            assert isinstance(refused, Refusal)
            assert refused.code == "INTERNAL"
            await asyncio.sleep(0.01)
        queue.close()

    asyncio.run(main())


def test_drain_waits_for_what_runs_and_what_waits() -> None:
    async def main() -> None:
        queue, gate = ScanQueue(2, 10), Gate()
        tasks = [asyncio.create_task(queue.run(gate.scan)) for _ in range(5)]
        await gate.until(lambda: gate.running == 2)
        draining = asyncio.create_task(queue.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        gate.open.set()
        await draining
        assert [task.done() for task in tasks] == [True] * 5
        queue.close()

    asyncio.run(main())
