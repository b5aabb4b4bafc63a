"""Host memory that stands in for a GPU: budgets, placement and failures where there is no card.

It is as strict as a GPU where that can be told in host memory: a search that FAISS would take other
numbers for is refused, a copy comes no earlier than somebody waits for it, and one into memory
whose last use was not waited for is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dualform.engine.devices.device import Stream, check_search


@dataclass
class _Room:
    """Memory that was taken.

    Attributes:
        nbytes: How much.
        used: When something was last computed with it, or with what had it before.
    """

    nbytes: int
    used: int


class StandIn:
    """A device in host memory; see `Device`. Tests and benchmarks hand it to `Devices`.

    Args:
        number: It is called "stand-in:<number>".
        memory: Bytes that it says it has; a tensor beyond that is refused as torch does on a GPU.
        before: Called with the name of each operation before it runs: raises what a device would.
        rounded: What becomes of keys and queries before they are multiplied, on a device that
            rounds.

    Attributes:
        waits: How often somebody waited for copies.
    """

    title = "host memory"

    def __init__(
        self,
        number: int = 0,
        memory: int = 1 << 30,
        before: Callable[[str], None] = lambda what: None,
        rounded: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self.name = f"stand-in:{number}"
        self.where = torch.device("cpu")
        self.memory = memory
        self.waits = 0
        self._before = before
        self._rounded = rounded
        self._lock = threading.Lock()
        self._rooms: dict[int, _Room] = {}
        self._now = 0

    def free(self) -> int:
        with self._lock:
            return self.memory - sum(room.nbytes for room in self._rooms.values())

    def prepare(self, scratch: int) -> None:
        self._before("prepare")

    def give_back(self) -> None:
        """Nobody else has the host's memory to spare for."""

    @contextmanager
    def current(self) -> Iterator[None]:
        self._before("current")
        yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._before("aside")
        yield

    def empty(self, rows: int, width: int) -> torch.Tensor:
        self._before("empty")
        if 4 * rows * width > self.free():
            raise torch.OutOfMemoryError(f"{self.name} is out of memory: {rows} x {width} asked")
        # What was there before is of no use to anybody.
        taken = torch.full((rows, width), torch.nan, dtype=torch.float32, device="cpu")
        address = taken.data_ptr()
        with self._lock:
            self._now += 1
            self._rooms[address] = _Room(taken.nbytes, self._now)
        weakref.finalize(taken.untyped_storage(), self._left, address)
        return taken

    def stream(self) -> Stream:
        return _Late(self)

    def nearest(
        self, keys: torch.Tensor, queries: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import faiss

        self._before("nearest")
        check_search(keys, queries, k, self.where)
        with self._lock:
            self._now += 1
            room = self._rooms.get(keys.untyped_storage().data_ptr())
            if room is not None:
                room.used = self._now
        scores, places = faiss.knn(
            self._rounded(queries).numpy(),
            self._rounded(keys).numpy(),
            k,
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        return torch.from_numpy(scores), torch.from_numpy(places)

    def now(self) -> int:
        """After all that was computed so far."""
        with self._lock:
            return self._now

    def used(self, tensor: torch.Tensor) -> int:
        """When its memory was last computed with."""
        with self._lock:
            room = self._rooms.get(tensor.untyped_storage().data_ptr())
            return 0 if room is None else room.used

    def _left(self, address: int) -> None:
        with self._lock:
            self._rooms.pop(address, None)


class _Late:
    """A stream whose copies come when somebody waits for them; see `Stream`."""

    def __init__(self, device: StandIn) -> None:
        self._device = device
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._after = self._done = 0

    def pinned(self, numbers: int) -> torch.Tensor:
        return torch.full((numbers,), torch.nan, dtype=torch.float32, device="cpu")

    def copy(self, host: torch.Tensor, out: torch.Tensor) -> _Moment:
        self._device._before("copy")
        if self._device.used(out) > self._after:
            raise RuntimeError(
                "a copy into memory that may still be computed with: the stream is to follow first"
            )
        self._queue.append((host, out))
        return _Moment(self, self._done + len(self._queue))

    def computed(self) -> int:
        return self._device.now()

    def follow(self, computed: int) -> None:
        self._after = max(self._after, computed)

    def lead(self) -> None:
        self.arrive(self._done + len(self._queue))

    def synchronize(self) -> None:
        self._device.waits += 1
        self.lead()

    def arrive(self, count: int) -> None:
        """Let so many copies be done, of all there were."""
        coming = max(0, count - self._done)
        for host, out in self._queue[:coming]:
            out.copy_(host)
        del self._queue[:coming]
        self._done += coming


@dataclass
class _Moment:
    """After so many of a stream's copies."""

    stream: _Late
    count: int

    def synchronize(self) -> None:
        self.stream._device.waits += 1
        self.stream.arrive(self.count)
