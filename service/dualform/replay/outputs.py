"""The dual output of a live run: every row's contribution, with coefficients known beforehand."""

from __future__ import annotations

import numpy as np
import torch

from dualform.engine.totals.coefficients import left_behind
from dualform.record.sink import State
from dualform.replay.errors import ReplayError
from dualform.replay.reducer import Pending
from dualform.replay.tiles import LiveTile
from dualform.store.ledger import Ledger
from dualform.store.recording_format import LayerSpec

CHUNK = 256
"""How many rows are added up in float32, before float64: contributions cancel over many rows, so
whole tiles would lose more (docs/decisions/0004-outputs-in-float64.md)."""


class DualOutput(Pending):
    """Adds (c_t x_t.x + c'_t) e_t up over all rows, into float64, from the initial part on.

    Args:
        queries: float32 [n, d_in], finite.
        spec: The layer.
        ledger: Of the first training: a row's coefficient depends on the steps after it.
        initial: The state before the first step.
    """

    def __init__(
        self, queries: torch.Tensor, spec: LayerSpec, ledger: Ledger, initial: State
    ) -> None:
        super().__init__()
        own = ledger.coefficients(spec.weight, ledger.steps)
        self._weight = torch.from_numpy(own.c)
        wide = queries.double()
        self._total = wide @ torch.from_numpy(left_behind(initial, spec.weight, own)).T
        self._bias: torch.Tensor | None = None
        if spec.bias is not None:
            of_bias = ledger.coefficients(spec.bias, ledger.steps)
            self._bias = torch.from_numpy(of_bias.c)
            self._total += torch.from_numpy(left_behind(initial, spec.bias, of_bias))

    def update(self, tile: LiveTile, weights: torch.Tensor) -> None:
        """Take a tile."""
        if tile.values is None:
            raise ReplayError("the dual output needs values; record with values=True")
        factors = weights.to(torch.float64, copy=True).mul_(self._weight[tile.steps])
        if self._bias is not None:
            factors += self._bias[tile.steps]
        if weights.dtype == torch.float64:
            self._total += factors @ tile.values.double()
            return
        own = factors.float()
        for start in range(0, own.shape[1], CHUNK):
            rows = slice(start, start + CHUNK)
            self._total += own[:, rows] @ tile.values[rows]

    def result(self) -> np.ndarray:
        """float32 [n, d_out].

        Raises:
            ReplayError: The replay has not ended.
        """
        self._check_finished()
        return np.asarray(self._total.float().numpy())
