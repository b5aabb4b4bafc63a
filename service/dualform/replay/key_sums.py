"""Sums of keys per group, kept while training: signed sums of any later query follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dualform.replay.groups import Group, Groups
from dualform.replay.reducer import Pending
from dualform.replay.tiles import LiveTile


@dataclass(frozen=True)
class KeySumsResult:
    """Keys added up per group.

    Attributes:
        groups: Their values, ascending, null last.
        keys: float32 [groups, d_in], added up in float32.
        counts: int64 [groups], rows per group.
    """

    groups: list[Group]
    keys: np.ndarray
    counts: np.ndarray

    def sums(self, queries: np.ndarray) -> np.ndarray:
        """Signed total weight per group, float64 [n, groups], of queries float32 [n, d_in]."""
        wide = torch.from_numpy(queries).double()
        parts = [wide @ part.double().T for part in torch.from_numpy(self.keys).split(8192)]
        return torch.cat(parts, 1).numpy()


class KeySums(Pending):
    """Adds keys up per group. No query is needed before training ends.

    Memory: 4 d_in bytes per group.

    Args:
        group_by: A metadata column, such as the place of a token in the training text.
    """

    def __init__(self, group_by: str) -> None:
        super().__init__()
        self._groups = Groups(group_by)
        self._sums = torch.zeros(0, 0)
        self._counts = np.zeros(0, np.int64)

    def update(self, tile: LiveTile, weights: torch.Tensor) -> None:
        """Take a tile; its weights do not matter."""
        codes = self._groups.codes(tile)
        room = len(self._sums)
        if len(self._groups) > room:
            d_in, more = tile.keys.shape[1], max(len(self._groups) - room, room // 4)
            self._sums = torch.cat([self._sums.reshape(room, d_in), torch.zeros(more, d_in)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._sums.index_add_(0, torch.from_numpy(codes), tile.keys)
        self._counts += np.bincount(codes, minlength=len(self._counts))

    def result(self) -> KeySumsResult:
        """The sums.

        Raises:
            ReplayError: Training has not ended.
        """
        self._check_finished()
        groups, order = self._groups.ordered()
        return KeySumsResult(groups, self._sums.numpy()[order], self._counts[order])
