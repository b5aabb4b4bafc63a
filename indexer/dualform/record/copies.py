"""Copies from a device to the host that the training loop waits for once a step.

A hook takes a snapshot on the device, in the loop's own stream, so that nothing that the loop does
to the tensor afterwards matters; the snapshot travels on a stream of its own, into pinned memory,
while the loop goes on. The step's checks need the rows, so it waits for that stream before the
weights move, and only then are they copied to where they are kept (docs/decisions, 26).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch

SLAB_BYTES = 16 << 20
"""Pinned memory is taken in pieces of so many bytes, or of one copy's."""

MOST_BYTES = 1 << 30
"""With so much pinned memory on its way the oldest of it is waited for before more is sent."""

_ALIGNED = 64


class Sent(Protocol):
    """A moment in a stream, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all before it is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Stream(Protocol):
    """Copies from one device, in order."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that it can copy to: uint8 [nbytes]."""

    def send(self, snapshot: torch.Tensor, host: torch.Tensor) -> None:
        """Copy, after all that the loop has issued so far; the snapshot is let go of by then."""

    def sent(self) -> Sent:
        """The moment after all copies so far."""


class CudaStream:
    """Of a CUDA device.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See Stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def send(self, snapshot: torch.Tensor, host: torch.Tensor) -> None:
        """See Stream."""
        # The hook's stream: autograd runs a backward's on that of its forward.
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            host.copy_(snapshot, non_blocking=True)
        # Its memory must not be given to the loop's next tensor before it was read.
        snapshot.record_stream(self._side)

    def sent(self) -> Sent:
        """See Stream."""
        event = torch.cuda.Event()
        event.record(self._side)
        return event


def stream_of(device: torch.device) -> Stream | None:
    """The stream of a device's copies; None where copies are plain ones, that are waited for."""
    return CudaStream(device) if device.type == "cuda" else None


class _Slab:
    """Pinned memory, filled from its start, and what is to be done with each copy in it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.used = 0
        self.jobs: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
        self.sent: Sent | None = None

    def room(self, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor like another, in this memory; None where it does not fit."""
        first, self_end = self.used, self.used + like.nbytes
        if self_end > len(self.memory):
            return None
        self.used = -(-self_end // _ALIGNED) * _ALIGNED
        return self.memory[first:self_end].view(like.dtype).view(like.shape)

    def take(self) -> None:
        """All its copies are there."""
        jobs, self.jobs, self.used = self.jobs, [], 0
        for host, job in jobs:
            job(host)


class _Ring:
    """A device's stream, the slab that is being filled, and those on their way, oldest first."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._filling: _Slab | None = None
        self._flying: deque[_Slab] = deque()
        self._free: list[_Slab] = []
        self._bytes = 0

    def send(self, snapshot: torch.Tensor, job: Callable[[torch.Tensor], None]) -> None:
        """Send a copy; `job` takes it when it is there."""
        host = None if self._filling is None else self._filling.room(snapshot)
        if host is None:
            self._close()
            self._filling = self._slab(snapshot.nbytes)
            host = self._filling.room(snapshot)
        assert host is not None
        assert self._filling is not None
        self._filling.jobs.append((host, job))
        self.stream.send(snapshot, host)

    def wait(self) -> None:
        """Until all copies are there; the stream is waited for once."""
        self._close()
        if self._flying and self._flying[-1].sent is not None:
            self._flying[-1].sent.synchronize()
        while self._flying:
            self._land()

    def _close(self) -> None:
        slab, self._filling = self._filling, None
        if slab is not None and slab.jobs:
            slab.sent = self.stream.sent()
            self._flying.append(slab)
        elif slab is not None:
            self._free.append(slab)

    def _slab(self, nbytes: int) -> _Slab:
        """One that has so much room."""
        while (slab := self._fitting(nbytes)) is None and self._flying:
            sent = self._flying[0].sent
            assert sent is not None
            if not sent.query():
                if self._bytes + nbytes <= MOST_BYTES:
                    break
                sent.synchronize()
            self._land()
        if slab is not None:
            return slab
        if self._bytes + nbytes > MOST_BYTES:  # those that are free are too small
            self._bytes -= sum(len(slab.memory) for slab in self._free)
            self._free.clear()
        slab = _Slab(self.stream.pinned(max(SLAB_BYTES, nbytes)))
        self._bytes += len(slab.memory)
        return slab

    def _fitting(self, nbytes: int) -> _Slab | None:
        for number, slab in enumerate(self._free):
            if len(slab.memory) >= nbytes:
                return self._free.pop(number)
        return None

    def _land(self) -> None:
        slab = self._flying.popleft()
        slab.take()
        self._free.append(slab)


class Copies:
    """The copies of one recorder; thread-safe, as autograd's threads run hooks.

    Args:
        devices: Those of the model; of any other nothing is taken.

    Attributes:
        sending: Anything is: to be asked first, as loops on the host ask often.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        streams = {device: stream_of(device) for device in set(devices)}
        self._rings = {device: _Ring(s) for device, s in streams.items() if s is not None}
        self.sending = bool(self._rings)
        # With each its source, so that no other gets its memory meanwhile.
        self._ahead: dict[object, tuple[torch.Tensor, np.ndarray]] = {}
        self._lock = threading.RLock()

    def takes(self, source: torch.Tensor) -> bool:
        """Whether a tensor lies where copies are sent from."""
        return self.sending and source.device in self._rings

    def send(
        self, source: torch.Tensor, dtype: torch.dtype, job: Callable[[torch.Tensor], None]
    ) -> None:
        """Send a copy of a tensor as it is now.

        Args:
            source: Any layout; one that `takes`.
            dtype: What it is rounded to on the device.
            job: Is given the copy, source's shape and contiguous, once `wait` found it there; it
                must not keep it.
        """
        source = source.detach()
        source = source if source.layout is torch.strided else source.to_dense()
        snapshot = source.to(dtype, copy=True, memory_format=torch.contiguous_format)
        with self._lock:
            self._rings[source.device].send(snapshot, job)

    def wait(self) -> None:
        """Until all that was sent is where it was to go."""
        if not self.sending:
            return
        with self._lock:
            for ring in self._rings.values():
                ring.wait()

    def look_ahead(self, tensor: torch.Tensor | None) -> None:
        """Send what `read` will be asked for after the next `wait`, where that takes a copy."""
        if tensor is not None and self.takes(tensor):
            key = _as_it_is(tensor)

            def keep(host: torch.Tensor) -> None:
                self._ahead[key] = tensor, _array(host).copy()

            self.send(tensor, tensor.dtype, keep)

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        """A tensor on the host: what was sent ahead, if it still is so; or it is waited for."""
        found = self._ahead.get(_as_it_is(tensor)) if self._ahead else None
        return _array(tensor.detach().cpu()) if found is None else found[1]

    def forget(self) -> None:
        """The step has read what it wanted."""
        self._ahead.clear()


def _as_it_is(tensor: torch.Tensor) -> object:
    """Equal while it is the same memory, and nothing that autograd counts changed it."""
    place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return place, tensor._version


def _array(host: torch.Tensor) -> np.ndarray:
    """NumPy has no bfloat16."""
    return (host.float() if host.dtype is torch.bfloat16 else host).numpy()


NONE = Copies(())
"""Of a model on the host."""
