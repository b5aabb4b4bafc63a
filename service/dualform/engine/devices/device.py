"""What the engine asks of a device, and how a device may fail.

Keys and values lie in torch tensors, once; FAISS searches them where they are. A device answers
for nothing by itself: scores that it finds are proposals, sums and outputs are float64 totals of
float32 weights, as on the CPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dualform._errors import DualformError
from dualform.engine.errors import EngineError

MAX_K = 2048
"""FAISS proposes so many rows on a GPU at most, and ends the process that asks for more."""

_TILE = (1 << 30) // 2 // 4 // 512
"""Rows whose products with a query FAISS holds at a time on a GPU, twice: a gigabyte for 512
queries, however little memory it was told to take (`chooseTileSize` in its DistanceUtils.cuh)."""


class Moment(Protocol):
    """A place in the order of a stream's copies, as `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait until all copies before it are done."""


class Stream(Protocol):
    """Copies to one device in an order of their own, beside what it computes."""

    def pinned(self, numbers: int) -> torch.Tensor:
        """Host memory that it copies from without another copy: float32 [numbers]."""

    def copy(self, host: torch.Tensor, out: torch.Tensor) -> Moment:
        """Copy to the device once it comes to it; until the moment has passed `host` is not to be
        changed."""

    def computed(self) -> Any:
        """The moment after all that was computed so far, for `follow`."""

    def follow(self, computed: Any) -> None:
        """What is copied from here on comes after such a moment."""

    def lead(self) -> None:
        """What is computed from here on comes after the copies so far."""

    def synchronize(self) -> None:
        """Wait until all copies so far are done."""


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

    def prepare(self, scratch: int) -> None:
        """Get ready to compute; to be called first.

        Args:
            scratch: Bytes that a search keeps at hand for what it computes in.

        Raises:
            RuntimeError: It has no room for what it needs itself.
        """

    def give_back(self) -> None:
        """Let others have the memory of tensors that are no more."""

    def current(self) -> AbstractContextManager[None]:
        """In which what is called goes to this device, in order; one thread at a time."""

    def aside(self) -> AbstractContextManager[None]:
        """In which memory is taken and filled there, beside what another thread computes."""

    def empty(self, rows: int, width: int) -> torch.Tensor:
        """Room for so many rows, float32 [rows, width], on the device.

        What was computed so far may still use that memory for a tensor that is no more: whoever
        fills it by a stream lets the stream follow what was computed.
        """

    def stream(self) -> Stream:
        """To copy there with."""

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

        Raises:
            ValueError: As `check_search`.
        """


def check_search(keys: torch.Tensor, queries: torch.Tensor, k: int, where: torch.device) -> None:
    """What FAISS takes an address's word for: it would read other numbers, or end the process.

    Raises:
        ValueError: Keys or queries are not float32 [rows, d], one after the other on the device, at
            least one; or k is not from 1 to as many as there are keys, or `MAX_K`.
    """
    for name, given in (("keys", keys), ("queries", queries)):
        what = f"{given.dtype} {list(given.shape)} on {given.device}"
        if given.dtype != torch.float32 or given.dim() != 2 or 0 in given.shape:
            raise ValueError(f"{name} are {what}; a device searches float32 [rows, d]")
        if given.device != where or not given.is_contiguous():
            raise ValueError(f"{name} are {what}; they must lie one after the other on {where}")
    if keys.shape[1] != queries.shape[1]:
        raise ValueError(f"keys have {keys.shape[1]} numbers, queries {queries.shape[1]}")
    if not 0 < k <= min(len(keys), MAX_K):
        raise ValueError(f"k is {k}; of {len(keys)} keys it is 1 to {min(len(keys), MAX_K)}")


def queries_at_a_time(rows: int, k: int, scratch: int) -> int:
    """How many queries a search of so many rows takes within so many bytes, at least one.

    Of each query FAISS holds two tiles of products, and twice the k best of every tile with their
    places.
    """
    tiles = -(-rows // _TILE)
    return max(1, scratch // (8 * min(rows, _TILE) + 24 * k * tiles))


class OnDeviceError(DualformError):
    """A device could not answer; the CPU can.

    Args:
        refusal: What a caller is told who asked for the device.
    """

    def __init__(self, refusal: EngineError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal
