"""Outputs in a replay where rows have no coefficients: the layer is followed while it trains."""

from __future__ import annotations

import numpy as np
import torch

from dualform.engine.memory.tiles import Tile
from dualform.engine.rows.groups import Groups
from dualform.engine.totals.followed import outputs_of
from dualform.optimizers import LayerRun
from dualform.replay.answers import DualOutput


class FollowedOutput(DualOutput):
    """A layer's output by the parts of its weights, under the first run's ledger.

    Args:
        run: The layer, from the state before the first step, without parts.
        queries: float32 [n, d_in].
        end: After how many steps.
        groups: The groups to keep apart; a value gets its part when it first comes.
    """

    def __init__(self, run: LayerRun, queries: torch.Tensor, end: int, groups: Groups) -> None:
        super().__init__(np.empty(0), None, groups)
        self._run = run
        self._queries = queries
        self._end = end
        self._parts = 0

    def follow(self, tile: Tile, chosen: np.ndarray) -> None:
        """Take whole steps.

        Args:
            tile: All of their rows.
            chosen: bool [rows], those that take part; every row counts for the preconditioner.
        """
        assert tile.values is not None
        codes = np.where(chosen, self.codes(tile), -1)
        while self._parts < len(self._groups):
            self._run.add_part()
            self._parts += 1
        steps = tile.steps
        bounds = np.flatnonzero(np.diff(steps)) + 1
        for rows in np.split(np.arange(len(steps)), bounds):
            step = int(steps[rows[0]])
            if step >= self._end:
                return
            which: list[slice | torch.Tensor | None] = [None] * self._parts
            for code in np.unique(codes[rows]).tolist():
                if code >= 0:
                    which[code] = torch.from_numpy(np.flatnonzero(codes[rows] == code))
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            self._run.take(step, tile.keys[span], tile.values[span], which)

    def nbytes(self, groups: int) -> int:
        return self._run.bytes_with(groups)

    def finish(self) -> None:
        """Take the steps without rows that are left."""
        self._run.advance(self._end)
        self._initial = outputs_of(self._run.initial(), self._queries)
        d_out = self._initial.shape[1]
        parts = [outputs_of(self._run.part(number), self._queries) for number in range(self._parts)]
        shape = (len(self._queries), self._parts, d_out)
        self._outputs = np.stack(parts, axis=1) if parts else np.zeros(shape)
        super().finish()

    def _of_rows(self) -> np.ndarray:
        return self._outputs[:, self._groups.ordered()[1]]
