"""Requests that differ in nothing but their queries are answered by one scan for all of them.

A scan reads every row, be it for one query or for fifty. So while a request is being answered,
others of its kind (same method, index, layer, filter and options) wait, and when it is done one
scan answers all that have come. A request that finds none of its kind at work starts at once:
nobody waits for company. Each keeps its own refusal, deadline and cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from dualform.serve.scans import Asker, ScanQueue, Stop
from dualform.serve.status import Refusal, or_refusal

MOST_BYTES = 1 << 20
"""Larger requests gain nothing by company, and go alone."""

Answer = Callable[[Sequence[Any], Stop], Sequence[Any]]


@dataclass(eq=False)
class _Member:
    """One request that waits for its answer."""

    request: Any
    asker: Asker
    answer: asyncio.Future[Any]
    gone: bool = False


@dataclass(eq=False)
class _Batch:
    """Requests that will be answered together."""

    members: list[_Member] = field(default_factory=list)
    size: int = 0
    started: bool = False
    task: asyncio.Task[None] | None = None


class JoinedScans:
    """Joins requests before the queue of scans. Belongs to the queue's event loop.

    Args:
        scans: The queue.
        answer: Answers requests of one key, called in a thread with a function that returns True
            once none of the callers waits any more.
        what: What the log calls them.
    """

    def __init__(self, scans: ScanQueue, answer: Answer, what: str = "scan") -> None:
        self._scans = scans
        self._answer = answer
        self._what = what
        self._open: dict[bytes, _Batch] = {}
        self._running: dict[bytes, asyncio.Event] = {}

    async def run(self, key: bytes, request: Any, size: int, asker: Asker | None = None) -> Any:
        """The answer to a request, or a refusal: the answer's own, or that the queue is full.

        Args:
            key: The same for requests that may be answered together.
            request: As `answer` takes it.
            size: Its bytes.
            asker: Whom it is for.

        Raises:
            asyncio.CancelledError: The caller gave up.
        """
        loop = asyncio.get_running_loop()
        asker = asker or Asker()
        if refused := self._scans.enter(asker.client):
            return refused
        batch = self._open.get(key)
        if batch is None or batch.size + size > MOST_BYTES:
            batch = self._open[key] = _Batch()
            batch.task = loop.create_task(self._work(key, batch))
        member = _Member(request, asker, loop.create_future())
        batch.members.append(member)
        batch.size += size
        try:
            return await member.answer
        finally:
            member.gone = True
            if not batch.started:
                self._scans.leave(asker.client)
                batch.members.remove(member)
            if batch.task is not None and all(other.gone for other in batch.members):
                batch.task.cancel()  # no matter where it has ended
                self._close(key, batch)

    async def _work(self, key: bytes, batch: _Batch) -> None:
        while (running := self._running.get(key)) is not None:
            await running.wait()
        done = asyncio.Event()

        def starting() -> None:
            batch.started = True
            self._close(key, batch)
            self._running[key] = done
            for member in batch.members:
                self._scans.leave(member.asker.client)

        def answer(stop: Stop) -> Sequence[Any]:
            return self._answer([member.request for member in batch.members], stop)

        try:
            # Whoever came first pays for all.
            asker = batch.members[0].asker
            found = await self._scans.run(
                answer, what=self._what, asker=asker, admitted=True, starting=starting
            )
        except Exception as error:  # nobody else would tell those who wait
            found = or_refusal(self._what, partial(_raised, error))
        finally:
            done.set()
            if self._running.get(key) is done:
                del self._running[key]
        answers = [found] * len(batch.members) if isinstance(found, Refusal) else found
        for member, result in zip(batch.members, answers, strict=True):
            member.asker.queued_s, member.asker.computed_s = asker.queued_s, asker.computed_s
            member.asker.joined = len(answers) > 1
            if not member.answer.done():
                member.answer.set_result(result)

    def _close(self, key: bytes, batch: _Batch) -> None:
        if self._open.get(key) is batch:
            del self._open[key]


def _raised(error: Exception) -> NoReturn:
    raise error
