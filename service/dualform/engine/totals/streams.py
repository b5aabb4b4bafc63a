"""Every attention weight in row order, chunk by chunk, each the float32 nearest to the exact one.

Inside a shard rows lie grouped by (task, label); a chunk gathers its rows' keys wherever they lie.
What is held at a time is one chunk and one tile, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from dualform.engine.errors import CancelledError
from dualform.engine.memory.exact import ExactWeights
from dualform.engine.memory.layer import Layer
from dualform.engine.memory.shards import TILE_BYTES, Stop
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
    rows = max(1, min(_CHUNK_ROWS, chunk_bytes // (4 * len(queries))))
    tile = max(1, TILE_BYTES // FLOAT32.row_bytes(layer.d_in))
    for shard in layer.shards:
        ids = layer.space.ids[shard.start : shard.start + shard.rows]
        order = np.argsort(ids)
        for first in range(0, shard.rows, rows):
            chunk = order[first : first + rows]
            weights = np.empty((len(queries), len(chunk)), np.float32)
            for start in range(0, len(chunk), tile):
                if stop is not None and stop():
                    raise CancelledError("the caller gave up; the scan stopped between two tiles")
                inside = chunk[start : start + tile]
                keys = shard.keys.pick(inside)
                finite = layer.finite[shard.start + inside]
                weights[:, start : start + tile] = exact.of(keys, finite)
            yield int(ids[chunk[0]]), weights
