"""What tests of devices share: paces that are known, failures to order, a memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from synthetic import make_index

from dualform.engine.devices.place import Pace, Paces

FAST = Paces(*[Pace(1e-6, 1e-12, 1e-13)] * 4, upload=1e-12)
SLOW = Paces(*[Pace(1.0, 1e-3, 1e-3)] * 4, upload=1e-3)
WAIT = 20.0
"""Seconds that rows may take to be where they belong."""


class Failing:
    """Raises what it is told to, once the operation of that name comes."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.at = "nearest"

    def __call__(self, what: str) -> None:
        if self.error is not None and what == self.at:
            raise self.error


def tf32(tensor: torch.Tensor) -> torch.Tensor:
    """As TF32 has numbers: 10 bits behind the first."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def repeats(folder: Path) -> tuple[Path, np.ndarray]:
    """An index of 10,000 rows, many of them repeats, and their keys."""
    rng = np.random.default_rng(3)
    keys = rng.standard_normal((3000, 40)).astype(np.float32)[rng.integers(0, 3000, 10_000)]
    values = rng.standard_normal((10_000, 6)).astype(np.float32)
    labels = rng.integers(0, 5, len(keys))
    return make_index(folder, keys, values, rows_per_step=2500, shard_rows=1500, label=labels), keys
