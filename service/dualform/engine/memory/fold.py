"""One scan, many answers: the tiles of a layer's memory, folded into reducers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import Stop, Tile
from dualform.engine.memory.weights import needs_float64, tile_weights


class Reducer(Protocol):
    """Takes tiles with their attention weights, in order of position.

    Attributes:
        values: Whether it needs the tiles' values.
    """

    values: bool

    def update(self, tile: Tile, weights: torch.Tensor) -> None:
        """Take a tile and its weights, float32 or float64 [n, rows], which stay as they are."""


def fold(
    layer: Layer,
    queries: torch.Tensor,
    selected: np.ndarray,
    reducers: Sequence[Reducer],
    device: torch.device,
    stop: Stop | None,
) -> None:
    """Multiply every selected row once, and give the weights to every reducer.

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in], finite.
        selected: bool [total], by position.
        reducers: Who takes the tiles.
        device: Where tiles are multiplied.
        stop: Asked between tiles.
    """
    norms = torch.linalg.vector_norm(queries.double(), dim=1)
    own = queries.to(device)
    values = any(reducer.values for reducer in reducers)
    for shard in layer.shards:
        wide = needs_float64(norms, shard)
        inside = selected[shard.start : shard.start + shard.rows]
        tiles = shard.tiles(inside, len(queries), values=values, device=device, stop=stop)
        for tile in tiles:
            weights = tile_weights(own, tile.keys, wide=wide)
            for reducer in reducers:
                reducer.update(tile, weights)
