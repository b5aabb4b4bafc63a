"""Which of an index's shards a machine opens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from dualform.engine.api.index import Index
from dualform.engine.devices.devices import Devices
from dualform.engine.errors import FailedPreconditionError
from dualform.engine.messages.versions import version_at
from dualform.questions.placement import GPU_MEMORY
from dualform.store.index import IndexManifest, RowSpace

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of shard numbers, ascending."""


@dataclass(frozen=True)
class Part:
    """Some shards of a published index; says enough to be opened anywhere, at any time.

    Attributes:
        path: The index's directory, the same on every machine.
        version: First digits of its manifest's SHA-256.
        shards: For each row space, which.
        device: As `dualform.questions.placement.device_names` gives it.
        gpu_memory: As `Index.open` takes it.
        use_faiss: Likewise.
    """

    path: Path
    version: str
    shards: tuple[Ranges, ...]
    device: str | tuple[str, ...] = "auto"
    gpu_memory: float | str = GPU_MEMORY
    use_faiss: bool = True

    def numbers(self, space: int) -> list[int]:
        """The shards of a row space, ascending."""
        return [number for first, last in self.shards[space] for number in range(first, last)]

    def open(self) -> Index:
        """Open it here.

        Raises:
            FailedPreconditionError: Another version of the index lies there.
            dualform.store.StoreError: There is none, or it is damaged.
        """
        found = version_at(self.path)
        if found.name and found.name != self.version:
            raise FailedPreconditionError(
                f"{self.path} is version {found.name} here, and version {self.version} is served; "
                "give every machine the same index, or let the server read its configuration "
                "again (SIGHUP) where it was replaced",
                reason="OTHER_VERSION",
            )
        numbers = [self.numbers(space) for space in range(len(self.shards))]
        devices = _devices(self.device, self.gpu_memory)
        return Index.open(self.path, devices=devices, use_faiss=self.use_faiss, shards=numbers)


@cache
def _devices(device: str | tuple[str, ...], gpu_memory: float | str) -> Devices:
    """Those of this process: its indexes share their memory."""
    return Devices.find(device, gpu_memory)


def split(manifest: IndexManifest, machines: int) -> list[tuple[Ranges, ...]]:
    """Contiguous shards for each of so many machines, about as many rows for each.

    Returns:
        For each machine and row space; no range where there are fewer shards than machines.
    """
    cuts = [_cuts(space, machines) for space in manifest.spaces]
    return [
        tuple(((cut[m], cut[m + 1]),) if cut[m] < cut[m + 1] else () for cut in cuts)
        for m in range(machines)
    ]


def _cuts(space: RowSpace, machines: int) -> list[int]:
    """Where each machine's shards begin, and where the last one's end: int [machines + 1]."""
    middles = np.array([shard.start + shard.rows / 2 for shard in space.shards])
    owners = (middles * machines / max(1, space.rows)).astype(int)
    return [int(cut) for cut in np.searchsorted(owners, np.arange(machines + 1))]
