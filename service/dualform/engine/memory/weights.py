"""Attention weights of a tile: queries times keys, in a precision that can be trusted.

BLAS copies what it multiplies with many queries, from wherever it lies, and reads it row by row for
a few; there it takes twice as long for rows that are not aligned, as a mapped index's keys are not.
FAISS's loop over rows takes no longer than reading them does. It adds up in another order than
BLAS: which of them multiplies a shard is for the index that was opened to say, and nobody else.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dualform.engine.context import multiplies_in_float32
from dualform.engine.threads import over_shards

ONE_BY_ONE = 3
"""So many queries at most are multiplied one after the other."""

_MANY = 32
"""Fewer queries than these take twice as long on the right of a product."""

_FLOAT32_SAFE = 1e37
_WIDENED = 1 << 20
"""Numbers of keys that are held in float64 at a time."""

_PIECE_BYTES = 8 << 20
"""Fewer bytes of keys are not worth a thread of their own, nor FAISS's loop."""


def needs_float64(longest: float, max_norm: float) -> bool:
    """Whether float32 could overflow on the way, or the process allows reduced-precision products.

    Args:
        longest: The largest Euclidean norm of a query.
        max_norm: At least that of a key.
    """
    # The query's own length too: its projections on the sketches' directions are float32.
    return longest * max(max_norm, 1.0) > _FLOAT32_SAFE or not multiplies_in_float32()


def weights_by_row(
    queries: torch.Tensor, keys: torch.Tensor, *, wide: bool, faiss: bool = False
) -> torch.Tensor:
    """As `tile_weights`; of many queries row by row in memory, as sums by group take them."""
    if wide or len(queries) < _MANY:
        return tile_weights(queries, keys, wide=wide, faiss=faiss)
    return (keys @ queries.T).T


def tile_weights(
    queries: torch.Tensor, keys: torch.Tensor, *, wide: bool, faiss: bool = False
) -> torch.Tensor:
    """Attention weights, [n, rows]; float64 if wide, else float32.

    Args:
        queries: float32 [n, d_in].
        keys: float32 [rows, d_in], one after the other.
        wide: As `needs_float64` says.
        faiss: Whether FAISS multiplies a few queries, as the tile says.
    """
    if wide:
        pieces = keys.split(max(64, _WIDENED // keys.shape[1]))
        return torch.cat([queries.double() @ some.double().T for some in pieces], dim=1)
    if faiss and len(queries) <= ONE_BY_ONE:
        return _row_by_row(queries, keys)  # of aligned keys too: the same weights wherever they lie
    return queries @ keys.T


def faiss_pays(rows: int, width: int) -> bool:
    """Whether FAISS's loop is worth loading it, for a shard of so many rows of float32 [width]."""
    return rows * width * 4 >= _PIECE_BYTES


def faiss_is_there() -> bool:
    """Whether FAISS is installed; loads it, and the threads that it brings."""
    return _faiss() is not None


@cache
def _faiss() -> Any:
    try:
        import faiss
    except (ImportError, RuntimeError):  # then keys are copied to where they are aligned
        return None
    return faiss


def _row_by_row(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries @ keys.T, each query in turn and each thread its share of the rows."""
    found = np.empty((len(queries), len(keys)), np.float32)
    threads = max(1, min(torch.get_num_threads(), keys.nbytes // _PIECE_BYTES))
    ends = [len(keys) * number // threads for number in range(threads + 1)]

    def multiply(rows: slice) -> None:
        for query, out in zip(queries.numpy(), found, strict=True):
            inner_products(query, keys[rows].numpy(), out[rows])

    over_shards(multiply, [slice(*pair) for pair in pairwise(ends)], 1)
    return torch.from_numpy(found)


def inner_products(query: np.ndarray, keys: np.ndarray, out: np.ndarray) -> None:
    """A query float32 [d] times keys float32 [rows, d], aligned or not, into float32 [rows]."""
    faiss = _faiss()
    pointers = (faiss.swig_ptr(np.ascontiguousarray(each)) for each in (out, query, keys))
    faiss.fvec_inner_products_ny(*pointers, keys.shape[1], len(keys))
