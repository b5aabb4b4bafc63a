"""The queue before the scans: who is next, how many run at a time, how many may wait.

A scan runs in a thread, never in the event loop. It keeps its place until its thread is done, also
where its caller has gone: giving up only asks it to stop, between two tiles.

Fair: each client has a clock that its scans wind on by what they cost, and the client whose clock
is furthest behind is next (start-time fair queueing, Goyal et al., 1996). So what one client asks
costs the others at most the rest of a running scan. And what is known to be cheap, on its own or
beside what else is asked, has one more place, where it waits for nothing expensive.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dualform.serve.memory import heap
from dualform.serve.status import Refusal, busy, or_refusal

T = TypeVar("T")
Stop = Callable[[], bool]

CHEAP_S = 0.05
"""What takes less has the cheap place too, ..."""
_CHEAP_SHARE = 0.1
"""... and so has what takes less than this share of a usual scan: on a busy machine nothing takes
less than `CHEAP_S`, but all take longer alike."""
_CHEAP_MOST_S = 1.0
"""Longer than that nobody holds up those who are cheaper still, or else ..."""
_BARRED = 9
"""... its client has no cheap place for so many times as long: a tenth of it at most."""
_UNKNOWN_S = 0.1
_LOOK_AGAIN_S = 0.01
_MOST_CLOCKS = 1024


class _GivenUp:
    """Whether a scan's caller has given up, and since when; thread-safe."""

    def __init__(self) -> None:
        self._at: float | None = None

    def __call__(self) -> bool:
        return self._at is not None

    def now(self) -> None:
        self._at = time.monotonic()

    @property
    def seconds(self) -> float | None:
        """How long ago; None where it has not."""
        return None if self._at is None else time.monotonic() - self._at


@dataclass(eq=False)
class Asker:
    """Whom a scan is for, what it will cost, and then what it did.

    Attributes:
        client: Whose clock it winds on.
        connection: Over which the answer goes.
        seconds: What it will take, by experience; None where there is none.
        queued_s: How long its scans waited.
        computed_s: How long they took.
        joined: It was answered along with others.
    """

    client: str = ""
    connection: str = ""
    seconds: float | None = None
    queued_s: float = 0.0
    computed_s: float = 0.0
    joined: bool = False

    @property
    def expected_s(self) -> float:
        """What its client's clock is wound on by, to be corrected later."""
        return _UNKNOWN_S if self.seconds is None else self.seconds


class ScanQueue:
    """Runs at most `concurrent` scans at a time, and a cheap one, while at most `queued` wait.

    Of the places to wait an eighth is left to other clients than the one that has the most.
    Belongs to the event loop that first awaits `run`.

    Args:
        concurrent, queued: So many.
        prepare: Called once in each of the scans' threads, before the queue is there.

    Attributes:
        begun: How many scans began.
        stopped: Told of each scan whose caller gave up, once it has ended: what it was, and how
            many seconds it went on. Called in the scan's thread.
    """

    def __init__(
        self, concurrent: int, queued: int, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._concurrent = concurrent
        self._queued = queued
        self._places = _Places(concurrent)
        self._waiting: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._barred: dict[str, float] = {}
        self._began: dict[_GivenUp, float] = {}
        self._pool = _started(concurrent + 1, prepare)
        self._seconds = _UNKNOWN_S
        self.begun = 0
        self.stopped: Callable[[str, float], None] = lambda what, seconds: None

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._waiting.total()

    @property
    def running(self) -> int:
        """How many run."""
        return self._places.taken

    @property
    def streams(self) -> int:
        """How many answers are sent in parts."""
        return self._streams.total()

    async def run(
        self,
        scan: Callable[[Stop], T],
        *,
        what: str = "scan",
        asker: Asker | None = None,
        admitted: bool = False,
        starting: Callable[[], None] = lambda: None,
    ) -> T | Refusal:
        """Run `scan(stop)` in a thread once it is its turn.

        Args:
            scan: Called with a function that returns True once the caller has given up.
            what: What the log calls it, should it fail.
            asker: Whom it is for.
            admitted: It was let in already: by `enter` or `stream`.
            starting: Called in the event loop when its turn has come.

        Returns:
            What the scan returned, or a refusal: what it raised, or that the queue is full.

        Raises:
            asyncio.CancelledError: The caller gave up: its deadline passed or it went away.
        """
        asker = asker or Asker()
        if not admitted and (refused := self.enter(asker.client)):
            return refused
        came = time.monotonic()
        try:
            cheap_place = await self._places.take(asker, cheap=self._cheap(asker))
        finally:
            if not admitted:
                self.leave(asker.client)
        starting()
        self.begun += 1
        asker.queued_s += time.monotonic() - came
        stop = _GivenUp()
        if not cheap_place:
            self._began[stop] = time.monotonic()
        loop, expected = asyncio.get_running_loop(), asker.expected_s

        def timed() -> T | Refusal:
            begin = time.monotonic()
            found = or_refusal(what, lambda: scan(stop))
            seconds = time.monotonic() - begin
            if (went_on := stop.seconds) is not None:
                self.stopped(what, went_on)
            if not cheap_place:
                self._seconds += 0.2 * (seconds - self._seconds)
            elif seconds > _CHEAP_MOST_S:
                _in(loop, self._bar, asker.client, _BARRED * seconds)
            asker.computed_s += seconds
            _in(loop, self._places.charge, asker.client, seconds - expected)
            return found

        future = self._pool.submit(timed)
        # In this order: a caller's next request must find the place free, and nobody need wait
        # while memory is returned, which can take milliseconds.
        future.add_done_callback(lambda _: _in(loop, self._end, stop, cheap_place))
        answer = asyncio.wrap_future(future)
        future.add_done_callback(lambda _: heap.give_back())
        try:
            return await answer
        finally:
            stop.now()
            # An exception that it holds holds this frame.
            del answer, future

    def enter(self, client: str = "") -> Refusal | None:
        """Begin to wait, which `leave` ends; or a refusal: the queue is full."""
        most = self._queued + self._concurrent - self._places.taken
        of_one = most - self._queued // 8
        if self.waiting >= most or self._waiting[client] >= of_one:
            what = f"{self.running} scans run and {self.waiting} wait (limits.queued_scans)"
            return busy(what, self._soon())
        self._waiting[client] += 1
        return None

    def leave(self, client: str = "", count: int = 1) -> None:
        """So many of a client wait no longer."""
        self._waiting[client] -= count
        if not self._waiting[client]:
            del self._waiting[client]

    @contextmanager
    def stream(self, client: str = "") -> Iterator[Refusal | None]:
        """While one answer is sent in parts; between its parts it holds no place.

        Args:
            client: To whom it is sent; half of all such answers at most go to one.

        Yields:
            None, or a refusal: as many are being sent as may run and wait.
        """
        most, sent = self._concurrent + self._queued, self._streams.total()
        if sent >= most or self._streams[client] >= max(2, most // 2):
            of_this = self._streams[client]
            yield busy(f"{sent} answers are being sent in parts, {of_this} of them to this client")
            return
        self._streams[client] += 1
        try:
            yield None
        finally:
            self._streams[client] -= 1
            if not self._streams[client]:
                del self._streams[client]

    async def drain(self) -> None:
        """Wait until no scan runs or waits, and take every place: nothing starts afterwards."""
        while self.waiting or self._streams or not self._places.idle:
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._places.shut()

    def close(self) -> None:
        """Wait for the threads. Nothing may be asked afterwards."""
        self._pool.shutdown(wait=True)

    def _cheap(self, asker: Asker) -> bool:
        """Whether it may take the cheap place."""
        if self._barred.get(asker.client, 0.0) > time.monotonic():
            return False
        most = max(CHEAP_S, min(_CHEAP_MOST_S, _CHEAP_SHARE * self._seconds))
        return asker.seconds is not None and asker.seconds < most

    def _bar(self, client: str, seconds: float) -> None:
        """For so long a client has no cheap place: it asked what only looked cheap."""
        now = time.monotonic()
        self._barred = {who: until for who, until in self._barred.items() if until > now}
        self._barred[client] = now + seconds

    def _end(self, scan: _GivenUp, cheap_place: bool) -> None:
        self._began.pop(scan, None)
        self._places.give(cheap_place)

    def _soon(self) -> float:
        """Seconds after which a place to wait should be free: a scan's usual time, or as long as
        no place has become free, which is where the last scan began, if that is longer."""
        since = time.monotonic() - max(self._began.values(), default=math.inf)
        return min(30.0, max(0.1, self._seconds, since))


def _started(threads: int, prepare: Callable[[], None]) -> ThreadPoolExecutor:
    """With its threads there: a system that has none left later on takes no place away."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="scan")
    together = threading.Barrier(threads)

    def begin() -> None:
        together.wait()
        prepare()

    try:
        for each in [pool.submit(begin) for _ in range(threads)]:
            each.result()
    except BaseException:
        together.abort()  # those that are there would wait for the others, and the process for them
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool


def _in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call it there; where the loop ended before the thread did, nobody waits any more."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


class _Places:
    """So many places for anything, and one for what is cheap; whose turn it is to take one."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._cheap_free = 1
        self.taken = 0
        self._now = 0.0
        self._clocks: dict[str, float] = {}
        self._order = itertools.count()
        self._lines: tuple[list[_Waiting], list[_Waiting]] = ([], [])

    @property
    def idle(self) -> bool:
        """Whether nothing runs, cheap or not."""
        return not self.taken and self._cheap_free == 1

    async def take(self, asker: Asker, *, cheap: bool) -> bool:
        """Wait for a place, which may be the cheap one; True where it is, False otherwise."""
        start = max(self._now, self._clocks.get(asker.client, 0.0))
        self._clocks[asker.client] = start + asker.expected_s
        waiting = _Waiting(start, next(self._order), asyncio.get_running_loop().create_future())
        heapq.heappush(self._lines[cheap], waiting)
        self._hand_out()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():
                self.give(waiting.place.result())
            raise

    def give(self, cheap_place: bool) -> None:
        """A place is free again."""
        self.taken -= not cheap_place
        self._cheap_free += cheap_place
        self._free += not cheap_place
        self._hand_out()

    def charge(self, client: str, seconds: float) -> None:
        """A scan of this client took so much more than expected, or less."""
        if client in self._clocks:
            self._clocks[client] += seconds

    def shut(self) -> None:
        """Hand out nothing any more."""
        self._free = self._cheap_free = -(2**31)

    def _hand_out(self) -> None:
        other, cheap = self._lines
        for line in self._lines:
            while line and line[0].place.done():
                heapq.heappop(line)
        while self._cheap_free > 0 and cheap:
            self._next(cheap, cheap_place=True)
        while self._free > 0 and (other or cheap):
            first = min((line for line in self._lines if line), key=lambda line: line[0])
            self._next(first, cheap_place=False)
        if len(self._clocks) > _MOST_CLOCKS:
            self._clocks = {who: at for who, at in self._clocks.items() if at > self._now}

    def _next(self, line: list[_Waiting], *, cheap_place: bool) -> None:
        waiting = heapq.heappop(line)
        if waiting.place.done():
            return
        self._now = max(self._now, waiting.start)
        self.taken += not cheap_place
        self._cheap_free -= cheap_place
        self._free -= not cheap_place
        waiting.place.set_result(cheap_place)


@dataclass(frozen=True, order=True)
class _Waiting:
    """One that waits: where its client's clock stood, its number, and its place to come."""

    start: float
    number: int
    place: asyncio.Future[bool]
