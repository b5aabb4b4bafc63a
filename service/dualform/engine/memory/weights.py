"""Attention weights of a tile: queries times keys, in a precision that can be trusted."""

from __future__ import annotations

import torch

from dualform.engine.context import multiplies_in_float32
from dualform.engine.memory.shards import Shard

_FLOAT32_SAFE = 1e37


def needs_float64(query_norms: torch.Tensor, shard: Shard) -> bool:
    """Whether float32 could overflow on the way, or the process allows reduced-precision products.

    Args:
        query_norms: float64 [n].
        shard: Whose keys.
    """
    # The query's own length too: its projections on the sketches' directions are float32.
    longest = float(query_norms.max()) * max(shard.max_norm, 1.0)
    return longest > _FLOAT32_SAFE or not multiplies_in_float32()


def tile_weights(queries: torch.Tensor, keys: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """Attention weights, [n, rows]; float64 if wide, else float32.

    Args:
        queries: float32 [n, d_in].
        keys: float32 [rows, d_in], on the same device.
        wide: As `needs_float64` says.
    """
    if wide:
        return queries.double() @ keys.double().T
    return queries @ keys.T
