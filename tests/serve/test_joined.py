"""Requests that are answered together: when, how, and what each keeps for itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest
from synthetic import make_index

from dualform.engine.errors import InvalidArgumentError
from dualform.engine.messages.catalog import Catalog, Limits
from dualform.serve import ServerLimits
from dualform.serve.joined import MOST_BYTES, JoinedScans
from dualform.serve.scans import ScanQueue
from dualform.serve.status import Refusal
from dualform.v1 import attribution_pb2 as pb

from .serving import Served, array, refusal, serving, tensor


class Gate:
    """Answers at a gate: notes which requests came together, and whether nobody waited any more."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.given_up = 0
        self.open = threading.Event()

    def answer(self, requests: Sequence[Any], stop: Callable[[], bool]) -> list[Any]:
        self.batches.append(list(requests))
        while not self.open.wait(0.005):
            if stop():
                self.given_up += 1
                break
        if requests == ["broken"]:
            raise KeyError("bug")
        return [
            Refusal.of(InvalidArgumentError("bad")) if request == "bad" else str(request).encode()
            for request in requests
        ]

    async def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.005)


def run(
    main: Callable[[Gate, ScanQueue, JoinedScans], Any], places: int = 2, queued: int = 9
) -> None:
    async def start() -> None:
        gate, scans = Gate(), ScanQueue(places, queued)
        try:
            await main(gate, scans, JoinedScans(scans, gate.answer))
        finally:
            gate.open.set()
            scans.close()

    asyncio.run(start())


def test_those_that_arrive_meanwhile_go_together() -> None:
    async def main(gate: Gate, scans: ScanQueue, joined: JoinedScans) -> None:
        first = asyncio.create_task(joined.run(b"k", 0, 1))
        # Nothing of its kind was at work: it did not wait.
        await gate.until(lambda: gate.batches == [[0]])
        more = [asyncio.create_task(joined.run(b"k", i, 1)) for i in range(1, 5)]
        other = asyncio.create_task(joined.run(b"other", "x", 1))
        await gate.until(lambda: gate.batches == [[0], ["x"]])
        gate.open.set()
        assert await asyncio.gather(first, other, *more) == [b"0", b"x", b"1", b"2", b"3", b"4"]
        assert gate.batches == [[0], ["x"], [1, 2, 3, 4]]
        assert await joined.run(b"k", 5, 1) == b"5"

    run(main)


def test_those_that_wait_are_told_of_what_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(gate: Gate, scans: ScanQueue, joined: JoinedScans) -> None:
        async def broken(*_: object, **options: Any) -> None:
            options["starting"]()
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(scans, "run", broken)
            calls = [asyncio.wait_for(joined.run(b"k", each, 1), 10) for each in (1, 2)]
            found = await asyncio.gather(*calls)
        assert [each.code for each in found] == ["INTERNAL"] * 2
        gate.open.set()
        assert await joined.run(b"k", 3, 1) == b"3"
        assert scans.waiting == 0

    run(main)


def test_each_has_its_own_refusal() -> None:
    async def main(gate: Gate, scans: ScanQueue, joined: JoinedScans) -> None:
        first = asyncio.create_task(joined.run(b"k", 0, 1))
        await gate.until(lambda: len(gate.batches) == 1)
        more = [asyncio.create_task(joined.run(b"k", each, 1)) for each in (1, "bad", 2)]
        await asyncio.sleep(0.02)
        gate.open.set()
        found = await asyncio.gather(first, *more, return_exceptions=True)
        assert (found[0], found[1], found[3]) == (b"0", b"1", b"2")
        assert found[2] == Refusal("INVALID_ARGUMENT", "bad", "INVALID_ARGUMENT")
        bug = await joined.run(b"k", "broken", 1)
        assert isinstance(bug, Refusal)
        assert bug.code == "INTERNAL"
        assert await joined.run(b"k", 3, 1) == b"3"

    run(main)


def test_who_gives_up_leaves_the_others_alone() -> None:
    async def main(gate: Gate, scans: ScanQueue, joined: JoinedScans) -> None:
        running = asyncio.create_task(joined.run(b"k", 0, 1))
        await gate.until(lambda: len(gate.batches) == 1)
        waiting = [asyncio.create_task(joined.run(b"k", i, 1)) for i in (1, 2)]
        alone = asyncio.create_task(joined.run(b"k2", 3, 1))
        await gate.until(lambda: len(gate.batches) == 2)
        waiting[0].cancel()
        alone.cancel()
        await gate.until(lambda: gate.given_up == 1)
        gate.open.set()
        assert await asyncio.gather(running, waiting[1]) == [b"0", b"2"]
        assert gate.batches == [[0], [3], [2]]
        # One of two that run: the other still gets its answer.
        gate.open.clear()
        blocker = asyncio.create_task(joined.run(b"k", 4, 1))
        await gate.until(lambda: len(gate.batches) == 4)
        pair = [asyncio.create_task(joined.run(b"k", i, 1)) for i in (5, 6)]
        await asyncio.sleep(0.02)
        gate.open.set()
        await blocker
        pair[0].cancel()
        assert await pair[1] == b"6"
        assert gate.given_up == 1

    run(main)


def test_all_that_wait_count_and_leave_the_queue() -> None:
    async def main(gate: Gate, scans: ScanQueue, joined: JoinedScans) -> None:
        first = asyncio.create_task(joined.run(b"k", 0, 1))
        await gate.until(lambda: len(gate.batches) == 1)
        waiting = [asyncio.create_task(joined.run(b"k", i, 1)) for i in (1, 2)]
        await asyncio.sleep(0.02)
        full = await joined.run(b"k", 3, 1)
        assert isinstance(full, Refusal)
        assert "1 scans run and 2 wait" in full.message
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # None of them ever ran.
        last = asyncio.create_task(joined.run(b"k", 4, 1))
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(scans.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        gate.open.set()
        await draining
        assert [await first, await last] == [b"0", b"4"]
        assert gate.batches == [[0], [4]]

    run(main, places=1, queued=2)


def test_a_batch_holds_no_more_than_a_mebibyte() -> None:
    async def main(gate: Gate, scans: ScanQueue, joined: JoinedScans) -> None:
        tasks = [asyncio.create_task(joined.run(b"k", 0, 1))]
        await gate.until(lambda: len(gate.batches) == 1)
        for i in (1, 2, 3):
            tasks.append(asyncio.create_task(joined.run(b"k", i, MOST_BYTES // 2)))
            await asyncio.sleep(0)
        gate.open.set()
        assert await asyncio.gather(*tasks) == [b"0", b"1", b"2", b"3"]
        assert sorted(gate.batches) == [[0], [1, 2], [3]]

    run(main)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((20_000, 16)).astype(np.float32)
    label = rng.integers(0, 5, len(keys)).tolist()
    return make_index(
        tmp_path_factory.mktemp("index"), keys, keys[:, :3], rows_per_step=500, label=label
    )


class NotingCatalog(Catalog):
    """Notes how many requests were answered together."""

    together: ClassVar[list[int]] = []

    def answer(self, request: Any, stop: Any = None) -> Any:
        time.sleep(0.02)
        return super().answer(request, stop)

    def answer_together(self, requests: Any, stop: Any = None) -> Any:
        type(self).together.append(len(requests))
        return super().answer_together(requests, stop)


@pytest.fixture
def served(index: Path) -> Iterator[Served]:
    NotingCatalog.together = []
    with serving({"i": index}, ServerLimits(max_queries=40), NotingCatalog) as running:
        yield running


def questions(n: int) -> list[Any]:
    """n requests of each kind."""
    made: list[Any] = []
    for i in range(n):
        queries = tensor(np.random.default_rng(i).standard_normal((i % 3 + 1, 16), np.float32))
        question = {"layer": "fc", "queries": queries}
        made += [
            pb.TopKRequest(k=4, **question),
            pb.TopKRequest(k=3, group_by="label", distinct="step", **question),
            pb.TopGroupsRequest(by="step", k=3, **question),
            pb.SumsRequest(group_by="label", absolute=True, **question),
            pb.DualOutputRequest(at_step=30, group_by="label", **question),
        ]
    return made


def test_answers_are_those_that_come_alone(served: Served, index: Path) -> None:
    made = questions(12)
    with ThreadPoolExecutor(len(made)) as pool:
        found = list(
            pool.map(
                lambda sent: getattr(served.stub, type(sent).__name__.removesuffix("Request"))(
                    sent, timeout=60
                ),
                made,
            )
        )
    assert max(served.catalog.together) > 2  # type: ignore[attr-defined]
    alone = Catalog({"i": index})
    for request, answer in zip(made, found, strict=True):
        expected = alone.answer(request)
        if isinstance(request, pb.TopKRequest):
            assert answer == expected
        else:
            slack = np.abs(array(request.queries)).sum() * 20_000
            scores = "scores" if isinstance(request, pb.TopGroupsRequest) else "values"
            ours, theirs = (array(getattr(each, scores)) for each in (answer, expected))
            np.testing.assert_allclose(ours, theirs, atol=1e-6 * slack)
            assert answer.groups == expected.groups
            assert answer.counts == expected.counts
            assert answer.coverage == expected.coverage
    alone.close()


def test_a_wrong_request_fails_alone(served: Served) -> None:
    good = np.ones((1, 16), np.float32)
    wrong = np.full((1, 16), np.nan, np.float32)
    wide = np.ones((1, 17), np.float32)
    many = np.ones((41, 16), np.float32)

    def ask(queries: np.ndarray) -> Any:
        request = pb.TopKRequest(layer="fc", k=2, queries=tensor(queries))
        try:
            return array(served.stub.TopK(request, timeout=60).rows).tolist()
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined]

    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(ask, [good, wrong, wide, many, good] * 8))
    assert max(served.catalog.together) > 2  # type: ignore[attr-defined]
    for i in range(0, 40, 5):
        assert found[i] == found[i + 4] == found[0]
        assert found[i + 1] == found[i + 2] == grpc.StatusCode.INVALID_ARGUMENT
        assert found[i + 3] == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_mistake_of_all_is_told_to_each(served: Served) -> None:
    request = pb.TopKRequest(layer="nope", k=2, queries=tensor(np.ones((1, 16), np.float32)))
    with ThreadPoolExecutor(10) as pool:
        refusals = list(pool.map(lambda _: refusal(lambda: served.stub.TopK(request)), range(10)))
    assert {each.reason for each in refusals} == {"UNKNOWN_LAYER"}


def test_what_is_together_within_the_limits(index: Path) -> None:
    """Batches larger than a request may be are answered in several goes."""
    catalog = Catalog({"i": index}, limits=Limits(max_queries=4, max_message_mib=1))
    requests = [
        pb.TopKRequest(
            layer="fc",
            k=3000,
            queries=tensor(np.random.default_rng(i).standard_normal((2, 16), np.float32)),
        )
        for i in range(7)
    ]
    for request, answer in zip(requests, catalog.answer_together(requests), strict=True):
        assert answer == catalog.answer(request)
    catalog.close()
