"""Sums of attention weights per group over a live run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.replay.groups import Group, Groups
from dualform.replay.reducer import Pending
from dualform.replay.tiles import LiveTile


@dataclass(frozen=True)
class SumsResult:
    """Total attention weight per group.

    Attributes:
        groups: Their values, ascending, null last.
        values: float64 [n, groups].
        counts: int64 [groups], rows per group.
    """

    groups: list[Group]
    values: np.ndarray
    counts: np.ndarray


class Sums(Pending):
    """Adds weights up per group in float64.

    Args:
        queries: Their number.
        group_by: A metadata column.
        absolute: Sum |weight|.
    """

    def __init__(self, queries: int, group_by: str, absolute: bool) -> None:
        super().__init__()
        self._groups = Groups(group_by)
        self._absolute = absolute
        self._totals = torch.zeros(0, queries, dtype=torch.float64)
        self._counts = np.zeros(0, np.int64)

    def update(self, tile: LiveTile, weights: torch.Tensor) -> None:
        """Take a tile."""
        codes = self._groups.codes(tile)
        room = len(self._totals)
        if len(self._groups) > room:
            more = max(len(self._groups) - room, room)
            self._totals = torch.cat([self._totals, self._totals.new_zeros(more, weights.shape[0])])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        wide = weights.T.double()
        self._totals.index_add_(0, torch.from_numpy(codes), wide.abs() if self._absolute else wide)
        self._counts += np.bincount(codes, minlength=len(self._counts))

    def result(self) -> SumsResult:
        """The answer.

        Raises:
            ReplayError: The replay has not ended.
        """
        self._check_finished()
        groups, order = self._groups.ordered()
        return SumsResult(groups, self._totals.numpy()[order].T.copy(), self._counts[order])
