"""Every attention weight in row order, chunk by chunk, each the float32 nearest to the exact one.

Inside a shard rows lie grouped by (task, label); a chunk gathers its rows' keys wherever they lie.
What is held at a time is one chunk and one tile, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dualform.engine.memory.exact import ExactWeights
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import TILE_BYTES, Shard, Stop, check_stop
from dualform.store.encoding import FLOAT32

CHUNK_BYTES = 1 << 20
_CHUNK_ROWS = 1 << 14


def weights_in_row_order(
    layer: Layer, queries: torch.Tensor, chunk_bytes: int, stop: Stop | None
) -> Iterator[tuple[int, np.ndarray]]:
    """Attention weights of all rows.

    Args:
        layer: Whose rows.
        queries: float32 [n, d_in], finite.
        chunk_bytes: Bytes of a chunk's weights, at most, unless one row has more.
        stop: Asked between tiles.

    Returns:
        The first row's id, ascending, and weights float32 [n, m] of the m rows from there on. The
        weights of a key that is not finite are not finite either.
    """
    exact = ExactWeights(queries)
    rows = chunk_rows(len(queries), chunk_bytes)
    for shard in layer.shards:
        order = in_row_order(layer, shard)
        for first in range(0, shard.rows, rows):
            chunk = order[first : first + rows]
            start = int(layer.space.ids[shard.start + chunk[0]])
            yield start, chunk_weights(layer, shard, chunk, exact, stop)


def chunk_rows(queries: int, chunk_bytes: int) -> int:
    """How many rows a chunk of so many bytes has for so many queries, at most."""
    return max(1, min(_CHUNK_ROWS, chunk_bytes // (4 * queries)))


def in_row_order(layer: Layer, shard: Shard) -> np.ndarray:
    """Where in a shard its rows are, in the order of their ids: int64 [rows]."""
    return np.argsort(layer.space.ids[shard.start : shard.start + shard.rows])


def chunk_weights(
    layer: Layer, shard: Shard, chunk: np.ndarray, exact: ExactWeights, stop: Stop | None
) -> np.ndarray:
    """The weights of these rows of a shard, int64 [m]: float32 [n, m]."""
    tile = max(1, TILE_BYTES // FLOAT32.row_bytes(layer.d_in))
    parts = []
    for start in range(0, len(chunk), tile):
        check_stop(stop)
        inside = chunk[start : start + tile]
        keys = shard.keys.pick(inside)
        parts.append(exact.of(keys, layer.finite[shard.start + inside], stop))
    return np.concatenate(parts, axis=1)
