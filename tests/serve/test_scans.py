"""The queue before the scans, with threads that wait where a scan would compute."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from dualform.serve import scans
from dualform.serve.scans import CHEAP_S, Asker, ScanQueue
from dualform.serve.status import Refusal
from dualform.serve.waiting import within


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


def test_a_system_without_threads_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        queue = ScanQueue(2, 0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            with pytest.raises(RuntimeError, match="new thread"):
                threading.Thread().start()
            both = [queue.run(lambda stop: "answer") for _ in range(2)]
            assert await asyncio.gather(*both) == ["answer"] * 2
        queue.close()

    asyncio.run(main())


def test_threads_that_can_not_all_be_made_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    start, made = threading.Thread.start, []

    def two(thread: threading.Thread) -> None:
        if len(made) == 2:
            raise RuntimeError("can't start new thread")
        made.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", two)
        with pytest.raises(RuntimeError, match="new thread"):
            ScanQueue(4, 0)
    for thread in made:
        thread.join(20)
        assert not thread.is_alive()


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
        went_on: list[tuple[str, float]] = []
        queue.stopped = lambda what, seconds: went_on.append((what, seconds))
        first = asyncio.create_task(queue.run(gate.scan, what="first"))
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
        ((what, seconds),) = went_on  # the second was not given up
        assert what == "first"
        assert 0 < seconds < 10

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


def test_a_client_that_asks_much_does_not_hold_up_one_that_asks_little() -> None:
    async def main() -> None:
        queue, ended = ScanQueue(1, 100), []

        async def ask(client: str, number: int) -> None:
            await queue.run(lambda stop: time.sleep(0.01), asker=Asker(client, seconds=1))
            ended.append((client, number))

        many = [asyncio.create_task(ask("many", number)) for number in range(30)]
        await asyncio.sleep(0.025)
        few = [asyncio.create_task(ask("few", number)) for number in range(3)]
        await asyncio.gather(*many, *few)
        # By turns, from where it came in: not behind the thirty.
        places = [place for place, (client, _) in enumerate(ended) if client == "few"]
        assert places[-1] < 12
        assert [number for client, number in ended if client == "many"] == list(range(30))
        queue.close()

    asyncio.run(main())


def test_what_is_cheap_has_a_place_of_its_own() -> None:
    async def main() -> None:
        queue, gate = ScanQueue(2, 100), Gate()
        asked = [asyncio.create_task(queue.run(gate.scan)) for _ in range(5)]
        await gate.until(lambda: gate.running == 2)
        for _ in range(10):
            cheap = Asker("same", seconds=CHEAP_S / 2)
            assert await asyncio.wait_for(queue.run(lambda stop: "answer", asker=cheap), 5)
        # What is known to be expensive does not take it.
        dear = asyncio.create_task(queue.run(gate.scan, asker=Asker(seconds=CHEAP_S * 2)))
        await asyncio.sleep(0.05)
        assert gate.running == 2
        gate.open.set()
        await asyncio.gather(*asked, dear)
        queue.close()

    asyncio.run(main())


def test_who_asks_what_only_looks_cheap_has_the_cheap_place_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by filters of one length, some of which take long."""
    monkeypatch.setattr(scans, "_CHEAP_MOST_S", 0.05)

    async def main() -> None:
        queue, gate = ScanQueue(1, 100), Gate()
        asked = asyncio.create_task(queue.run(gate.scan))
        await gate.until(lambda: gate.running == 1)
        ask = lambda who: queue.run(  # noqa: E731
            lambda stop: "answer", asker=Asker(who, seconds=CHEAP_S / 2)
        )
        assert await within(10, ask("mixes")) == "answer"
        asker = Asker("mixes", seconds=CHEAP_S / 2)
        await within(10, queue.run(lambda stop: time.sleep(0.2), asker=asker))
        begin = time.monotonic()
        barred = asyncio.create_task(ask("mixes"))
        assert await within(10, ask("other")) == "answer"
        await asyncio.sleep(0.05)
        if time.monotonic() - begin < 9 * 0.2:
            assert not barred.done()
        await asyncio.sleep(9 * 0.2)
        assert await within(10, ask("mixes")) == "answer"
        gate.open.set()
        await asyncio.gather(asked, barred)
        queue.close()

    asyncio.run(main())


def test_one_client_does_not_fill_the_queue() -> None:
    async def main() -> None:
        queue, gate = ScanQueue(1, 16), Gate()
        asked = [asyncio.create_task(queue.run(gate.scan, asker=Asker("a"))) for _ in range(30)]
        await gate.until(lambda: gate.running == 1)
        other = asyncio.create_task(queue.run(gate.scan, asker=Asker("b")))
        await asyncio.sleep(0.02)
        gate.open.set()
        found = await asyncio.gather(*asked)
        assert await other == "answer"
        refused = [each for each in found if isinstance(each, Refusal)]
        assert refused
        assert all(each.reason == "QUEUE_FULL" and each.retry_after for each in refused)
        queue.close()

    asyncio.run(main())


def test_who_is_refused_is_told_how_long_those_that_run_may_take() -> None:
    """None has ended yet, so the usual time is nobody's experience."""

    async def main() -> None:
        queue, gate = ScanQueue(1, 0), Gate()
        running = asyncio.create_task(queue.run(gate.scan))
        await gate.until(lambda: gate.running == 1)
        at_once = await queue.run(gate.scan)
        await asyncio.sleep(0.3)
        later = await queue.run(gate.scan)
        assert isinstance(at_once, Refusal)
        assert isinstance(later, Refusal)
        assert at_once.retry_after is not None
        assert later.retry_after is not None
        assert 0.1 <= at_once.retry_after <= later.retry_after - 0.1
        assert later.retry_after >= 0.3
        gate.open.set()
        assert await running == "answer"
        queue.close()

    asyncio.run(main())


def test_one_that_runs_for_long_says_nothing_of_the_other_places() -> None:
    async def main() -> None:
        queue, long, short = ScanQueue(2, 0), Gate(), Gate()
        running = [asyncio.create_task(queue.run(long.scan))]
        await long.until(lambda: long.running == 1)
        await asyncio.sleep(1)
        begin = time.monotonic()
        running.append(asyncio.create_task(queue.run(short.scan)))
        await short.until(lambda: short.running == 1)
        refused = await queue.run(long.scan)
        assert isinstance(refused, Refusal)
        assert refused.retry_after is not None
        assert 0.1 <= refused.retry_after <= max(0.1, time.monotonic() - begin)
        long.open.set()
        short.open.set()
        assert await asyncio.gather(*running) == ["answer"] * 2
        queue.close()

    asyncio.run(main())


def test_a_place_given_to_one_who_has_gone_goes_to_the_next() -> None:
    async def main() -> None:
        queue = ScanQueue(1, 100)
        for _ in range(50):
            gate = Gate()
            first = asyncio.create_task(queue.run(gate.scan))
            waiting = [asyncio.create_task(queue.run(lambda stop: "answer")) for _ in range(3)]
            await gate.until(lambda gate=gate: gate.running == 1)
            gate.open.set()
            await first
            waiting[0].cancel()
            assert await asyncio.wait_for(asyncio.gather(*waiting[1:]), 5) == ["answer"] * 2
        await asyncio.wait_for(queue.drain(), 5)
        queue.close()

    asyncio.run(main())


def test_a_cancellation_that_comes_as_the_work_is_done_is_not_lost() -> None:
    async def main() -> None:
        done = asyncio.get_running_loop().create_future()

        async def work() -> str:
            return str(await done)

        task = asyncio.create_task(within(60, work()))
        await asyncio.sleep(0.01)
        done.set_result("answer")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await within(0.01, asyncio.sleep(60))
        assert await within(60, asyncio.sleep(0, "answer")) == "answer"

    asyncio.run(main())
