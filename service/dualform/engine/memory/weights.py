"""Attention weights of a tile: queries times keys, in a precision that can be trusted."""

from __future__ import annotations

import torch

from dualform.engine.context import multiplies_in_float32

_FLOAT32_SAFE = 1e37


def needs_float64(longest: float, max_norm: float) -> bool:
    """Whether float32 could overflow on the way, or the process allows reduced-precision products.

    Args:
        longest: The largest Euclidean norm of a query.
        max_norm: At least that of a key.
    """
    # The query's own length too: its projections on the sketches' directions are float32.
    return longest * max(max_norm, 1.0) > _FLOAT32_SAFE or not multiplies_in_float32()


def tile_weights(queries: torch.Tensor, keys: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """Attention weights, [n, rows]; float64 if wide, else float32.

    Args:
        queries: float32 [n, d_in].
        keys: float32 [rows, d_in].
        wide: As `needs_float64` says.
    """
    if wide:
        return queries.double() @ keys.double().T
    return queries @ keys.T
