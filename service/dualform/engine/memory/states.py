"""A layer's stored weights: before training, after it, on the way, and what its rows add up to.

The files are mapped and never copied whole, so that memory does not grow with layers. A file is
checked before its bytes are first used.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from dualform.engine.memory.float64 import BLOCK_BYTES, FEW, dots
from dualform.store.files import FileEntry, check_digest, check_size
from dualform.store.index import REBUILD

State = Mapping[str, torch.Tensor]
"""Tensors by name, as in the file: parameters, and "momentum:<parameter>"; only to be read."""


class States:
    """The state files of an index; thread-safe.

    Args:
        directory: The index.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._mapped: dict[str, State] = {}

    def read(self, entry: FileEntry) -> State:
        """Map a file.

        Raises:
            DamagedError: It does not hold what was written.
        """
        with self._lock:
            # Reading beyond the end of a file that was cut off under the map would be fatal.
            path = check_size(self._directory, entry, REBUILD)
            if entry.name not in self._mapped:
                check_digest(self._directory, entry, REBUILD)
                self._mapped[entry.name] = load_file(path)
            return self._mapped[entry.name]


def product(queries: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Queries times a weight, all in float64: [n, d_out].

    Args:
        queries: float64 [n, d_in].
        weight: float32 or float64 [d_out, d_in]; float32 is widened a few rows at a time.
    """
    if len(queries) <= FEW:
        return torch.from_numpy(dots(weight.numpy(), queries.numpy()))
    if weight.dtype == torch.float64:
        return queries @ weight.T
    out = torch.empty((len(queries), len(weight)), dtype=torch.float64)
    step = max(1, BLOCK_BYTES // (8 * weight.shape[1]))
    wide = torch.empty((min(step, len(weight)), weight.shape[1]), dtype=torch.float64)
    for first in range(0, len(weight), step):
        rows = weight[first : first + step]
        block = wide[: len(rows)].copy_(rows)
        out[:, first : first + step] = queries @ block.T
    return out
