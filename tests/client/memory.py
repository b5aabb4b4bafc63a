"""A small memory whose every number the tests know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from synthetic import make_index

ROWS, D_IN, D_OUT, LR = 600, 12, 5, 0.1


@dataclass(frozen=True)
class Memory:
    """The index at `path`, and what it was made of."""

    path: Path
    keys: np.ndarray
    values: np.ndarray
    label: list[int | None]
    task: list[str | None]

    def weights(self, queries: np.ndarray) -> np.ndarray:
        """float64 [n, rows]: every attention weight."""
        weights: np.ndarray = queries.astype(np.float64) @ self.keys.astype(np.float64).T
        return weights


def make_memory(directory: Path) -> Memory:
    """Labels 0 to 3, two tasks, both with gaps; seven rows per step, several shards."""
    rng = np.random.default_rng(7)
    keys = rng.standard_normal((ROWS, D_IN)).astype(np.float32)
    values = rng.standard_normal((ROWS, D_OUT)).astype(np.float32)
    label = [None if t % 50 == 0 else int(t % 4) for t in range(ROWS)]
    task = [None if t % 90 == 0 else ("mnist", "fashion")[t % 2] for t in range(ROWS)]
    path = make_index(
        directory,
        keys,
        values,
        shard_rows=128,
        lr=LR,
        label=list(label),
        task=list(task),
        noise=rng.standard_normal(ROWS).tolist(),
        seen=[t % 3 == 0 for t in range(ROWS)],
    )
    return Memory(path, keys, values, label, task)
