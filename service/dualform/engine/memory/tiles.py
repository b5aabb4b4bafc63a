"""A tile: a block of rows of one layer, be it of an index's shard or of a live training run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.engine.rows.table import Table


@dataclass(frozen=True)
class Tile:
    """A block of rows of one layer.

    Attributes:
        table: What is known of its rows.
        positions: int64 [rows], ascending: where in the table they are.
        keys: float32 [rows, d_in], aligned or not.
        values: float32 [rows, d_out], or None where nothing asked for them.
        max_norm: Upper bound of the finite keys' Euclidean norms.
        finite: bool [rows]: which keys are; None where all are.
        faiss: Whether FAISS multiplies its rows with a few queries.
    """

    table: Table
    positions: np.ndarray
    keys: torch.Tensor
    values: torch.Tensor | None
    max_norm: float
    finite: np.ndarray | None = None
    faiss: bool = False

    @property
    def ids(self) -> np.ndarray:
        """Row ids, int64 [rows]."""
        return np.asarray(self.table.ids[self.positions])

    @property
    def steps(self) -> np.ndarray:
        """int64 [rows]."""
        return np.asarray(self.table.steps[self.positions])

    def select(self, which: np.ndarray) -> Tile:
        """Those rows of the tile at these places, int64 [m] and ascending."""
        rows = torch.from_numpy(which)
        return Tile(
            self.table,
            self.positions[which],
            self.keys[rows],
            None if self.values is None else self.values[rows],
            self.max_norm,
            None if self.finite is None else self.finite[which],
            self.faiss,
        )
