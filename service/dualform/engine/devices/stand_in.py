"""Host memory that stands in for a GPU: budgets, placement and failures where there is no card."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StandIn:
    """A device in host memory; see `Device`. Tests and benchmarks hand it to `Devices`.

    Args:
        number: It is called "stand-in:<number>".
        memory: Bytes that it says it has; a tensor beyond that is refused as torch does on a GPU.
        before: Called with the name of each operation before it runs: raises what a device would.
        rounded: What becomes of keys and queries before they are multiplied, on a device that
            rounds.
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
        self._before = before
        self._rounded = rounded
        self._taken: list[weakref.ref[torch.Tensor]] = []

    def free(self) -> int:
        tensors = [(ref, ref()) for ref in self._taken]
        self._taken = [ref for ref, tensor in tensors if tensor is not None]
        return self.memory - sum(tensor.nbytes for _, tensor in tensors if tensor is not None)

    def bound_scratch(self, size: int) -> None:
        """Nothing to bound: FAISS takes host memory."""

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
        room = torch.empty((rows, width), dtype=torch.float32, device="cpu")
        self._taken.append(weakref.ref(room))
        return room

    def nearest(
        self, keys: torch.Tensor, queries: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import faiss

        self._before("nearest")
        scores, places = faiss.knn(
            self._rounded(queries).numpy(),
            self._rounded(keys).numpy(),
            k,
            metric=faiss.METRIC_INNER_PRODUCT,
        )
        return torch.from_numpy(scores), torch.from_numpy(places)
