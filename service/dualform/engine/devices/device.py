"""What the engine asks of a device, and how a device may fail.

Keys and values lie in torch tensors, once; FAISS searches them where they are. A device answers
for nothing by itself: scores that it finds are proposals, sums and outputs are float64 totals of
float32 weights, as on the CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from dualform._errors import DualformError
from dualform.engine.errors import EngineError

MAX_K = 2048
"""FAISS proposes so many rows on a GPU at most."""


class Device(Protocol):
    """A GPU, or what stands in for one.

    Attributes:
        name: Such as "cuda:0".
        title: What it is, such as "NVIDIA H200".
        where: Where its tensors are.
        memory: Bytes in all.
    """

    name: str
    title: str
    where: torch.device
    memory: int

    def free(self) -> int:
        """Bytes that nobody has taken."""

    def bound_scratch(self, size: int) -> None:
        """Let a search take so many bytes at most for what it computes in."""

    def current(self) -> AbstractContextManager[None]:
        """In which what is called goes to this device, in order; one thread at a time."""

    def aside(self) -> AbstractContextManager[None]:
        """In which memory is taken and filled there, beside what another thread computes."""

    def empty(self, rows: int, width: int) -> torch.Tensor:
        """Room for so many rows, float32 [rows, width], on the device."""

    def nearest(
        self, keys: torch.Tensor, queries: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows with the largest float32 inner products.

        Args:
            keys: float32 [rows, d], on the device, contiguous.
            queries: float32 [n, d], on the device, contiguous.
            k: At most the number of rows, and `MAX_K`.

        Returns:
            Scores, float32 [n, k], descending, and places, int64 [n, k], on the device.
        """


class OnDeviceError(DualformError):
    """A device could not answer; the CPU can.

    Args:
        refusal: What a caller is told who asked for the device.
    """

    def __init__(self, refusal: EngineError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
