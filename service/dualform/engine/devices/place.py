"""A device as a place for memory: what it may hold, how fast it is, whether it is to be used."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, dataclass, field

from dualform._errors import DualformError
from dualform.engine.devices.device import MAX_K, Device, OnDeviceError
from dualform.engine.errors import (
    FailedPreconditionError,
    ResourceExhaustedError,
    ran_out_of_memory,
)

FEW = 10
"""Rows that a search finds where it is measured how long that takes."""

LOG = logging.getLogger("dualform.engine")

MOST_SCRATCH = 256 << 20
"""Bytes that a question computes in on a device, at most; FAISS as many beside that."""


@dataclass(frozen=True)
class Pace:
    """How long something takes on a device, measured there.

    Attributes:
        call: Seconds, however little is asked.
        byte: Seconds per byte of rows.
        pair: Seconds per byte of rows and query.
    """

    call: float
    byte: float
    pair: float

    def seconds(self, size: float, queries: int) -> float:
        """For so many bytes of rows and so many queries."""
        return self.call + size * (self.byte + self.pair * queries)


@dataclass(frozen=True)
class Paces:
    """What was measured of a device.

    Attributes:
        nearest: To find `FEW` rows for each query.
        furthest: To find `MAX_K`: a GPU sorts what it finds.
        sums: To add up weights.
        outputs: To add up weighted values, of keys and values.
        upload: Seconds per byte that is copied there.
    """

    nearest: Pace
    furthest: Pace
    sums: Pace
    outputs: Pace
    upload: float

    def finding(self, k: int) -> Pace:
        """To find k rows for each query: between what was measured."""
        share = min(1.0, max(0, k - FEW) / (MAX_K - FEW))
        few, many = astuple(self.nearest), astuple(self.furthest)
        return Pace(*[a + share * (b - a) for a, b in zip(few, many, strict=True)])


@dataclass(eq=False)
class Place:
    """A device, its budget, and who uses it.

    Attributes:
        device: Which.
        budget: Bytes that rows may take, at most.
        scratch: Bytes that a question computes in.
        paces: How fast it is.
        refused: Why it is not used any more; None while it is.
        lock: Whoever computes there has it.
    """

    device: Device
    budget: int
    scratch: int
    paces: Paces
    refused: str | None = None
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def name(self) -> str:
        return self.device.name

    def refuse(self, reason: str) -> None:
        """Do not use it any more."""
        self.refused = reason
        LOG.warning("%s is not used any more, the CPU answers: %s", self.name, reason)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute there, alone.

        Raises:
            OnDeviceError: It is out of memory, or has failed and is not used any more.
        """
        with self.lock, self._guarded(self.device.current()):
            yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Copy there, beside what others compute.

        Raises:
            OnDeviceError: As `used`.
        """
        with self._guarded(self.device.aside()):
            yield

    @contextmanager
    def _guarded(self, context: AbstractContextManager[None]) -> Iterator[None]:
        if self.refused is not None:
            raise OnDeviceError(self._failed(self.refused))
        try:
            with context:
                yield
        except (DualformError, OnDeviceError, OSError):
            raise  # nothing of the device's
        except Exception as error:
            if ran_out_of_memory(error):
                raise OnDeviceError(self._out_of_memory(error)) from None
            self.refuse(f"{type(error).__name__}: {error}")
            raise OnDeviceError(self._failed(str(self.refused))) from None

    def give_back(self) -> None:
        """Rows have left: what they took is free once nobody computes with it."""
        if self.refused is None:
            with self.lock, suppress(OnDeviceError), self._guarded(self.device.aside()):
                self.device.give_back()

    def _failed(self, reason: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"{self.name} is not used any more: {reason}; leave strategy= out, and the CPU answers",
            field="strategy",
            reason="DEVICE_FAILED",
        )

    def _out_of_memory(self, error: Exception) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"{self.name} has not enough memory for this answer ({error}); leave strategy= out, "
            "and the CPU answers, or ask for less at a time",
            reason="OUT_OF_MEMORY",
        )
