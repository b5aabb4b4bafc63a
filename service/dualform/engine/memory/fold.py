"""One scan, many answers: tiles folded into reducers.

The engine has one idea: a question is a reducer that takes tiles and their attention weights. (The
exception is totals/followed.py, which has to see the training steps in order.)
What it has taken is merged with what another took of other rows, on another thread, device or
machine, or of another part of a training: any split of a memory gives the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop
from dualform.engine.memory.tiles import Tile
from dualform.engine.memory.weights import needs_float64, weights_by_row

if TYPE_CHECKING:
    from typing_extensions import Self


class Reducer(Protocol):
    """Takes tiles with their attention weights, in any order.

    Attributes:
        values: Whether it needs the tiles' values.
        once: Whether it makes no copies of a tile's keys or values, wider ones above all: then
            tiles for a single query may be large.
    """

    values: bool
    once: bool

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile and its weights, float32 or float64 [n, rows], which stay as they are."""

    def merge(self, other: Self) -> None:
        """Take what another reducer took: of the same question, and of other rows."""

    def result(self) -> object:
        """The answer about all rows that were taken."""


class Fold:
    """Queries to multiply with tiles, and the reducers that take the weights.

    Args:
        queries: float32 [n, d_in], finite.
        reducers: Who takes the tiles.
    """

    def __init__(self, queries: torch.Tensor, reducers: Sequence[Reducer]) -> None:
        self.reducers = reducers
        self._longest = float(torch.linalg.vector_norm(queries.double(), dim=1).max())
        self._queries = queries
        self._wide = (-1.0, False)  # for which norm of keys, and whether products are float64

    def weights(self, tile: Tile) -> torch.Tensor:
        """The attention weights of a tile, [n, rows]."""
        if self._wide[0] != tile.max_norm:
            self._wide = (tile.max_norm, needs_float64(self._longest, tile.max_norm))
        return weights_by_row(self._queries, tile.keys, wide=self._wide[1], faiss=tile.faiss)

    def take(self, tile: Tile) -> None:
        """Multiply every row of a tile once, and give the weights to every reducer."""
        weights = self.weights(tile)
        for reducer in self.reducers:
            reducer.update(tile, weights)


def fold(
    layer: Layer,
    queries: torch.Tensor,
    selected: np.ndarray,
    reducers: Sequence[Reducer],
    stop: Stop | None,
) -> None:
    """Fold the selected rows of a layer of an index.

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in], finite.
        selected: bool [total], by position.
        reducers: Who takes the tiles.
        stop: Asked between tiles.
    """
    asked = Fold(queries, reducers)
    values = any(reducer.values for reducer in reducers)
    once = all(reducer.once for reducer in reducers)
    for shard in layer.shards:
        inside = selected[shard.start : shard.start + shard.rows]
        for tile in shard.tiles(inside, len(queries), values=values, once=once, stop=stop):
            asked.take(tile)
